"""From a module and its inputs to one joint forward-and-backward graph, by TorchDynamo and AOTAutograd.

TorchDynamo turns the whole model into a single graph without a break; AOTAutograd makes the joint graph of
the forward and the backward pass from it, with mutations of buffers made functional. On fake tensors this
allocates nothing. The wrapper captures through the same functions when it runs, so that a graph is the same
whether it is traced for a schedule or executed.
"""

import contextlib
import copy
import inspect
import operator
import re
import sys
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import fx, nn

from monetlite.core.errors import ModelError, TraceError
from monetlite.core.graph import ALL_OUTPUTS, TRAINED_OUTPUTS
from monetlite.core.weak_calls import weakly
from monetlite.fx.assigned_data import copy_assigned_data
from monetlite.fx.direct_calls import as_function
from monetlite.fx.storages import Reachability
from monetlite.fx.torch_internals import torch_pytree as pytree
from monetlite.fx.torch_internals.patching import patched
from monetlite.fx.torch_internals.torch_aot import aot_autograd, aot_settings, boxed_function, keep_saved_tensors
from monetlite.fx.torch_internals.torch_as_plain import (
    ASKED,
    asked_gradients_left_out,
    classes_known,
    said_to_be_plain,
    scaled_sums_kept_whole,
)
from monetlite.fx.torch_internals.torch_branches import branches_captured
from monetlite.fx.torch_internals.torch_dispatch import FakeTensor, FakeTensorMode, failures_unlogged
from monetlite.fx.torch_internals.torch_dynamo import (
    REFUSALS,
    arose_in_capture,
    dynamo_settings,
    forget_programs,
    recompile_reason,
    switched_on,
)
from monetlite.fx.torch_internals.torch_graph_modules import graph_module
from monetlite.fx.torch_internals.torch_inductor import torch_random
from monetlite.fx.torch_internals.torch_messages import messages_left_out
from monetlite.fx.torch_internals.torch_modules import call_itself, called_instead
from monetlite.fx.torch_internals.torch_varying import fractions_by_value
from monetlite.tracing.attention_capture import Capability, as_on_gpu
from monetlite.tracing.attention_masks import keeps_cache, masks_as_plain
from monetlite.tracing.joint_graphs import prepare
from monetlite.tracing.model_outputs import detach_all_but_loss
from monetlite.tracing.names import source_of
from monetlite.tracing.output_recorders import install_recorders
from monetlite.tracing.refusals import explain, own_error
from monetlite.tracing.step_inputs import refuse_several_devices
from monetlite.tracing.whole_kernels import kernels_kept_whole


@dataclass(frozen=True, kw_only=True)
class Joint:
    """The joint graph of a training step.

    Attributes:
        graph: its flat outputs are `forward_outputs` results and then a gradient for each input.
        at_once: every gradient has to be handed over at the end, because of what the caller may do with a tensor
            that the step changes or returns a view of (`Reachability.shared`).
    """

    graph: fx.GraphModule
    forward_outputs: int
    at_once: bool


def copied(joint: Joint) -> Joint:
    """The same joint graph once more, to be changed."""
    graph, known = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in joint.graph.graph.nodes:
        known[node] = graph.node_copy(node, known.__getitem__)
    return replace(joint, graph=graph_module(joint.graph, graph))


MAX_PROGRAMS = 32
"""Programs that are compiled for one wrapper, for different inputs, before another is refused."""

_TOLD = ("torch", "transformers")
"""Packages that may know that they are captured: torch's functions then call operators that can be captured, and
transformers leaves out checks of tensors' values, at which captures would end. Its masks are seen to
(`attention_masks`)."""
_ROUNDING = (operator.floordiv, operator.mod)
Partition = Callable[[Joint], tuple[fx.GraphModule, fx.GraphModule]]
"""From a joint graph to a forward and a backward program."""
Boxed = Callable[[list[Any]], Any]
"""A program as a function of one list, which it empties."""
_T = TypeVar("_T")


class Compiler(Protocol):
    """Makes a function of a program."""

    def __call__(self, program: fx.GraphModule, inputs: Sequence[Any], internal: Collection[int], /) -> Boxed:
        """A program as a function.

        Args:
            program: its placeholders say in `meta["val"]` what was captured.
            inputs: fake tensors in the layouts that the program will be called with. Those of `internal` results
                of other programs may have other strides than captured.
            internal: positions of results that only other programs read, whose layout the compiler may choose. Its
                function then has an attribute `output_strides`: for each result its strides, or None for those
                that were captured.
        """


Backend = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]
"""A backend of `torch.compile`: from a graph and example inputs to a function."""


def training_step(model: nn.Module, outputs: str = ALL_OUTPUTS) -> Callable[..., Any]:
    """The function that is captured: the model's forward pass, differentiable where training needs it.

    A model that returns a mapping with a scalar `loss` (as transformers' models do) is trained through that
    loss: its other outputs come back detached, or are not computed (`detach_all_but_loss`). Of another model, and
    with `outputs="trained"`, every floating-point output can carry a gradient. The function returns the output and
    what was detached of it.

    A transformers model is asked not to return its key-value cache, which training does not use and which
    would keep every layer's keys and values in memory until the step ends (as gradient checkpointing does).
    """
    without_cache = keeps_cache(model)
    in_place = called_instead(model) is not None

    def run(*args: Any, **kwargs: Any) -> Any:
        if without_cache and "use_cache" not in kwargs:
            kwargs["use_cache"] = False
        output = call_itself(model, *args, **kwargs) if in_place else model(*args, **kwargs)
        return (output, None) if trained else detach_all_but_loss(output, keep_all)

    keep_all, trained = outputs == ALL_OUTPUTS, outputs == TRAINED_OUTPUTS
    return _with_own_code(run)


def _with_own_code(run: Any) -> Callable[..., Any]:
    """A copy of a function. Dynamo keeps what it compiled, and the limit on how much, with the code object."""
    return types.FunctionType(run.__code__.replace(), run.__globals__, closure=run.__closure__)


def compile_step(step: Callable[..., Any], backend: Backend, *, whole: bool = True) -> Callable[..., Any]:
    """Compile a training step for each layout of its inputs, as one graph or in the pieces that can be captured.

    What is compiled is freed with the function that comes back. TorchDynamo keeps backends for good: a backend that
    is a method doesn't keep its object alive.

    Args:
        step: has a code object of its own (`training_step`).
    """
    if inspect.ismethod(backend):
        backend = weakly(backend)
    compiled: Callable[..., Any] = torch.compile(step, backend=backend, fullgraph=whole, dynamic=False)
    weakref.finalize(compiled, forget_programs, step.__code__).atexit = False
    return compiled


def aot_backend(partition: Partition, *, forward: Compiler, backward: Compiler) -> Backend:
    """A backend for `torch.compile` with a partition of our own: two programs, each run as its compiler says."""
    results = 0

    def partition_fn(
        joint: fx.GraphModule, _inputs: object, *, num_fwd_outputs: int, **_: object
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        nonlocal results
        results = num_fwd_outputs
        prepare(joint.graph, num_fwd_outputs)
        reach = Reachability(joint.graph, num_fwd_outputs)
        at_once = bool(reach.shared) or not reach.takes_arguments
        return partition(Joint(graph=joint, forward_outputs=num_fwd_outputs, at_once=at_once))

    def forward_compiler(program: fx.GraphModule, inputs: Sequence[Any]) -> Boxed:
        keep_saved_tensors()
        return forward(program, inputs, range(results, len(flat_outputs(program))))

    compiled: Backend = aot_autograd(
        fw_compiler=forward_compiler,
        bw_compiler=lambda program, inputs: backward(program, inputs, ()),
        inference_compiler=lambda program, inputs: forward(program, inputs, ()),
        partition_fn=partition_fn,
    )

    def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        _refuse_rounding(graph.graph)
        _refuse_asked(graph.graph)
        copy_assigned_data(graph)
        # `loss.backward()` is called outside of `with torch.autocast(...)`, so nothing is cast there. And what
        # draws random numbers that nobody reads is kept, for which AOTAutograd asks this setting of Inductor's.
        with kernels_kept_whole(), aot_settings(backward_pass_autocast="off"), torch_random():
            return compiled(graph, inputs)

    return backend


def _refuse_rounding(graph: fx.Graph) -> None:
    """Refuse a rounded division of numbers, which PyTorch would have tensors do with other results.

    Raises:
        TraceError: names the line.
    """
    for node in graph.nodes:
        if node.target in _ROUNDING and isinstance(node.meta.get("example_value"), torch.SymFloat):
            raise TraceError(f"{source_of(node)}: a number that varies is divided, and the result rounded")


def _refuse_asked(graph: fx.Graph) -> None:
    """Refuse to return a tensor of which a gradient is asked for in the captured code: it would have none.

    Raises:
        TraceError: names the line.
    """
    for node in graph.output_node().all_input_nodes:
        if node.meta.get(ASKED):
            raise TraceError(f"{source_of(node)}: a gradient is asked for of this tensor, which is returned")


def refuse_uninitialized(model: nn.Module) -> None:
    """Refuse lazy modules, whose parameters are drawn at the first call: a capture would draw them at another time.

    Raises:
        ModelError: names the first one.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise ModelError(
                f"{name} is not initialized yet: run the model once on its inputs (with torch.no_grad()) before it "
                "is traced or wrapped, and make the optimizer after that"
            )


def flat_outputs(program: fx.GraphModule) -> list[fx.Node | None]:
    """A program's results, None for those that are not computed."""
    results: Any = program.graph.output_node().args[0]
    return [item if isinstance(item, fx.Node) else None for item in results]


def boxed(program: fx.GraphModule, _inputs: Sequence[Any] = (), _internal: Collection[int] = ()) -> Boxed:
    """A graph module as a function of one list, which it empties: arguments die at their last use.

    Without this, what calls the program keeps every argument alive until it returns.
    """
    return boxed_function(as_function(program))


class _Captured(Exception):
    """Ends a capture as soon as the joint graph is there."""


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    meta_device: str = "cpu",
    capability: Capability | None = None,
    outputs: str = ALL_OUTPUTS,
) -> Joint:
    """Capture one training step on fake tensors.

    Args:
        model: in training mode, on any device, the meta device included. It is not run and not changed.
        args, kwargs: example inputs; only shapes, strides, dtypes and devices of tensors matter.
        meta_device: the device that tensors on the meta device stand for.
        capability: of a GPU whose kernels to choose though the model is on the CPU (see `attention_capture`).
        outputs: what the caller gets of a model that computes its loss: `loss`, `all` or `trained`.

    Raises:
        TraceError: the model can't be captured as one graph; names the line.
        ModelError: it has parameters that are made at the first call.
        DeviceError: it has parameters on several devices.
    """
    refuse_uninitialized(model)
    refuse_several_devices(model, (args, kwargs))
    captured: list[Joint] = []

    def keep(joint: Joint) -> tuple[fx.GraphModule, fx.GraphModule]:
        captured.append(joint)
        raise _Captured

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    model, args, kwargs = without_memory(model, (args, kwargs), mode, meta_device)
    compiled = aot_backend(keep, forward=boxed, backward=boxed)

    def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return compiled(graph if capability is None else as_on_gpu(graph, capability), inputs)

    def run() -> None:
        try:
            with mode:
                compile_step(training_step(model, outputs), backend)(*args, **kwargs)
        except Exception:
            if not captured:
                raise

    with masks_as_plain(model, args, kwargs):
        run_captured(model, run, (Exception,))
    if not captured:
        off = "" if torch.is_grad_enabled() else "; gradients are switched off here (torch.no_grad)"
        raise TraceError(
            "nothing to train: no output of the model depends on a parameter or an input that requires a gradient"
            f"{off}"
        )
    return captured.pop()  # torch keeps the backend of a compilation that ends in an error, and what that holds


def run_captured(model: nn.Module, run: Callable[[], _T], refused: tuple[type[Exception], ...] = REFUSALS) -> _T:
    """Run a step that captures a model, with torch changed as a capture needs it.

    A transformers model that lacks its hooks gets them, and runs once more.

    Args:
        model: is captured.
        run: the step.
        refused: classes of the errors of `run` that are put in words for the person whose model it is.

    Raises:
        TraceError: the model can't be captured.
        MonetliteError: raised by `run` itself.
    """
    handled = sys.exc_info()[1]
    try:
        with capture_settings(), asked_gradients_left_out():
            return run()
    except Exception as error:
        if not isinstance(error, refused) and not arose_in_capture(error):
            raise
        if own := own_error(error, handled):
            raise own from None
        if not install_recorders(model, error):
            raise explain(error) from error
    return run_captured(model, run, refused)


@contextlib.contextmanager
def capture_settings(programs: int | None = None) -> Iterator[None]:
    """Change torch as a capture of a whole model needs it, for the time of a block, in one thread at a time.

    Log messages are skipped, prints come afterwards, errors are not logged, branches that only raise are
    assertions, kernels are not taken apart, remainders of fractions are Python's, and code that asks whether it is
    compiled gets plain training's answer.

    Args:
        programs: that TorchDynamo compiles of one function at most, where it isn't MAX_PROGRAMS.
    """
    with (
        patched(),  # so that settings are read when no other thread has changed them
        switched_on(),
        kernels_kept_whole(),
        messages_left_out(),
        failures_unlogged(),
        branches_captured(),
        said_to_be_plain(but_in=_TOLD),
        scaled_sums_kept_whole(),
        fractions_by_value(),
        classes_known(),
        dynamo_settings(
            recompile_limit=programs or MAX_PROGRAMS,
            use_numpy_random_stream=True,  # and not torch's generator in its place
            skip_nnmodule_hook_guards=False,  # so that a hook which comes after the first step is noticed
            optimize_ddp=False,  # which would cut the graph at DistributedDataParallel's buckets
            # With it, torch 2.11 does not notice that a parameter's requires_grad has changed.
            skip_tensor_guards_with_matching_dict_tags=False,
        ),
    ):
        yield


def many_programs(kept: int = 0) -> str:
    """The warning of a model that TorchDynamo has so many programs for, or has just refused another."""
    # A guard that did not hold: `1/14: model.n == 7    # s.n += 1  # model.py:7 in forward (HINT: ...)`.
    guard = re.sub(r"^\d+/\d+: ", "", recompile_reason().partition("\n")[0].partition("  #")[0]).strip()
    fixed = f" (the last one is for {guard})" if guard else ""
    anew = "" if kept else "No more are kept, so all are compiled anew. "
    said = f"programs have been compiled for {kept or MAX_PROGRAMS} different steps of this model{fixed}. {anew}"
    if guard.startswith("len("):
        return said + (
            "A list or dictionary to which each step adds makes every step another one. Clear it before each step, "
            "or add to it in a function of its own with @torch.compiler.disable"
        )
    return said + (
        "Each takes seconds. A number, flag or attribute that the forward pass reads, and the shapes of inputs, "
        "are fixed in a program. Make a value that changes from step to step a tensor (register_buffer, or an "
        "argument). With a budget, and without compile=True, a number that tensors are only added to, multiplied "
        "or compared with needs no program for each value. Pad inputs to a few sizes"
    )


def without_memory(
    model: nn.Module, inputs: tuple[tuple[Any, ...], Mapping[str, Any]], mode: FakeTensorMode, meta_device: str
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A model, its positional and its keyword arguments, to be captured on fake tensors.

    What is on the meta device stands for what is on `meta_device`. A model on another device comes back as it is.
    """

    def faked(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor) or tensor.is_meta:
            device = torch.device(meta_device) if tensor.is_meta else tensor.device
            fake = FakeTensor(mode, tensor.detach().to("meta"), device)
            return fake.requires_grad_(tensor.requires_grad)
        return mode.from_tensor(tensor, static_shapes=True)

    args, kwargs = pytree.tree_map_only(torch.Tensor, faked, (inputs[0], dict(inputs[1])))
    fakes: dict[int, Any] = {id(item): faked(item) for item in model.buffers() if item.is_meta}
    for item in filter(operator.attrgetter("is_meta"), model.parameters()):
        fakes[id(item)] = nn.Parameter(faked(item).detach(), requires_grad=item.requires_grad)
    return copy.deepcopy(model, fakes) if fakes else model, args, kwargs
