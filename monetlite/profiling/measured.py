"""Measured profiles: every distinct call of a graph once, with real data."""

import gc
from collections.abc import Callable

import torch

from monetlite.costs import Cost, Profile, ProfileKind
from monetlite.errors import ProfileError
from monetlite.graph import Implementation, OperatorGraph
from monetlite.operators import resolve
from monetlite.profiling.arguments import make_arguments
from monetlite.profiling.cache import CostCache
from monetlite.profiling.meters import Meter, meter_for

Progress = Callable[[int, int], None]
"""Told (calls measured, calls in all)."""


def measure_profile(graph: OperatorGraph, device: str, *, progress: Progress | None = None) -> Profile:
    """Measure every implementation of every operator on this machine.

    Args:
        graph: traced with inputs on that device.
        device: `"cpu"` or `"cuda"`.
        progress: called after each distinct call.

    Raises:
        DeviceError: this machine has no such device.
        ProfileError: an operator can't be run alone; names it.
    """
    meter = meter_for(device)
    cache = CostCache(meter.environment())
    distinct: dict[str, tuple[str, Implementation]] = {}
    for operator in graph.operators:
        for item in operator.implementations:
            if item.call is not None:
                distinct.setdefault(_signature(graph, item), (operator.name, item))
    costs: dict[str, Cost] = {}
    try:
        for done, (signature, (name, item)) in enumerate(distinct.items(), start=1):
            cost = cache.get(signature)
            if cost is None:
                cost = _measure(graph, name, item, meter)
                cache.put(signature, cost)
            costs[signature] = cost
            if progress is not None:
                progress(done, len(distinct))
    finally:
        cache.save()
    free = Cost(latency_ms=0.0, workspace_bytes=0)
    return Profile(
        graph=graph,
        device=device,
        kind=ProfileKind.MEASURED,
        costs=tuple(
            tuple(
                free if item.call is None else costs[_signature(graph, item)] for item in operator.implementations
            )
            for operator in graph.operators
        ),
        environment=dict(meter.environment()),
    )


def _signature(graph: OperatorGraph, item: Implementation) -> str:
    assert item.call is not None
    return f"{item.call.signature} {result_bytes(graph, item)}"


def result_bytes(graph: OperatorGraph, item: Implementation) -> int:
    """Memory that an implementation's results take beyond what they take over."""
    written = sum(graph.values[value].size_bytes for value in item.writes)
    return written - sum(graph.values[value].size_bytes for value in item.overwrites)


def _measure(graph: OperatorGraph, name: str, item: Implementation, meter: Meter) -> Cost:
    assert item.call is not None
    function = resolve(item.call.target)
    try:
        with torch.no_grad(), torch.random.fork_rng(enabled=meter.device == "cpu"):
            args, kwargs = make_arguments(item.call, meter.device)

            def run() -> object:
                return function(*args, **kwargs)

            latency_ms = meter.latency_ms(run)
            workspace_bytes = max(0, meter.growth_bytes(run) - result_bytes(graph, item))
    except (RuntimeError, MemoryError, IndexError, TypeError) as error:
        raise ProfileError(
            f"{name} ({item.call.target}, {item.name}) can't be measured alone on {meter.device}: "
            f"{str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__}. "
            "Estimate the costs instead (name a device, as in --device a100-40gb), or lower the batch"
        ) from error
    finally:
        gc.collect(0)
    return Cost(latency_ms=latency_ms, workspace_bytes=workspace_bytes)
