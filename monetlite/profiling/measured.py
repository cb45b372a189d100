"""Measured profiles: every distinct call of a graph once, with real data."""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from monetlite.core.announcing import tell, warn
from monetlite.core.costs import Cost, Profile, ProfileKind
from monetlite.core.errors import CompileError, MonetliteError, first_line
from monetlite.core.graph import Call, Implementation, OperatorGraph, Phase
from monetlite.operators import cudnn
from monetlite.operators.convolution import in_tf32
from monetlite.operators.region_compiler import compile_ahead
from monetlite.operators.traits import family_of, is_collective, traits_of
from monetlite.profiling.allocated import forget_growths
from monetlite.profiling.arguments import arguments_bytes
from monetlite.profiling.busy_cores import warn_if_busy
from monetlite.profiling.cost_cache import DISTURBED, CostCache, measured_while_disturbed
from monetlite.profiling.measured_calls import (
    LacksMemory,
    MeasuredCall,
    as_function,
    calls_of,
    calls_to_measure,
    cost_of_call,
    measure_call,
    run_once,
)
from monetlite.profiling.memory_use import steady_heap
from monetlite.profiling.meters import Meter, convolves_in_tf32, meter_for
from monetlite.profiling.plan_front import on_front

Progress = Callable[[int, int], None]
"""Called with (calls measured, calls in all)."""

MAX_NAMED = 3
"""Number of implementations that a warning names."""

_log = logging.getLogger(__name__)


def measure_profile(
    graph: OperatorGraph, device: str, *, tolerance: float | None = None, progress: Progress | None = None
) -> Profile:
    """Measure every implementation of every operator on this machine, as `Measurement` says.

    Args:
        graph: traced with inputs on that device.
        device: `"cpu"` or `"cuda"`.
        tolerance: only implementations within it; all of them without one.
        progress: called after each distinct call.

    Raises:
        DeviceError: this machine has no such device.
        ProfileError: an operator can't be run alone, or does not fit; names it.
    """
    measurement = Measurement(graph, device, tolerance=tolerance)
    measurement.run(progress=progress)
    return measurement.profile()


_LARGE = 0.25
"""Calls that move this part of what the largest one does are large, too."""
_rough: dict[tuple[str, str], Cost] = {}
"""Costs of one run each, by device and call, of this process."""


class Measurement:
    """Costs of every implementation of every operator on this machine, measured in one sitting or in several.

    On CUDA, convolutions also have cuDNN's plans where its frontend is installed: those that run here, and of them
    those that beat the others in latency or workspace. Memory that cuBLAS keeps between calls counts as resident.

    An implementation that runs out of memory or that Inductor can't compile, and that the operator can do without,
    is left out, with a warning.
    Costs that the cache has are measured again, and that is told, if the slowest of them now take much less: other
    programs used the machine then.

    Beside training, nothing is measured for which a step needs more than the budget leaves: no schedule runs it.
    Nor are collectives, for which other processes would have to wait. Of such calls, defaults cost what others of
    their family do, by the bytes that they move. Copies of a call's weights, and what an implementation takes for
    itself, may come on top of the room while it is measured.

    Args:
        graph, device, tolerance: as in `measure_profile`.
        room_bytes: the most that a step may need for a call, beside what is resident.

    Attributes:
        total: number of distinct calls to measure.
        done: number of those that are measured.
        too_large: number of those that take more than the room.
        unmeasured: number of the latter that were not measured before, either. Their workspace counts as none.

    Raises:
        DeviceError: this machine has no such device.
    """

    def __init__(
        self, graph: OperatorGraph, device: str, *, tolerance: float | None = None, room_bytes: float = math.inf
    ) -> None:
        self._meter = meter_for(device)
        graph = graph.available(device)
        if convolves_in_tf32(device):
            graph = in_tf32(graph)
        graph = cudnn.offer_plans(graph)
        if tolerance is not None:
            graph = graph.restricted(lambda item: item.tolerance <= tolerance)
        self._graph = graph
        self._cache = CostCache(self._meter.environment())
        self._room_bytes = room_bytes
        every = calls_to_measure(graph)
        self._candidates = self._fitting(every)
        self._costs: dict[str, Cost] = {}
        self._too_large: list[str] = []
        self._not_compiled: list[str] = []
        self._rechecked = self._unknown = self._busy = False
        self._waiting = list(self._candidates)
        self.total = len(self._candidates)
        large = [signature for signature, item in every.items() if item.alone_bytes > room_bytes]
        self.too_large = len(large)
        self.unmeasured = sum(self._cache.get(signature) is None for signature in large)

    def _fitting(self, candidates: dict[str, MeasuredCall]) -> dict[str, MeasuredCall]:
        """Those that don't take more than the room, and that this process can run alone."""
        room_bytes = self._room_bytes
        return {
            signature: item
            for signature, item in candidates.items()
            if item.alone_bytes <= room_bytes and not is_collective(item.call.target)
        }

    @property
    def done(self) -> int:
        return self.total - len(self._waiting)

    def leave_out(self, names: Collection[str]) -> None:
        """Measure no calls of these names, which failed before. There is no profile then."""
        self._waiting = [item for item in self._waiting if self._candidates[item].name not in names]

    @property
    def known(self) -> bool:
        """True if the cache has all costs."""
        return all(self._cache.get(signature) is not None for signature in self._candidates)

    def run(
        self,
        seconds: float = math.inf,
        progress: Progress | None = None,
        failed: Callable[[str, MonetliteError], None] | None = None,
    ) -> None:
        """Measure calls until all are, or for so many seconds; the call that is being measured then is ended.

        Args:
            failed: called with the name and the error of each call that a step needs and that can't be measured,
                instead of raising it. There is no profile then.

        Raises:
            ProfileError: as `measure_profile`.
        """
        end = time.monotonic() + seconds
        forget_growths()  # of a step of another model in which this one's operators are measured
        try:
            with steady_heap() if self._meter.device == "cpu" else contextlib.nullcontext():
                if not self._rechecked:
                    self._look_at_cores()
                    compile_ahead(
                        candidate.call.target
                        for signature, candidate in self._candidates.items()
                        if self._cache.get(signature) is None
                    )
                    _recheck(self._candidates, self._cache, self._meter, self._room_bytes)
                    self._rechecked = True
                while self._waiting and time.monotonic() < end:
                    try:
                        self._measure(self._waiting[0])
                    except MonetliteError as error:
                        if failed is None:
                            raise
                        failed(self._candidates[self._waiting[0]].name, error)
                    del self._waiting[0]
                    if progress is not None:
                        progress(self.done, self.total)
                    if not self._waiting:
                        self._look_at_cores()
        finally:
            self._cache.save()
            cudnn.forget_plans()

    def _look_at_cores(self) -> None:
        """Warn, once, if other programs hold the cores before or after costs are measured that weren't known."""
        self._unknown = self._unknown or not self.known
        if self._unknown and not self._busy and self._meter.device == "cpu":
            self._busy = warn_if_busy()

    def _measure(self, signature: str) -> None:
        candidate, cost = self._candidates[signature], self._cache.get(signature)
        try:
            if cost is None:
                cost = measure_call(candidate, self._meter, self._room_bytes)
                self._cache.put(signature, cost)
            self._costs[signature] = cost
        except MonetliteError as error:
            if candidate.needed or not (candidate.only_plans or isinstance(error, (LacksMemory, CompileError))):
                raise
            _log.info("left out: %s", error)
            if isinstance(error, LacksMemory):
                self._too_large.append(candidate.name)
            elif isinstance(error, CompileError):
                self._not_compiled.append(f"{candidate.name}: {first_line(error.__cause__ or error)}")

    def rough_profile(self, seconds: float, *, alternatives: bool = False) -> Profile:
        """Costs of the default implementations alone, in about so many seconds; of all where the cache has them.

        Costs that the cache doesn't have are of one or two runs, the largest calls first. The largest decide the
        peak, so defaults among them run in any case. What there is no time for costs what others of its family do,
        by the bytes that they move. With `alternatives` the other implementations are run, too, but for cuDNN's
        plans; those that there is no time for are left out.
        """
        forget_growths()  # as `run` does
        graph = self._graph
        if not self.known:
            graph = graph.restricted(lambda item: alternatives and not cudnn.is_plan(item.name))
        candidates, end = calls_to_measure(graph), time.monotonic() + seconds
        moved = {signature: candidate.moved_bytes for signature, candidate in candidates.items()}
        large = _LARGE * max(moved.values(), default=0)
        decisive = {item for item in candidates if candidates[item].needed and moved[item] >= large}
        costs: dict[str, Cost] = {}
        fitting = self._fitting(candidates)
        with steady_heap() if self._meter.device == "cpu" else contextlib.nullcontext():
            for signature in sorted(candidates, key=lambda item: (item not in decisive, -moved[item])):
                key = self._meter.device, signature
                cost = self._cache.get(signature) or _rough.get(key)
                soon = signature in decisive or time.monotonic() < end
                if cost is None and soon and signature in fitting:
                    with contextlib.suppress(RuntimeError, IndexError, TypeError, MemoryError):
                        cost = _rough[key] = cost_of_call(candidates[signature], self._meter, rough=True)
                if cost is not None:
                    costs[signature] = cost
        return on_front(self._priced(graph, candidates, costs))

    def profile(self) -> Profile:
        """The profile of all costs, once all calls are measured."""
        assert not self._waiting, "calls are still to be measured"
        if self._too_large:
            warn(
                f"{len(self._too_large)} implementations ran out of memory while they were measured and are left "
                f"out: {_listed(self._too_large)}. "
                f"With more of {self._meter.device}'s memory free, there would be more to choose from"
            )
        if self._not_compiled:
            warn(
                f"Inductor can't compile {len(self._not_compiled)} implementations of regions of operators, which "
                f"are left out: {_listed(self._not_compiled)}. Those regions run in their other ways"
            )
        every = calls_to_measure(self._graph)
        cached = {signature: cost for signature in every if (cost := self._cache.get(signature)) is not None}
        return on_front(self._priced(self._graph, every, cached | self._costs))

    def _priced(
        self, graph: OperatorGraph, candidates: Mapping[str, MeasuredCall], measured: Mapping[str, Cost]
    ) -> Profile:
        """The defaults, and the implementations whose costs are known."""
        costs = dict(measured) | dict(_by_family(candidates, measured))
        graph = graph.restricted(lambda item: all(call.signature in costs for call in calls_of(graph, item)))
        graph = replace(
            graph, resident=replace(graph.resident, libraries=_library_bytes(graph, self._meter, self._room_bytes))
        )

        def cost_of(item: Implementation) -> Cost:
            found = [costs[call.signature] for call in calls_of(graph, item)]
            if not found:
                return Cost(latency_ms=0.0, workspace_bytes=0)
            first, last = found[0], found[-1]
            if len(found) == 1:
                return first
            return replace(
                first,
                recompute_latency_ms=last.latency_ms,
                recompute_workspace_bytes=last.workspace_bytes,
                recompute_host_ms=last.host_ms,
            )

        return Profile(
            graph=graph,
            device=self._meter.device,
            kind=ProfileKind.MEASURED,
            costs=tuple(tuple(cost_of(item) for item in operator.implementations) for operator in graph.operators),
            environment=dict(self._meter.environment()),
        )


def _by_family(candidates: Mapping[str, MeasuredCall], costs: Mapping[str, Cost]) -> Iterator[tuple[str, Cost]]:
    """Costs of defaults that were not measured: what others of their family cost, by the bytes that they move."""
    moved = {signature: candidate.moved_bytes for signature, candidate in candidates.items()}
    known = {signature: family_of(candidates[signature].call.target) for signature in costs if signature in moved}
    for signature, candidate in candidates.items():
        if not candidate.needed or signature in costs:
            continue
        alike = [item for item, family in known.items() if family == family_of(candidate.call.target)]
        ms = sorted(costs[item].latency_ms / max(1, moved[item]) for item in alike or known)
        workspace = max((costs[item].workspace_bytes / max(1, moved[item]) for item in alike), default=0.0)
        yield (
            signature,
            Cost(
                latency_ms=moved[signature] * (ms[len(ms) // 2] if ms else 0.0),
                workspace_bytes=max(math.ceil(moved[signature] * workspace), candidate.own_bytes),
            ),
        )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:MAX_NAMED]) + (" and others" if len(names) > MAX_NAMED else "")


def _recheck(candidates: dict[str, MeasuredCall], cache: CostCache, meter: Meter, room_bytes: float) -> None:
    """Forget the costs of these calls that the cache has, if they were measured while other work ran."""
    known = {signature: cost for signature in candidates if (cost := cache.get(signature)) is not None}

    def latency_ms(signature: str) -> float:
        candidate = candidates[signature]
        taken_bytes = candidate.result_bytes + known[signature].workspace_bytes
        room = room_bytes - arguments_bytes(candidate.call) - taken_bytes
        try:
            with as_function(candidates[signature].call, meter.device) as (call, recent):
                return meter.latency_ms(call, recent, room)
        except (RuntimeError, MemoryError):  # out of memory beside what is there now: the known cost stays
            return math.inf

    if measured_while_disturbed(known, latency_ms):
        tell(
            f"{len(known)} costs that were measured earlier are measured again: their slowest calls now take less "
            f"than {DISTURBED:.0%} of the time. Other programs may have used the machine then; let none run now"
        )
        cache.forget(known)


def _library_bytes(graph: OperatorGraph, meter: Meter, room_bytes: float) -> int:
    """Memory that libraries keep between the calls of a step, in bytes.

    cuBLAS keeps workspaces for each thread that calls it, and autograd runs the backward part in another thread
    than the forward part. So each part's are measured by one call of every kind that makes a matrix product. What
    the forward part runs may run again in the other thread.
    """
    total, of_kind = 0, dict[str, Call]()
    for phase in Phase:
        for operator in graph.operators:
            for item in calls_of(graph, operator.implementations[0]) if operator.phase is phase else ():
                if traits_of(item.call.target).runs_on_cublas and item.alone_bytes <= room_bytes:
                    of_kind.setdefault(item.call.target, item.call)
        total += meter.kept_bytes([partial(run_once, call, meter.device) for call in of_kind.values()])
    return total
