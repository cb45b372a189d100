"""The most memory that was asked for on a GPU, for several who measure at a time.

Torch's allocator has one such figure for a GPU. Whoever has it begin anew takes it from all others, who note it
before.
"""

import weakref

import torch


class GpuPeak:
    """The most bytes that were asked for on the current GPU since this was made, or was begun anew."""

    def __init__(self) -> None:
        self.device = torch.cuda.current_device()
        self.most_bytes = 0
        self.begin()
        _open.add(self)

    def begin(self) -> int:
        """Begin anew; returns the bytes that are in use."""
        now_bytes, most_bytes = self._asked_for()
        for other in list(_open):
            if other.device == self.device:
                other.most_bytes = max(other.most_bytes, most_bytes)
        torch.cuda.reset_peak_memory_stats(self.device)
        self.most_bytes = now_bytes
        return now_bytes

    def look(self) -> tuple[int, int]:
        """The bytes that are in use, and the most since the beginning."""
        now_bytes, most_bytes = self._asked_for()
        return now_bytes, max(self.most_bytes, most_bytes)

    def _asked_for(self) -> tuple[int, int]:
        stats = torch.cuda.memory_stats(self.device)
        # Others than torch's native allocator (cudaMallocAsync) don't count requests.
        kind = "requested" if torch.cuda.get_allocator_backend() == "native" else "allocated"
        return int(stats[f"{kind}_bytes.all.current"]), int(stats[f"{kind}_bytes.all.peak"])


_open: "weakref.WeakSet[GpuPeak]" = weakref.WeakSet()
