"""The backend of `torch.compile(model, backend="monetlite", options={"budget": "6GB"})`.

Each graph that TorchDynamo hands over is priced and solved when it is compiled, and runs by its schedule from then
on, as in `MONeTWrapper`. A process keeps its schedules until it ends; with `schedule`, a file keeps one.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx

from monetlite.core.errors import ModelError
from monetlite.core.graph import AS_TRACED, OperatorGraph
from monetlite.core.options import PricingOptions, SolvingOptions, split_options
from monetlite.core.schedule import Schedule
from monetlite.fx.torch_internals.torch_dispatch import without_modes
from monetlite.fx.torch_internals.torch_dynamo import break_reason, draws_like_numpy, leave_messages_out
from monetlite.runtime.buffers import eager
from monetlite.runtime.fitting import Fitting
from monetlite.runtime.gradient_delivery import delivering_backend
from monetlite.runtime.lowering import lower
from monetlite.runtime.scheduled_training import loaded
from monetlite.runtime.serving import as_passed, own_bytes
from monetlite.tracing.capture import Joint, copied
from monetlite.tracing.names import source_of
from monetlite.tracing.operator_graph import Traced, build_graph
from monetlite.tracing.refusals import NUMPY_DRAWS
from monetlite.tracing.step_inputs import autocast_dtype, device_of, gpu_of, on_its_gpu
from monetlite.tracing.whole_kernels import kernels_kept_whole


@dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """Contents of `options=` of `torch.compile`: budget, schedule, and the options of `monetlite.optimize`.

    Attributes:
        budget: of the whole step; not needed if the schedule exists.
        schedule: a schedule file, read if it exists, else written; or a name such as zoo:resnet50@6GB.
    """

    budget: str | int | float | None
    schedule: str | None
    pricing: PricingOptions
    solving: SolvingOptions

    @property
    def schedule_exists(self) -> bool:
        return self.schedule is not None and (self.schedule.startswith("zoo:") or Path(self.schedule).exists())


_solved: dict[tuple[str, str, CompileOptions], Schedule] = {}


def __getattr__(name: str) -> Any:
    """Find `monetlite`, which `torch.compile` asks for when it first looks up the backend of this name.

    From then on, TorchDynamo leaves log messages out, and has prints and warnings come after a graph, in every
    compilation of the process (since torch 2.13, of the thread). Each message would take a model's graph apart, and
    torch calls a backend only after that. Importing this file changes nothing.
    """
    if name != "monetlite":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    leave_messages_out()
    return compile_graph


def compile_graph(
    graph: fx.GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, **others: Any
) -> Any:
    """The backend that `torch.compile` finds under this name.

    Raises:
        ModelError: unknown options, no budget, or a model that TorchDynamo takes apart.
        Those of `monetlite.optimize`.
    """
    chosen = compile_options({**(options or {}), **others})
    _refuse_breaks(graph)
    if drawing := next(filter(draws_like_numpy, graph.graph.nodes), None):
        raise ModelError(f"{source_of(drawing) or 'the model'} can't be captured: {NUMPY_DRAWS}")
    if any(isinstance(item, torch.SymInt) for item in inputs):
        raise ModelError(
            "torch.compile has made sizes symbolic because inputs of another shape came; memory can be planned for "
            "sizes that are known: torch.compile(model, backend='monetlite', dynamic=False, ...)"
        )
    autocast = autocast_dtype(device_of(graph, inputs))

    def partition(joint: Joint) -> tuple[fx.GraphModule, fx.GraphModule]:
        @functools.cache
        def traced_in(layout: str) -> Traced:
            # Building a graph changes the joint graph, which every layout begins from.
            built = build_graph(copied(joint), graph, (tuple(inputs), {}), layout=layout, autocast=autocast)
            return replace(built, graph=replace(built.graph, name="compiled"))

        schedule = _schedule(lambda layout: traced_in(layout).graph, chosen)
        resident = [*graph.parameters(), *graph.buffers(), *as_passed(tuple(inputs), {})]
        return lower(*Fitting().fit(traced_in(schedule.layout), schedule, own_bytes(resident)))

    gpu = gpu_of(graph, inputs)
    with on_its_gpu(graph, inputs), kernels_kept_whole():
        compiled = delivering_backend(partition, eager)(graph, inputs)
    return compiled if gpu is None else on_gpu(compiled, gpu)


def on_gpu(step: Callable[..., Any], gpu: torch.device) -> Callable[..., Any]:
    """A step with its GPU as torch's current one: re-runs of random operators read the current generator."""

    def run(*arguments: Any) -> Any:
        with torch.cuda.device(gpu):
            return step(*arguments)

    return run


def compile_options(given: Mapping[str, Any]) -> CompileOptions:
    """Read `options=` of `torch.compile`.

    Raises:
        ModelError: an unknown option, a value that is out of range, or neither a budget nor a schedule file.
    """
    own = ("budget", "schedule")
    pricing, solving = split_options({name: value for name, value in given.items() if name not in own}, own)
    chosen = CompileOptions(
        budget=given.get("budget"), schedule=given.get("schedule"), pricing=pricing, solving=solving
    )
    if chosen.budget is None and not chosen.schedule_exists:
        raise ModelError(
            "backend 'monetlite' needs a budget: torch.compile(model, backend='monetlite', "
            "options={'budget': '6GB'}), or options={'schedule': FILE} with a schedule file"
        )
    return chosen


def _refuse_breaks(graph: fx.GraphModule) -> None:
    """Refuse part of a model: no budget of the whole step can be kept with a part of it."""
    reason = break_reason(graph)
    if reason is None:
        return
    frame = reason.user_stack[-1] if reason.user_stack else None
    where = f"{frame.filename}:{frame.lineno} ({(frame.line or '').strip()})" if frame else "somewhere"
    raise ModelError(
        f"torch.compile takes the model apart at {where}: {str(reason.reason).splitlines()[0]}. A memory budget "
        "can only be kept for a step as a whole: have the model trained in pieces, "
        "monetlite.within(model, budget=...), or move what breaks the graph out of the forward pass "
        "(fullgraph=True shows each)"
    )


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
