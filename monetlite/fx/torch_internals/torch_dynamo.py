"""Settings, errors and logs of TorchDynamo.

| symbol | use, and what breaks when it changes |
| --- | --- |
| `_dynamo.config` | what a capture needs; graphs would break, or a model's change would go unnoticed |
| `eval_frame._stance` | says whether `torch.compile` compiles; a step would run in plain training's memory |
| `TorchDynamoException`, `FailOnRecompileLimitHit` | refusals, told from errors of the model |
| `GuardOnDataDependentSymNode` | the same, of a size that depends on data |
| `real_stack` | the person's lines, noted on errors of any class that it raises; they would end training |
| `get_compilation_metrics` | why a step was compiled once more; an error would not name the changed value |
| `calculate_time_spent` | seconds of captures; they would count as the step's |
| `CatchErrorsWrapper.__call__` | what TorchDynamo calls to compile; captures would be without their settings |
| `maybe_has_backedge` | asked where a graph ends in a loop; a function with a loop would not be captured at all |
| `RestartAnalysis` | raised to begin a capture again; such a graph would not be planned |
| `exceptions_allowed_to_be_fallback` | raised to capture inner functions; nothing of them would be planned |
| `UnsupportedMutationAliasingException` | one of these; a model's part would leave all of it unplanned |
| `compile_subgraph_reason` | attribute of a graph that is only a part of a model; a budget would be of that part |
| `grapharg`, `example_value` | a graph's inputs, real and fake; sizes that are equal once would be taken for one |
| `_get_data_attr`, `_lower_version_count_by_1` | calls for `.data`; a model that assigns it would not be planned |
| `shallow_copy_data_` | the same since torch 2.14 |
| `reset_code` | frees what is compiled; a model would be kept for good |
| `get_legacy_mod_inlinelist` | files that are captured; after a break in `nn.Sequential`, nothing would be |
| `set_code_exec_strategy` | takes back that a function is left out; the same would happen |
| `InstructionTranslator.current_tx` | tells what is captured; others would leave it out, too |
| `ListIteratorVariable.reconstruct`, `create_call_function` | hand on a loop; others' attributes would be set |
| `UserFunctionVariable.call_function` | gives results that are known; masks would be made that say nothing |
| `TensorVariable.as_proxy` | tells where a tensor comes from; masks of ones would be made whole |
| `Tensor._version` | tells that a tensor was written to; padding put into a mask of ones would be lost |
| `torch._numpy.random` | module of functions that stand for numpy's generator; other numbers would be drawn |
"""

import contextlib
import functools
import inspect
import logging
import re
import sys
import types
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self, TypeVar
from unittest import mock

import numpy
import torch
from torch import fx, nn
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, reset_code, set_code_exec_strategy
from torch._dynamo import config as _config
from torch._dynamo import disable, eval_frame, trace_rules
from torch._dynamo import utils as _utils
from torch._dynamo.bytecode_transformation import create_call_function
from torch._dynamo.convert_frame import CatchErrorsWrapper
from torch._dynamo.exc import FailOnRecompileLimitHit as FailOnRecompileLimitHit
from torch._dynamo.exc import RestartAnalysis, exceptions_allowed_to_be_fallback
from torch._dynamo.exc import TorchDynamoException as TorchDynamoException
from torch._dynamo.symbolic_convert import InstructionTranslator, InstructionTranslatorBase
from torch._dynamo.variables import ConstantVariable, ListIteratorVariable, TensorVariable, UserFunctionVariable
from torch._subclasses.fake_tensor import UnsupportedMutationAliasingException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode as GuardOnDataDependentSymNode
from torch.nn.modules import activation, container, transformer

from monetlite.fx.torch_internals.patching import patched

_F = TypeVar("_F", bound=Callable[..., Any])
_compile = CatchErrorsWrapper.__call__
RESTARTS = RestartAnalysis
"""Errors of a backend after which TorchDynamo captures a function again, by other settings of its own."""
UNSUPPORTED = exceptions_allowed_to_be_fallback
"""Errors of a backend after which it leaves a function out, and captures those that the function calls."""
REFUSALS = (TorchDynamoException, GuardOnDataDependentSymNode)
MAX_PIECES = 256
"""Programs of one function that models in pieces have: layers share it, and so do models of one class."""
_MANY_IN_VAIN = 4
"""Steps after which a function that is compiled up to a break in each, without a graph, is left out."""
_CHECKED = ("solve", "inv", "cholesky", "lu_factor", "lu", "ldl_factor")
"""Functions of `torch.linalg` that look at their result on the host, to raise where there is none."""
_LISTS = (nn.ModuleList, nn.Sequential)
_WITH_PARTS = (container, transformer, activation)
"""Torch's files that have modules with parts; attention is in the last one."""
_SPARSE = ("embedding", "embedding_bag")
"""Functions of `torch.nn.functional` that have a sparse gradient where they are asked for one."""
_RECURRENT: tuple[type[nn.Module], ...] = (nn.RNN, nn.GRU, nn.LSTM)
_CONVERSIONS = ("to", "bool", "int", "long", "float", "contiguous", "view", "reshape", "expand", "clone")
"""Methods after which a tensor of ones is still one."""
_ONES = (torch.ones, torch.ones_like, "new_ones")
_SKIPPED = re.compile(r"function marked as skipped.*?the function `(\w+)` in file `([^`]+)`", re.DOTALL)
_log = logging.getLogger("torch._dynamo")
_files_captured = trace_rules.get_legacy_mod_inlinelist
_call_function = UserFunctionVariable.call_function
_reconstruct = ListIteratorVariable.reconstruct


class LeftOut(UnsupportedMutationAliasingException):
    """One of `UNSUPPORTED`, for a graph that can't be planned."""


def dynamo_settings(**changes: Any) -> AbstractContextManager[None]:
    """Change settings of TorchDynamo for the time of a block."""
    return patched(_config.patch(**changes))


def calls_changed(
    results: Mapping[Callable[..., Any], object],
    leave_out: Collection[Callable[..., Any]],
    *,
    none_of_ones: Collection[Callable[..., Any]] = (),
    asking: Collection[Callable[..., Any]] = (),
) -> AbstractContextManager[None]:
    """Change what captures see of calls of some functions, for the time of a block.

    Args:
        results: for functions, what each call of them returns: a constant.
        leave_out: functions that take None in place of an input of one element, repeated along every dimension, and
            of ones that the captured code makes.
        none_of_ones: functions that return None of such a tensor as their first argument.
        asking: functions that return False of None, and where one of `leave_out` calls them with a mask of None.
    """
    without_mask = False

    def call(self: Any, translator: Any, args: Any, kwargs: Any) -> Any:
        nonlocal without_mask
        if self.fn in results:
            return ConstantVariable.create(results[self.fn])
        if self.fn in asking and (without_mask or (len(args) == 1 and args[0].is_constant_none())):
            return ConstantVariable.create(False)
        if self.fn in none_of_ones and args and _unless_known(args[0]) is not args[0]:
            return ConstantVariable.create(None)
        if self.fn not in leave_out:
            return _call_function(self, translator, args, kwargs)
        args = [_unless_known(item) for item in args]
        kwargs = {name: _unless_known(item) for name, item in kwargs.items()}
        given = [*zip(inspect.signature(self.fn).parameters, args, strict=False), *kwargs.items()]
        before = without_mask
        without_mask = any(name.endswith("mask") and item.is_constant_none() for name, item in given)
        try:
            return _call_function(self, translator, args, kwargs)
        finally:
            without_mask = before

    return patched(mock.patch.object(UserFunctionVariable, "call_function", call))


def _unless_known(variable: Any) -> Any:
    """A variable of a capture; None for a tensor that is known to be of ones, though it may have been converted."""
    known = isinstance(variable, TensorVariable) and _is_of_ones(variable.as_proxy().node)
    return ConstantVariable.create(None) if known else variable


def _is_of_ones(node: fx.Node) -> bool:
    """True for an input of one element, repeated, and for ones that were made and not written to since."""
    tensor: torch.Tensor = node.meta["example_value"]
    if node.op == "placeholder":
        strides = tensor.stride()
        return bool(strides) and all(isinstance(item, int) and item == 0 for item in strides)
    if tensor._version:
        return False
    if node.op == "call_method" and node.target in _CONVERSIONS:
        return isinstance(node.args[0], fx.Node) and _is_of_ones(node.args[0])
    return node.target in _ONES


def drawing_functions(model: nn.Module) -> list[tuple[types.ModuleType, str]]:
    """Functions beside a model's classes that draw from numpy's generator, by module and name.

    Taken apart, they would be compiled anew for each number that they draw.
    """
    names = dict.fromkeys(type(item).__module__ for item in model.modules())
    return [
        (module, name)
        for module in (sys.modules.get(item) for item in names)
        if module is not None  # as a file's that was run and not imported
        for name, function in list(vars(module).items())
        if isinstance(function, types.FunctionType) and _draws_from_numpy(function)
    ]


def _draws_from_numpy(function: types.FunctionType) -> bool:
    names = function.__code__.co_names
    return "random" in names and any(function.__globals__.get(name) is numpy for name in names)


def taken_apart(left_alone: Iterable[tuple[types.ModuleType, str]] = ()) -> AbstractContextManager[None]:
    """Have TorchDynamo take functions apart in many pieces without log lines, for the time of a block.

    Layers of a model often have a function in common, which is compiled for each. Recurrent modules run by torch's
    own kernels, and so do functions that look at their results or have sparse gradients: what calls them is taken
    apart there. A loop is taken apart once for each round. TorchDynamo would leave out its whole function.

    Args:
        left_alone: functions that run as they are, by module and name.
    """
    kept_plain = [mock.patch.object(kind, "forward", _disabled(kind.forward)) for kind in _RECURRENT]
    kept_plain += [
        mock.patch.object(torch.linalg, name, _disabled(getattr(torch.linalg, name))) for name in _CHECKED
    ]
    kept_plain += [mock.patch.object(torch, "cond", _disabled(torch.cond))]
    kept_plain += [mock.patch.object(module, name, _disabled(getattr(module, name))) for module, name in left_alone]
    kept_plain += [mock.patch.object(InstructionTranslatorBase, "maybe_has_backedge", _no_loop)]
    kept_plain += [mock.patch.object(kind, "__iter__", _iterated) for kind in _LISTS]
    kept_plain += [mock.patch.object(ListIteratorVariable, "reconstruct", _hand_on)]
    kept_plain += [mock.patch.object(nn.functional, name, _dense_captured(name)) for name in _SPARSE]
    kept_plain += [mock.patch.object(trace_rules, "get_legacy_mod_inlinelist", _files_of_parts)]
    settings = _config.patch(
        recompile_limit=MAX_PIECES,
        accumulated_recompile_limit=4 * MAX_PIECES,
        allow_rnn=True,
        capture_scalar_outputs=False,
        capture_dynamic_output_shape_ops=False,
    )
    return patched(_only_errors(), settings, *kept_plain)


def while_compiling(settings: Callable[[], AbstractContextManager[object]]) -> AbstractContextManager[None]:
    """Change torch's state whenever TorchDynamo compiles a function, for the time of a block.

    Few steps compile anything, and changes take milliseconds to make.
    """

    def compiling(*args: Any, **kwargs: Any) -> Any:
        with settings():
            return _compile(*args, **kwargs)

    return patched(mock.patch.object(CatchErrorsWrapper, "__call__", compiling))


def left_alone(function: _F) -> _F:
    """A function that TorchDynamo runs as it is, within what is captured by others, too."""
    made: _F = disable(function)  # type: ignore[no-untyped-call]  # torch has no types for it
    return made


_disabled = functools.cache(left_alone)


@functools.cache
def _files_of_parts() -> set[str]:
    """Files whose functions TorchDynamo captures though they are torch's: those of modules with parts."""
    return {Path(module.__file__ or "").as_posix() for module in _WITH_PARTS} | _files_captured()


def captured_code() -> types.CodeType:
    """The code of the function that TorchDynamo captures at present."""
    code: types.CodeType = InstructionTranslator.current_tx().output.root_tx.f_code
    return code


@contextlib.contextmanager
def left_out(codes: Collection[types.CodeType]) -> Iterator[None]:
    """Leave functions out for the time of a block; also those that come to be among them during it.

    TorchDynamo would note with their code, for good, that it leaves them out, whoever calls them.
    """
    for code in codes:
        set_code_exec_strategy(code, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT))
    try:
        yield
    finally:
        for code in codes:
            set_code_exec_strategy(code, _FrameExecStrategy(_FrameAction.DEFAULT, _FrameAction.DEFAULT))


def forget_left_out() -> None:
    """Have the forward passes of torch's modules with parts captured, though TorchDynamo has left them out before.

    Where another model calls them at a break, it notes with their code, for good, that it leaves them out.
    """
    for code in _forwards_of_parts():
        set_code_exec_strategy(code, _FrameExecStrategy(_FrameAction.DEFAULT, _FrameAction.DEFAULT))


@functools.cache
def _forwards_of_parts() -> tuple[types.CodeType, ...]:
    kinds = [item for module in _WITH_PARTS for item in vars(module).values() if inspect.isclass(item)]
    return tuple(kind.forward.__code__ for kind in kinds if issubclass(kind, nn.Module) and "forward" in vars(kind))


def _no_loop(_translator: Any) -> bool:
    return False


class BreaksAgain:
    """Functions that TorchDynamo compiles up to a break in one step after another, without a graph to be planned.

    Some can't be kept: one that goes on in a loop with an iterator or a bound method of its own is compiled at each
    round. After a few such steps it is left out.
    """

    def __init__(self) -> None:
        self._now: set[types.CodeType] = set()
        self._steps: Counter[types.CodeType] = Counter()

    def noted(self) -> AbstractContextManager[None]:
        """Note the functions that are compiled up to a break, for the time of a block."""

        def note(translator: Any) -> bool:
            self._now.add(translator.f_code)
            return False

        return patched(mock.patch.object(InstructionTranslatorBase, "maybe_has_backedge", note))

    def step_ends(self, *, in_vain: bool) -> None:
        """Leave out what has been compiled in vain in many steps."""
        if in_vain:
            self._steps.update(self._now)
            for code in self._now:
                if self._steps[code] == _MANY_IN_VAIN:
                    set_code_exec_strategy(code, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT))
        self._now.clear()


def _iterated(modules: Any) -> Iterator[nn.Module]:
    """An iterator over a list of modules that TorchDynamo can hand on from one graph to the next."""
    return iter(list(modules._modules.values()))


class _Remaining:
    """An iterator over what is left of a list at a break.

    TorchDynamo would hand on one of Python's own, and know items by how far they are from its next one. It sets
    attributes of modules when the iterator has gone on: it would set those of other modules.
    """

    def __init__(self, items: Iterable[Any]) -> None:
        self.items, self.at = list(items), 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if self.at == len(self.items):
            raise StopIteration
        self.at += 1
        return self.items[self.at - 1]


def _hand_on(self: Any, codegen: Any) -> None:
    """Write code that makes the rest of a list's iterator."""
    codegen.add_push_null(lambda: codegen.load_import_from(__name__, _Remaining.__name__))
    _reconstruct(self, codegen)
    codegen.extend_output(create_call_function(1, False))


@functools.cache
def _dense_captured(name: str) -> Callable[..., Any]:
    """A function of `torch.nn.functional` that TorchDynamo leaves alone where its gradient is sparse."""
    own = getattr(nn.functional, name)
    plain, place = _disabled(own), list(inspect.signature(own).parameters).index("sparse")

    def run(*args: Any, **kwargs: Any) -> Any:
        sparse = kwargs["sparse"] if "sparse" in kwargs else len(args) > place and args[place]
        return plain(*args, **kwargs) if sparse else own(*args, **kwargs)

    return run


@contextlib.contextmanager
def _only_errors() -> Iterator[None]:
    before = _log.level
    _log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        _log.setLevel(before)


@contextlib.contextmanager
def switched_on() -> Iterator[None]:
    """Have `torch.compile` compile for the time of a block, where a person has switched that off for other code.

    `torch.compiler.set_stance` does so, and TORCH_COMPILE_DISABLE=1 in the environment.
    """
    usual: dict[str, Any] = {"disable": False, "error_on_recompile": False}
    if eval_frame._stance.stance == "default" and not any(getattr(_config, name) for name in usual):
        yield
        return
    with torch.compiler.set_stance("default"), _config.patch(usual):
        yield


@contextlib.contextmanager
def allow_programs(count: int) -> Iterator[None]:
    """Allow a number of programs for one function, for the time of training steps.

    This takes no lock, as steps of several threads run at a time. A thread that finds the limit raised leaves it
    as it is, so that no order of threads can raise it for good.
    """
    before = _config.recompile_limit, _config.accumulated_recompile_limit
    if before[0] == count:
        yield
        return
    _config.recompile_limit, _config.accumulated_recompile_limit = count, max(before[1], 4 * count)
    try:
        yield
    finally:
        _config.recompile_limit, _config.accumulated_recompile_limit = before


def forget_programs(code: types.CodeType) -> None:
    """Free what is compiled for a code object, which TorchDynamo and the code object would keep alive in turn."""
    reset_code(code)


def recompile_reason() -> str:
    """Why TorchDynamo has just compiled a function once more: `1/14: model.n == 7    # s.n += 1  # model.py:7`."""
    metrics = _utils.get_compilation_metrics()
    return (metrics[-1].recompile_reason if metrics else None) or ""


def arose_in_capture(error: Exception) -> bool:
    """True for an error of any class that TorchDynamo's own code raised in a capture (a symbol as an index)."""
    return hasattr(error, "real_stack") and not isinstance(error, FailOnRecompileLimitHit)


def seconds_captured() -> float:
    """Seconds that TorchDynamo has taken for captures in this process."""
    return float(_utils.calculate_time_spent()["total_wall_time"])


DATA_OF = torch._C._autograd._get_data_attr  # type: ignore[attr-defined]  # torch's stubs lack it
"""Call in a capture for a tensor's `.data`."""
ASSIGN_DATA = torch.Tensor.set_, getattr(torch.ops.aten, "shallow_copy_data_", torch.Tensor.set_)
"""Calls in a capture for an assignment to it: before torch 2.14, and since then."""


def lowers_change_count(node: fx.Node) -> bool:
    """True for the call in a capture that follows on an assignment to `.data`, which no change is counted for."""
    return getattr(node.target, "__name__", "") == "_lower_version_count_by_1"


def given_tensor(node: fx.Node) -> torch.Tensor | None:
    """The real tensor that a capture's input is; None for another node."""
    argument = node.meta.get("grapharg")
    given = None if argument is None else argument.example
    return given if isinstance(given, torch.Tensor) else None


def captured_shapes(graph: fx.GraphModule) -> dict[int, tuple[Any, ...]]:
    """The shapes of the tensors that a function is captured with, by their ids; sizes that vary are symbolic."""
    return {
        id(given): tuple(fake.shape)
        for node in graph.graph.find_nodes(op="placeholder")
        if (given := given_tensor(node)) is not None
        and isinstance(fake := node.meta.get("example_value"), torch.Tensor)
    }


def break_reason(graph: fx.GraphModule) -> Any:
    """Why a graph is only a part of a function, with `reason` and `user_stack`; None for all of it."""
    reason = getattr(graph, "compile_subgraph_reason", None)
    return reason if reason is not None and reason.graph_break else None


def reason_text(reason: Any) -> str:
    """A break's reason in a line. TorchDynamo has two names for a branch on data, one of which is internal."""
    text = str(reason.reason)
    if text.startswith("generic_jump "):
        return "Data-dependent branching"
    return skipped_function(text) or text.partition("\n")[0]


def skipped_function(text: str) -> str:
    """The reason that a text gives, if it is a function that TorchDynamo leaves alone; else empty."""
    found = _SKIPPED.search(text)
    return "" if found is None else f"TorchDynamo does not look into {found[1]} ({found[2]})"


def draws_like_numpy(node: fx.Node) -> bool:
    """True for a call that draws from torch's generator in the place of numpy's."""
    return getattr(getattr(node.target, "f", None), "__module__", "") == "torch._numpy.random"
