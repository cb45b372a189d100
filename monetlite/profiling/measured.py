"""Measured profiles: every distinct call of a graph once, with real data."""

import contextlib
import gc
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from monetlite.costs import Cost, Profile, ProfileKind
from monetlite.errors import MonetliteError, ProfileError
from monetlite.graph import Call, Implementation, OperatorGraph
from monetlite.operators import cudnn, resolve
from monetlite.operators.random import REPLAY
from monetlite.operators.registry import find_function
from monetlite.profiling.arguments import make_arguments
from monetlite.profiling.cache import CostCache
from monetlite.profiling.heap import steady_heap
from monetlite.profiling.meters import Meter, meter_for
from monetlite.profiling.plans import is_plan, on_front

Progress = Callable[[int, int], None]
"""Told (calls measured, calls in all)."""

_log = logging.getLogger(__name__)


def measure_profile(graph: OperatorGraph, device: str, *, progress: Progress | None = None) -> Profile:
    """Measure every implementation of every operator on this machine.

    On CUDA, convolutions also have cuDNN's plans where its frontend is installed: those that run here, and of them
    those that beat the others in latency or workspace.

    Args:
        graph: traced with inputs on that device.
        device: `"cpu"` or `"cuda"`.
        progress: called after each distinct call.

    Raises:
        DeviceError: this machine has no such device.
        ProfileError: an operator can't be run alone; names it.
    """
    meter = meter_for(device)
    graph = cudnn.offer_plans(graph.available(device))
    cache = CostCache(meter.environment())
    distinct: dict[str, tuple[str, bool, _Run]] = {}
    for operator in graph.operators:
        for item in operator.implementations:
            for run in _runs(graph, item):
                name = f"{operator.name} ({run.call.target}, {item.name})"
                distinct.setdefault(run.signature, (name, is_plan(item), run))
    costs: dict[str, tuple[float, int]] = {}
    try:
        with steady_heap() if device == "cpu" else contextlib.nullcontext():
            for done, (signature, (name, dispensable, run)) in enumerate(distinct.items(), start=1):
                cost = cache.get(signature)
                try:
                    if cost is None:
                        cost = _measure(name, run, meter)
                        cache.put(signature, cost)
                    costs[signature] = (cost.latency_ms, cost.workspace_bytes)
                except MonetliteError as error:
                    if not dispensable:
                        raise
                    _log.info("left out: %s", error)
                if progress is not None:
                    progress(done, len(distinct))
    finally:
        cache.save()
        cudnn.forget_plans()
    graph = graph.restricted(lambda item: all(run.signature in costs for run in _runs(graph, item)))

    def cost_of(item: Implementation) -> Cost:
        found = [costs[run.signature] for run in _runs(graph, item)]
        if not found:
            return Cost(latency_ms=0.0, workspace_bytes=0)
        again = found[1] if len(found) > 1 else (None, None)
        return Cost(
            latency_ms=found[0][0],
            workspace_bytes=found[0][1],
            recompute_latency_ms=again[0],
            recompute_workspace_bytes=again[1],
        )

    profile = Profile(
        graph=graph,
        device=device,
        kind=ProfileKind.MEASURED,
        costs=tuple(tuple(cost_of(item) for item in operator.implementations) for operator in graph.operators),
        environment=dict(meter.environment()),
    )
    return on_front(profile)


@dataclass(frozen=True, kw_only=True)
class _Run:
    """A call to measure, and the memory that its results take beyond what they take over, in bytes."""

    call: Call
    result_bytes: int

    @property
    def signature(self) -> str:
        return f"{self.call.signature} {self.result_bytes}"


def _runs(graph: OperatorGraph, item: Implementation) -> Iterator[_Run]:
    """The first run of an implementation and, where they are another call, the later ones."""
    if item.call is None or not item.call.outputs:  # nothing is computed
        return
    overwritten = sum(graph.values[value].size_bytes for value in item.overwrites)
    used = [position for position, name in enumerate(item.call.outputs) if name is not None]
    size = {position: graph.values[value].size_bytes for position, value in zip(used, item.writes, strict=False)}
    for call in (item.call, item.again):
        if (call is not None and call.target != REPLAY) or call is item.call:
            assert call is not None
            written = sum(size.get(position, 0) for position, name in enumerate(call.outputs) if name is not None)
            yield _Run(call=_measured(call), result_bytes=written - overwritten)


def _measured(call: Call) -> Call:
    registered = find_function(call.target)
    if registered is not None and registered.measured_like and registered.like is not None:
        return registered.like(call)
    return call


def _measure(name: str, run: _Run, meter: Meter) -> Cost:
    function = resolve(run.call.target)
    try:
        with torch.no_grad(), torch.random.fork_rng(enabled=meter.device == "cpu"):
            args, kwargs = make_arguments(run.call, meter.device)

            def call() -> object:
                return function(*args, **kwargs)

            recent = next((item for item in args if isinstance(item, torch.Tensor)), None)
            latency_ms = meter.latency_ms(call, recent)
            workspace_bytes = max(0, meter.growth_bytes(call) - run.result_bytes)
    except (RuntimeError, MemoryError, IndexError, TypeError) as error:
        raise ProfileError(
            f"{name} can't be measured alone on {meter.device}: "
            f"{str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__}. "
            "Estimate the costs instead (name a device, as in --device a100-40gb), or lower the batch"
        ) from error
    finally:
        gc.collect(0)
    return Cost(latency_ms=latency_ms, workspace_bytes=workspace_bytes)
