"""The memory of a loss that the caller computes from a model's outputs, measured in the first training step.

Between the forward and the backward pass of a model runs code that nobody captured. What it takes at most, and what
it still has when the backward pass begins, is measured once and counted from then on.
"""

import ctypes
import gc
import threading
import time
from functools import cache
from typing import Any

import torch

from monetlite.core.costs import Profile, without_costs
from monetlite.core.graph import OperatorGraph
from monetlite.core.simulate import simulate
from monetlite.core.steps import Step
from monetlite.fx.torch_internals import torch_pytree as pytree
from monetlite.profiling.step_additions import LossMemory, with_outside_loss
from monetlite.runtime.gradient_delivery import CapturedStep

MAX_RECORDS = 3
"""Steps in which the loss is looked for, where others had no backward pass."""
NOISE_BYTES, NOISE_SHARE = 2**18, 0.01
"""Memory of Python objects and the like, which doesn't count: so much, or such a share of the outputs."""
SAMPLING_SECONDS, MAX_SECONDS = 0.0005, 60.0
"""Between two looks at the memory in use on a CPU, and for how long they go on."""


class OutsideLoss:
    """The caller's loss.

    Attributes:
        memory: of the loss, once it is known.
    """

    def __init__(self) -> None:
        self.memory: LossMemory | None = None
        self._record: _Record | None = None
        self._left = MAX_RECORDS
        self._planned: tuple[OperatorGraph, tuple[Step, ...]] | None = None
        self._step: CapturedStep | None = None

    def planned(self, graph: OperatorGraph, steps: tuple[Step, ...]) -> None:
        """Note the step that is being captured, and the plan that it begins with."""
        self._planned = graph, steps

    def keep(self, step: CapturedStep) -> None:
        """Note the programs of the step that was captured last."""
        self._step = step

    def forward_ends(self, output: Any, device: str, least_bytes: float) -> None:
        """Begin to measure, unless that was done, or the outputs are smaller than so much."""
        if self.memory is not None or not self._left or self._step is None:
            return
        leaves = pytree.tree_leaves(output)
        outputs_bytes = sum(item.nbytes for item in leaves if isinstance(item, torch.Tensor) and item.requires_grad)
        if outputs_bytes < least_bytes:
            return
        self._left -= 1
        gc.collect()  # so that what the capture leaves behind is not freed meanwhile
        record = self._record = _Record(device, outputs_bytes)
        self._step.watch = lambda what: record.end() if what == "begin" else None

    def measured(self) -> LossMemory | None:
        """The memory of the loss, if the last step was the one in which it was measured."""
        record, self._record = self._record, None
        if record is None:
            return None
        if self._step is not None:
            self._step.watch = None
        record.end(found=False)
        self.memory = record.found
        return self.memory

    def counted(self, profile: Profile) -> Profile:
        """A profile with what the loss is known to take."""
        return profile if self.memory is None else with_outside_loss(profile, self.memory)

    def peak_bytes(self) -> int:
        """The peak of the step that was captured last, with the loss; workspaces of operators don't count."""
        assert self._planned is not None
        graph, steps = self._planned
        return simulate(self.counted(without_costs(graph)), steps).peak_bytes


class _Record:
    """Memory in use from the end of a forward pass to the beginning of its backward pass.

    On a CPU the allocator is asked every half millisecond: torch's profiler would have to stay on until the next
    step, as it can't end in a backward pass.

    Attributes:
        found: what the loss took; None before the end, and where it can't be known.
    """

    def __init__(self, device: str, outputs_bytes: int) -> None:
        self.found: LossMemory | None = None
        self._outputs_bytes, self._cuda = outputs_bytes, device == "cuda"
        self._ended = threading.Event()
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        self._before = self._peak = self._in_use() or 0
        if not self._cuda and self._before:
            threading.Thread(target=self._sample, daemon=True).start()

    def _in_use(self) -> int | None:
        if self._cuda:
            stats = torch.cuda.memory_stats()
            self._peak = stats["requested_bytes.all.peak"]
            return int(stats["requested_bytes.all.current"])
        return allocated_bytes()

    def _sample(self) -> None:
        until = time.monotonic() + MAX_SECONDS
        while not self._ended.wait(SAMPLING_SECONDS) and time.monotonic() < until:
            self._peak = max(self._peak, self._in_use() or 0)

    def end(self, *, found: bool = True) -> None:
        """End it; later calls do nothing."""
        if self._ended.is_set():
            return
        now = self._in_use()
        self._ended.set()
        if found and self._before and now:
            # Beside the gradients of the outputs, which a plan counts.
            kept_bytes = self._noteworthy(now - self._before - self._outputs_bytes)
            taken_bytes = self._noteworthy(self._peak - self._before - self._outputs_bytes - kept_bytes)
            whole = self._outputs_bytes
            self.found = LossMemory(kept=kept_bytes / whole, taken=taken_bytes / whole)

    def _noteworthy(self, size_bytes: int) -> int:
        return size_bytes if size_bytes > max(NOISE_BYTES, NOISE_SHARE * self._outputs_bytes) else 0


_MALLINFO = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _Mallinfo(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_size_t) for name in _MALLINFO.split())


@cache
def _mallinfo() -> Any:
    found = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if found is not None:
        found.restype = _Mallinfo
    return found


def allocated_bytes() -> int | None:
    """Bytes that this process has allocated and not freed; None where the C library doesn't say (glibc does)."""
    asked = _mallinfo()
    if asked is None:
        return None
    told = asked()
    return int(told.uordblks + told.hblkhd)
