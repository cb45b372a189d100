"""Branches of captured code that only raise, or that every step takes the same way.

`if labels.max() >= classes: raise ValueError(...)` asks for a tensor's value, at which TorchDynamo takes a model
apart. Where one side of the branch does nothing but raise, the other one is captured, behind an assertion that the
step checks when it runs: what TorchDynamo itself makes of `assert labels.max() < classes`.

`if torch.rand([]) < self.layerdrop: continue` asks for a value, too. Where `layerdrop` is 0, no draw is below it.

| symbol | use, and what breaks when it changes |
| --- | --- |
| `InstructionTranslatorBase.dispatch_table` | functions for bytecodes; such models would be refused again |
| `.instructions`, `.instruction_pointer`, `.indexof`, `.jump`, `.stack` | the code around a branch; the same |
| `Instruction.exn_tab_entry` | handlers; an exception that the model catches would end the step |
| `TensorVariable`, `TorchInGraphFunctionVariable` | a tensor in captured code, and a call; the same as first |
| `get_torch_obj_rule_map`, `UserFunctionVariable` | what is captured by lines; Gaussian losses would be refused |
| `TensorVariable.as_proxy`, `Tensor._version` | tell what is compared; a `layerdrop` of 0 would take models apart |
| `torch._assert_async` | an operator that fails where its tensor is false; wrong inputs would go unnoticed |
"""

import dis
import functools
import operator
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeAlias
from unittest import mock

import torch
from torch import fx
from torch._dynamo import trace_rules
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables import (
    ConstantVariable,
    TensorVariable,
    TorchInGraphFunctionVariable,
    UserFunctionVariable,
)
from torch.nn import functional as F

from monetlite.fx.torch_internals.patching import patched

_Jump: TypeAlias = Callable[[Any, Any], None]
_ENDS = (
    "JUMP",
    "RETURN",
    "YIELD",
    "FOR_ITER",
    "SEND",
    "RERAISE",
    "WITH",
    "STORE_ATTR",
    "STORE_SUBSCR",
    "STORE_GLOBAL",
)
"""Parts of the names of bytecodes after which a branch may do something else than raise."""

_LINE_BY_LINE = (F.gaussian_nll_loss,)
"""Functions of torch that have such branches, and that TorchDynamo would run as one call."""


_UNIFORM = (torch.rand, torch.rand_like)
"""Functions whose numbers are at least 0 and less than 1."""
_WITH_LEAST: dict[Any, bool] = {operator.lt: False, operator.ge: True}
"""Results of comparing such numbers with 0, or with less."""
_WITH_MOST: dict[Any, bool] = {operator.gt: False, operator.le: True}
"""The same for 1, or for more."""


def branches_captured() -> AbstractContextManager[None]:
    """Have captures take branches that only raise for assertions, and know those on draws, while a block runs."""
    return patched(_replaced())


@contextmanager
def _replaced() -> Iterator[None]:
    rules = dict.fromkeys(_LINE_BY_LINE, UserFunctionVariable)
    with ExitStack() as undone, mock.patch.dict(trace_rules.get_torch_obj_rule_map(), rules):
        for translator in _translators(InstructionTranslatorBase):
            table = list(translator.dispatch_table)
            for name, code in dis.opmap.items():
                if name.startswith("POP_JUMP") and name.endswith(("IF_TRUE", "IF_FALSE")):
                    table[code] = functools.partial(_branch, table[code], name.endswith("IF_TRUE"))
            undone.enter_context(mock.patch.object(translator, "dispatch_table", table))
        yield


def _translators(of: type[Any]) -> Iterator[type[Any]]:
    yield of
    for kind in of.__subclasses__():
        yield from _translators(kind)


def _branch(jump: _Jump, if_true: bool, translator: Any, instruction: Any) -> None:
    """Take a branch on a tensor where it is known to lead, or past what only raises, or do as TorchDynamo does."""
    value = translator.stack[-1]
    if not isinstance(value, TensorVariable):
        return jump(translator, instruction)
    if (known := _known(value.as_proxy().node)) is not None:
        translator.pop()
        if known == if_true:
            translator.jump(instruction)
        return None
    if _handled(translator):
        return jump(translator, instruction)
    raises_here = _only_raises(translator, translator.instruction_pointer)
    raises_there = _only_raises(translator, translator.indexof[instruction.target])
    if raises_here == raises_there:
        return jump(translator, instruction)
    translator.pop()
    if if_true != raises_here:
        value = TorchInGraphFunctionVariable(torch.logical_not).call_function(translator, [value], {})
    code = translator.f_code
    said = f"{code.co_filename}:{translator.lineno}: {code.co_name} raises an exception on these inputs"
    check = TorchInGraphFunctionVariable(torch._assert_async)
    check.call_function(translator, [value, ConstantVariable.create(said)], {})
    if raises_here:
        translator.jump(instruction)
    return None


def _known(node: fx.Node) -> bool | None:
    """Result of a comparison, if every step has the same: of a uniform draw with a number that it can't pass."""
    match node.args:
        case (fx.Node() as draw, int() | float() as number) if draw.target in _UNIFORM:
            drawn: torch.Tensor = draw.meta["example_value"]
            if list(drawn.shape) not in ([], [1]) or drawn._version:  # or it has been written to
                return None
            comparisons = _WITH_LEAST if number <= 0 else _WITH_MOST if number >= 1 else {}
            return comparisons.get(node.target)
    return None


def _only_raises(translator: Any, at: int) -> bool:
    """True if the code from there on leads to `raise`, whatever happens."""
    for instruction in translator.instructions[at:]:
        if instruction.opname == "RAISE_VARARGS":
            return True
        if any(part in instruction.opname for part in _ENDS):
            return False
    return False


def _handled(translator: Any) -> bool:
    """True if the model may catch what it raises."""
    while translator is not None:
        if translator.current_instruction.exn_tab_entry is not None:
            return True
        translator = translator.parent
    return False
