"""The backend of `torch.compile(model, backend="monetlite", options={"budget": "6GB"})`.

A model that TorchDynamo captures as one graph is priced and solved when it is compiled. It runs by its schedule
then, as in `MONeTWrapper`. A process keeps its schedules until it ends; with `schedule`, a file keeps one. Graphs
that are parts of a model are its pieces, and planned together (`runtime.pieces`).
"""

import contextlib
import functools
import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from monetlite.core.errors import ModelError, TraceError
from monetlite.core.graph import AS_TRACED, OperatorGraph
from monetlite.core.options import PricingOptions, SolvingOptions, split_options
from monetlite.core.schedule import Schedule
from monetlite.fx.torch_internals.patching import patched
from monetlite.fx.torch_internals.torch_compiled_calls import CompiledCall, current_call, surround_calls
from monetlite.fx.torch_internals.torch_dispatch import without_modes
from monetlite.fx.torch_internals.torch_dynamo import (
    break_reason,
    drawing_functions,
    draws_like_numpy,
    forget_left_out,
    reason_text,
    taken_apart,
)
from monetlite.fx.torch_internals.torch_messages import leave_messages_out
from monetlite.fx.torch_internals.torch_varying import VaryingNumbers, VaryingSizes
from monetlite.runtime.buffers import eager
from monetlite.runtime.fitting import Fitting
from monetlite.runtime.gradient_delivery import CapturedStep, delivering_backend
from monetlite.runtime.lowering import lower
from monetlite.runtime.measured_peak import MeasuredPeak
from monetlite.runtime.pieces import PiecewiseTraining
from monetlite.runtime.scheduled_training import loaded
from monetlite.runtime.serving import as_passed, own_bytes
from monetlite.tracing.capture import Joint, copied
from monetlite.tracing.names import source_of
from monetlite.tracing.operator_graph import Traced, build_graph
from monetlite.tracing.refusals import NUMPY_DRAWS, line_of
from monetlite.tracing.step_inputs import Arguments, autocast_dtype, device_of, gpu_of, on_its_gpu
from monetlite.tracing.whole_kernels import kernels_kept_whole


@dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """Contents of `options=` of `torch.compile`: budget, schedule, and the options of `monetlite.optimize`.

    Attributes:
        budget: of the whole step; not needed if the schedule exists.
        schedule: a schedule file, read if it exists, else written; or a name such as zoo:resnet50@6GB.
        whole: refuse a model that is captured in several graphs.
    """

    budget: str | int | float | None
    schedule: str | None
    whole: bool
    pricing: PricingOptions
    solving: SolvingOptions

    @property
    def schedule_exists(self) -> bool:
        return self.schedule is not None and (self.schedule.startswith("zoo:") or Path(self.schedule).exists())


_PIECES, _WHOLE, _LEFT_ALONE, _NUMBERS, _SIZES = "pieces", "whole", "left alone", "numbers", "sizes"
_thread = threading.local()
_solved: dict[tuple[str, str, CompileOptions], Schedule] = {}
_peaks: dict[str, MeasuredPeak] = {}
"""Of each structure that has been compiled."""


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
        Those of `monetlite.optimize`.
    """
    chosen = compile_options({**(options or {}), **others})
    if drawing := next(filter(draws_like_numpy, graph.graph.nodes), None):
        raise ModelError(f"{source_of(drawing) or 'the model'} can't be captured: {NUMPY_DRAWS}")
    ours = pieces is not None and not pieces.sizes.first_step
    if not ours and any(isinstance(item, torch.SymInt) for item in inputs):
        raise ModelError(
            "torch.compile has made sizes symbolic because inputs of another shape came; memory can be planned for "
            "sizes that are known: torch.compile(model, backend='monetlite', dynamic=False, ...)"
        )
    if torch.is_grad_enabled() and (pieces := pieces or _pieces(graph, chosen)):
        return pieces.backend(graph, inputs)
    autocast = autocast_dtype(device_of(graph, inputs))

    schedule: Schedule | None = None
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
                for (name, spec), item in zip(built.graph.inputs.items(), as_passed(tuple(inputs), {}), strict=True)
                if not isinstance(item, nn.Parameter)
            }
            return replace(built, graph=replace(unguarded, name="compiled", inputs=given))

        nonlocal schedule
        schedule = _schedule(lambda layout: traced_in(layout).graph, chosen)
        resident = [*graph.parameters(), *graph.buffers(), *as_passed(tuple(inputs), {})]
        return lower(*Fitting().fit(traced_in(schedule.layout), schedule, own_bytes(resident)))

    gpu = gpu_of(graph, inputs)
    with on_its_gpu(graph, inputs), kernels_kept_whole():
        compiled = delivering_backend(partition, eager, kept.append)(graph, inputs)
    if kept and schedule is not None:
        compiled = _measured_once(compiled, graph, kept[-1], schedule)
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


def _measured_once(
    compiled: Callable[..., Any], graph: fx.GraphModule, step: CapturedStep, schedule: Schedule
) -> Callable[..., Any]:
    """A compiled step, of which the measured peak is told once for all sizes of the inputs."""
    peak, runs = _peaks.setdefault(schedule.structure, MeasuredPeak()), itertools.count()
    peak.capture_ends()
    step.watch = lambda ends: peak.backward_ends() if ends else None

    def run(*arguments: Any) -> Any:
        if next(runs):  # while the first one runs, what compiling took is freed
            peak.step_begins(graph, Arguments(arguments, {}), lambda: schedule)
        output = compiled(*arguments)
        peak.step_gave(output)
        return output

    return run


def compile_options(given: Mapping[str, Any]) -> CompileOptions:
    """Read `options=` of `torch.compile`.

    Raises:
        ModelError: an unknown option, a value that is out of range, or neither a budget nor a schedule file.
    """
    own = ("budget", "schedule", "whole")
    pricing, solving = split_options({name: value for name, value in given.items() if name not in own}, own)
    chosen = CompileOptions(
        budget=given.get("budget"),
        schedule=given.get("schedule"),
        whole=given.get("whole", False),
        pricing=pricing,
        solving=solving,
    )
    if chosen.budget is None and not chosen.schedule_exists:
        if chosen.schedule is not None:
            raise ModelError(
                f"there is no schedule file {chosen.schedule}. With a budget, one is solved and kept there: "
                f"options={{'schedule': {chosen.schedule!r}, 'budget': '6GB'}}"
            )
        raise ModelError(
            "backend 'monetlite' needs a budget: torch.compile(model, backend='monetlite', "
            "options={'budget': '6GB'}), or options={'schedule': FILE} with a schedule file"
        )
    if pricing.step_in_backward:
        raise ModelError(
            "a graph of torch.compile has parameters among its inputs, so step_in_backward can't be planned; "
            "monetlite.within(model, budget=..., step_in_backward=True) plans it"
        )
    return chosen


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


def _schedule(graph_in: Callable[[str], OperatorGraph], options: CompileOptions) -> Schedule:
    """The schedule of a graph, of which `graph_in` makes the operator graph in a layout."""
    graph = graph_in(AS_TRACED)
    key = (graph.fingerprint, graph.device, options)
    if key not in _solved:
        if options.schedule is not None and options.schedule_exists:
            _solved[key] = loaded(options.schedule)
        else:
            _solved[key] = _solve(graph_in, options)
            if options.schedule is not None:
                _solved[key].save(options.schedule)
    return _solved[key]


def _solve(graph_in: Callable[[str], OperatorGraph], options: CompileOptions) -> Schedule:
    from monetlite.planning.budgets import layouts_to_try, solve_layouts
    from monetlite.planning.pipeline import price

    assert options.budget is not None
    pricing, solving = options.pricing, options.solving
    graphs = [graph_in(layout) for layout in layouts_to_try(pricing.layout, solving.tolerance, pricing.compile)]
    # Compiling makes fake tensors of what is computed meanwhile; operators are measured on real ones.
    with without_modes():
        profiles = [price(graph, pricing, solving) for graph in graphs]
        return solve_layouts(profiles, options.budget, solving, layout=pricing.layout)
