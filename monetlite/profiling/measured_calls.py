"""Single calls of operators, as they are measured: which ones a graph makes, and what one of them costs."""

import contextlib
import gc
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from monetlite.core.costs import Cost
from monetlite.core.errors import CompileError, ProfileError, first_line
from monetlite.core.graph import Call, Implementation, OperatorGraph
from monetlite.fx.torch_internals.torch_aot import without_autocast
from monetlite.operators import resolve
from monetlite.operators.cudnn import is_plan
from monetlite.operators.implementations import FUNCTIONS
from monetlite.operators.program_calls import prepared
from monetlite.operators.random import REPLAY, drawn_call, forked_state
from monetlite.operators.regions import is_compiled
from monetlite.operators.strides import item_bytes
from monetlite.profiling.arguments import arguments_bytes, depends_on_contents, make_arguments
from monetlite.profiling.memory_use import is_out_of_memory
from monetlite.profiling.meters import Meter


@dataclass(kw_only=True)
class MeasuredCall:
    """A distinct call to measure, named after the first operator and implementation that make it.

    Attributes:
        result_bytes: memory of its results beyond the memory that they take over.
        needed: True if the default implementation of some operator makes it.
        only_plans: True if only cuDNN's plans make it.
    """

    call: Call
    result_bytes: int
    name: str = ""
    needed: bool = False
    only_plans: bool = True

    @property
    def signature(self) -> str:
        return f"{self.call.signature} {self.result_bytes}"

    @property
    def moved_bytes(self) -> int:
        """Bytes that it reads and writes."""
        specs = [ref.spec for ref in self.call.tensors()]
        return self.result_bytes + sum(math.prod(spec.shape) * item_bytes(spec.dtype) for spec in specs)

    @property
    def own_bytes(self) -> int:
        """Memory for itself, of functions that say it for a GPU."""
        registered = FUNCTIONS.get(self.call.target)
        return 0 if registered is None else registered.workspace_bytes(self.call)

    @property
    def alone_bytes(self) -> int:
        """Memory that a step needs for it at the least, beside what is resident.

        What other implementations take for themselves is left out: that figure may be too high, and would rule
        them out.
        """
        of_step_bytes = arguments_bytes(self.call, resident=False) + self.result_bytes
        return of_step_bytes + (self.own_bytes if self.needed else 0)


def calls_to_measure(graph: OperatorGraph) -> dict[str, MeasuredCall]:
    """Calls to measure, by signature."""
    found: dict[str, MeasuredCall] = {}
    for operator in graph.operators:
        for number, item in enumerate(operator.implementations):
            for call in calls_of(graph, item):
                known = found.setdefault(call.signature, call)
                known.name = known.name or f"{operator.name} ({call.call.target}, {item.name})"
                known.needed |= number == 0
                known.only_plans &= is_plan(item.name)
    return found


def calls_of(graph: OperatorGraph, item: Implementation) -> Iterator[MeasuredCall]:
    """The first call of an implementation and, where later runs make another call, that one."""
    if item.call is None or not item.call.outputs:  # nothing is computed
        return
    overwritten = sum(graph.values[value].size_bytes for value in item.overwrites)
    used = [position for position, name in enumerate(item.call.outputs) if name is not None]
    size = {position: graph.values[value].size_bytes for position, value in zip(used, item.writes, strict=False)}
    for call in (item.call, item.again):
        if call is item.call or (call is not None and call.target != REPLAY):
            written = sum(size.get(position, 0) for position, name in enumerate(call.outputs) if name is not None)
            if call.target == REPLAY:  # a state of the generator can't be made up
                call = drawn_call(call)
            yield MeasuredCall(call=call, result_bytes=written - overwritten)


class LacksMemory(ProfileError):
    """A call that did not fit beside what else is in memory."""


def measure_call(candidate: MeasuredCall, meter: Meter, room_bytes: float) -> Cost:
    """Costs of a call, which runs on other arguments where it fails on the usual ones.

    Raises:
        LacksMemory: there is not enough memory for it.
        CompileError: Inductor can't compile it.
        ProfileError: it can't be run alone.
    """
    try:
        try:
            return cost_of_call(candidate, meter, room_bytes)
        except (RuntimeError, IndexError) as error:
            if is_out_of_memory(error) or isinstance(error, CompileError):
                raise
            try:
                return cost_of_call(candidate, meter, room_bytes, fractions=True)
            except RuntimeError:
                raise error from None
    except CompileError:
        raise
    except (RuntimeError, MemoryError, IndexError, TypeError) as error:
        reason = first_line(error)
        if is_out_of_memory(error):
            raise LacksMemory(
                f"{candidate.name} does not fit into {meter.device}'s memory, alone: {reason}. "
                "Free what else is there, lower the batch, or estimate the costs instead (name a device, as in "
                "--device a100-40gb)"
            ) from error
        raise ProfileError(
            f"{candidate.name} can't be measured alone on {meter.device}: {reason}. "
            "Estimate the costs instead (name a device, as in --device a100-40gb), or lower the batch"
        ) from error
    finally:
        gc.collect(0)


def cost_of_call(
    measured: MeasuredCall,
    meter: Meter,
    room_bytes: float = math.inf,
    *,
    fractions: bool = False,
    rough: bool = False,
) -> Cost:
    """Costs of a call; with `rough`, of one or two runs."""
    with as_function(measured.call, meter.device, fractions=fractions) as (call, recent):
        if meter.device == "cuda" or is_compiled(measured.call.target):
            call()  # has libraries allocate what they keep, or compiles, and tunes with memory of its own
        taken_ms: list[float] = []
        growth_bytes = meter.growth_bytes(lambda: taken_ms.append(meter.once_ms(call)))
        if rough and len(taken_ms) < 2:
            taken_ms.append(meter.once_ms(call))  # without what the first run has to load
        room = room_bytes - arguments_bytes(measured.call) - growth_bytes
        latency_ms = min(taken_ms) if rough else meter.latency_ms(call, recent, room)
        host_ms = 0.0 if rough else meter.host_ms(call)
        workspace_bytes = max(0, growth_bytes - measured.result_bytes)
        return Cost(latency_ms=latency_ms, workspace_bytes=workspace_bytes, host_ms=host_ms)


@contextlib.contextmanager
def as_function(
    call: Call, device: str, *, fractions: bool = False
) -> Iterator[tuple[Callable[[], object], torch.Tensor | None]]:
    """A call with arguments (see `make_arguments`), and the first of those that is a tensor.

    Where a kernel for CUDA finds its arguments wrong, CUDA is lost to the process. So a call whose arguments may be
    wrong runs on the CPU first, which raises an error. Autocast of the caller is off: calls have its conversions.
    """
    function = prepared(call.target, resolve(call.target))
    if device == "cuda" and depends_on_contents(call):
        with contextlib.suppress(NotImplementedError), as_function(call, "cpu", fractions=fractions) as (tried, _):
            tried()
    with torch.no_grad(), without_autocast(), forked_state(device):
        args, kwargs = make_arguments(call, device, fractions=fractions)
        yield (
            lambda: function(*args, **kwargs),
            next((item for item in args if isinstance(item, torch.Tensor)), None),
        )


def run_once(call: Call, device: str) -> None:
    """Run a call on arguments that are made for it."""
    with as_function(call, device) as (function, _):
        function()
