"""The backend of `torch.compile(model, backend="monetlite", options={"budget": "6GB"})`.

A model that TorchDynamo captures as one graph is planned when it is compiled, as in `MONeTWrapper`: it begins with
a schedule that is found within seconds, and a better one is looked for beside training. With `schedule`, compiling
waits for the best one, and a file keeps it. A process keeps its schedules until it ends. Graphs that are parts of a
model are its pieces, and planned together (`runtime.pieces`).
"""

import contextlib
import functools
import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from monetlite.core.errors import ModelError, TraceError
from monetlite.fx.torch_internals.patching import patched
from monetlite.fx.torch_internals.torch_compiled_calls import CompiledCall, current_call, surround_calls
from monetlite.fx.torch_internals.torch_dynamo import (
    break_reason,
    drawing_functions,
    draws_like_numpy,
    forget_left_out,
    reason_text,
    taken_apart,
)
from monetlite.fx.torch_internals.torch_messages import leave_messages_out
from monetlite.fx.torch_internals.torch_pytree import tensors_among
from monetlite.fx.torch_internals.torch_varying import VaryingNumbers, VaryingSizes
from monetlite.runtime.buffers import eager
from monetlite.runtime.compile_options import CompileOptions, compile_options
from monetlite.runtime.gradient_delivery import CapturedStep, delivering_backend
from monetlite.runtime.graph_plan import GraphPlan
from monetlite.runtime.pieces import PiecewiseTraining
from monetlite.runtime.serving import own_bytes
from monetlite.tracing.capture import Joint, copied
from monetlite.tracing.names import source_of
from monetlite.tracing.operator_graph import Traced, build_graph
from monetlite.tracing.refusals import NUMPY_DRAWS, line_of
from monetlite.tracing.step_inputs import (
    autocast_dtype,
    bucket_bytes,
    device_of,
    gpu_of,
    on_its_gpu,
    refuse_several_devices,
)

_PIECES, _WHOLE, _LEFT_ALONE, _NUMBERS, _SIZES = "pieces", "whole", "left alone", "numbers", "sizes"
_thread = threading.local()


def __getattr__(name: str) -> Any:
    """Find `monetlite`, which `torch.compile` asks for when it first looks up the backend of this name.

    From then on, TorchDynamo leaves log messages out, and has prints and warnings come after a graph, in every
    compilation of the process (since torch 2.13, of the thread). Each message would take a model's graph apart, and
    torch calls a backend only after that. Importing this file changes nothing.
    """
    if name != "monetlite":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    leave_messages_out()
    surround_calls(compile_graph, _around_call)
    return compile_graph


def compile_graph(
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    pieces: PiecewiseTraining | None = None,
    **others: Any,
) -> Any:
    """The backend that `torch.compile` finds under this name.

    Args:
        graph, inputs: of all of a model, or of a piece.
        options, others: budget, schedule and options of `monetlite.optimize`.
        pieces: the training of the model, if it was found to be taken apart.

    Raises:
        ModelError: unknown options, no budget, or a model that TorchDynamo takes apart and that can't be planned
            in pieces.
        DeviceError: parameters on several devices.
        Those of `monetlite.optimize`.
    """
    chosen = compile_options({**(options or {}), **others})
    if drawing := next(filter(draws_like_numpy, graph.graph.nodes), None):
        raise ModelError(f"{source_of(drawing) or 'the model'} can't be captured: {NUMPY_DRAWS}")
    ours = pieces is not None and not pieces.sizes.first_step
    if not ours and any(isinstance(item, torch.SymInt) for item in inputs):
        raise ModelError(
            "torch.compile has made sizes symbolic (inputs of another shape came, or dynamic=True was given); a "
            "plan is for sizes that are known: torch.compile(model, backend='monetlite', dynamic=False, ...)"
        )
    if torch.is_grad_enabled():
        refuse_several_devices(graph, inputs)
        if pieces := pieces or _pieces(graph, chosen):
            return pieces.backend(graph, inputs)
    device = device_of(graph, inputs)
    autocast = autocast_dtype(device)
    plan: GraphPlan | None = None
    kept: list[CapturedStep] = []

    def partition(joint: Joint) -> tuple[fx.GraphModule, fx.GraphModule]:
        @functools.cache
        def traced_in(layout: str) -> Traced:
            # Building a graph changes the joint graph, which every layout begins from.
            built = build_graph(copied(joint), graph, (tuple(inputs), {}), layout=layout, autocast=autocast)
            # Weights may come to rule an implementation out, and torch.compile then has no other program.
            unguarded = built.graph.restricted(lambda item: item.guard is None)
            # Parameters are among the inputs of a compiled graph.
            given = {
                name: spec
                for (name, spec), item in zip(built.graph.inputs.items(), tensors_among(inputs), strict=True)
                if not isinstance(item, nn.Parameter)
            }
            return replace(built, graph=replace(unguarded, name="compiled", inputs=given))

        nonlocal plan
        resident = [*graph.parameters(), *graph.buffers(), *tensors_among(inputs)]
        buckets_bytes = 0 if chosen.budget is None else bucket_bytes(resident)
        parameters = [item for item in resident if isinstance(item, nn.Parameter)]
        plan = GraphPlan(traced_in, chosen, own_bytes(resident) + buckets_bytes, parameters, device)
        return plan.lowered()

    gpu = gpu_of(graph, inputs)
    with on_its_gpu(graph, inputs):
        compiled = delivering_backend(partition, eager, kept.append)(graph, inputs)
    if kept and plan is not None:
        plan.keep(kept[-1])
        compiled = _planned_further(compiled, graph, plan)
    return whole_step(compiled, gpu)


def whole_step(step: Callable[..., Any], gpu: torch.device | None) -> Callable[..., Any]:
    """A step that tells the call it is in that it ran, with its GPU as torch's current one if it has one.

    Re-runs of random operators read the current GPU's generator.
    """

    def run(*arguments: Any) -> Any:
        _thread.whole = True
        with contextlib.nullcontext() if gpu is None else torch.cuda.device(gpu):
            return step(*arguments)

    return run


def _planned_further(compiled: Callable[..., Any], graph: fx.GraphModule, plan: GraphPlan) -> Callable[..., Any]:
    """A compiled step, of which its plan hears."""
    runs = itertools.count()

    def run(*arguments: Any) -> Any:
        if next(runs):  # while the first one runs, what compiling took is freed
            plan.step_begins(graph, arguments)
        output = compiled(*arguments)
        plan.step_gave(output)
        return output

    return run


@contextlib.contextmanager
def _around_call() -> Iterator[None]:
    """Surround each call of a compiled model, until it is found to be captured whole.

    Raises:
        Those of `PiecewiseTraining.step_begins`.
    """
    call = current_call() if torch.is_grad_enabled() else None
    if call is None or call.model is None or _WHOLE in call.notes:
        yield
        return
    known: PiecewiseTraining | None = call.given.get(_PIECES)
    if _LEFT_ALONE not in call.notes:
        forget_left_out()
        call.notes[_LEFT_ALONE] = drawing_functions(call.model)
        call.notes[_NUMBERS], call.notes[_SIZES] = VaryingNumbers(), VaryingSizes(active=False)
    handled = sys.exc_info()[1]  # by the code that makes the call
    before, _thread.whole = getattr(_thread, "whole", False), False
    with on_its_gpu(call.model, (call.args, call.kwargs)):
        if known is not None:
            known.step_begins(call.args, call.kwargs)
        again = contextlib.nullcontext() if known is None else known.again.noted()
        varying = patched(call.notes[_NUMBERS].captured(), call.notes[_SIZES].captured(), again)
        with taken_apart(call.notes[_LEFT_ALONE]), varying:
            try:
                yield
            finally:
                whole, _thread.whole = _thread.whole, before
    if sys.exc_info()[1] is not handled:  # an error, which torch doesn't pass on to what surrounds a call
        if known is not None:
            known.forward_fails()
    elif known is not None:
        known.forward_ends()
    elif whole:
        call.notes[_WHOLE] = True
    elif call.model.training and _PIECES not in call.given:
        options = compile_options(call.given.get("options", {}))
        _begin_pieces(call, options, f"torch.compile captures nothing of {type(call.model).__name__}")


def _pieces(graph: fx.GraphModule, options: CompileOptions) -> PiecewiseTraining | None:
    """The training of the model that a graph is a piece of; None if it is all of a model.

    Raises:
        ModelError: the model can't be planned in pieces.
    """
    call, reason = current_call(), break_reason(graph)
    if reason is None and (call is None or call.starts_here):
        return None
    if reason is None:
        said = "torch.compile leaves out the model's forward pass, and compiles functions that it calls"
    else:
        where = line_of(reason.user_stack)
        said = f"torch.compile takes the model apart at {where}: {reason_text(reason)}"
    return _begin_pieces(call, options, said)


def _begin_pieces(call: CompiledCall | None, options: CompileOptions, said: str) -> PiecewiseTraining:
    """Have a model that is being called train in pieces.

    Args:
        call: of the model.
        options: of its compilation.
        said: why it can't be captured whole.

    Raises:
        ModelError: it can't be planned in pieces.
    """
    problem = ""
    if call is None or call.model is None:
        problem = "Only modules are planned in pieces: compile the model itself"
    elif options.whole:
        problem = "whole=True refuses that"
    elif options.budget is None or options.schedule is not None:
        problem = "A schedule file is of a whole model: give a budget in its place"
    elif options.solving.reserved:
        problem = "Reserved memory can't be planned in pieces: leave out reserved=True"
    else:
        error = TraceError(said)
        pieces = PiecewiseTraining(call.model, options.budget, options.pricing, options.solving, False, error)
        pieces.sizes = call.notes[_SIZES]
        pieces.sizes.active = True
        pieces.step_begins(call.args, call.kwargs)
        call.given[_PIECES] = pieces
        return pieces
    raise ModelError(f"{said}. {problem}, or move what ends the graph out of the forward pass")
