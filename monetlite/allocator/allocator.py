"""torch's caching allocator for CUDA, on paper: addresses without memory.

It takes segments from the GPU and cuts blocks from them. A request gets the smallest free block that holds it, what
is left of a block becomes a free block, free neighbours become one. Requests of up to 1 MiB and larger ones have
segments apart. Nothing goes back to the GPU until a request finds no room within a limit; then all that can goes.
The rules and their constants are those of c10/cuda/CUDACachingAllocator.cpp in PyTorch, for one stream:

- by default a segment is as large as the request that it was taken for (2 MiB for small requests, 20 MiB for those
  of less than 10 MiB), and goes back once all of it is free;
- an *expandable* segment (`expandable_segments:True`) is a range of addresses that memory is put behind in pages of
  2 MiB (small requests) or 20 MiB, at the lowest addresses that make room, and taken away from page by page.
"""

import itertools
from bisect import bisect_left, insort
from dataclasses import dataclass
from enum import Enum

MIB = 2**20
SMALLEST = 512
"""Requests are rounded up to a multiple of this."""
SMALL = MIB
"""The largest request that is small."""
SMALL_PAGE, PAGE_BYTES = 2 * MIB, 20 * MIB
"""Of expandable segments, for small requests and for large ones."""
OWN_SEGMENT = 10 * MIB
"""From this size a request gets a segment of its own size, rounded up to 2 MiB."""
_ADDRESSES = 2**60
"""Addresses of a segment: more than any step needs, as on a GPU. So no two segments touch."""


class _State(Enum):
    USED = "used"
    FREE = "free"
    UNMAPPED = "unmapped"


@dataclass(slots=True)
class _SegmentBlock:
    """A part of a segment."""

    address: int
    size: int
    state: _State

    @property
    def end(self) -> int:
        return self.address + self.size


class _Pool:
    """The segments for requests of one kind, small or large."""

    def __init__(self, expandable: bool, page: int) -> None:
        self.expandable = expandable
        self.page = page
        self.blocks: dict[int, _SegmentBlock] = {}
        """By their addresses."""
        self._ending: dict[int, _SegmentBlock] = {}
        """By the addresses behind them."""
        self._free: list[tuple[int, int]] = []
        """(size, address) of the free blocks, in order."""
        self._unmapped: list[int] = []
        """Addresses of the unmapped blocks, in order."""
        self._segments = itertools.count(step=_ADDRESSES)
        if expandable:
            self._insert(_SegmentBlock(next(self._segments), _ADDRESSES, _State.UNMAPPED))

    def find(self, size: int) -> _SegmentBlock | None:
        """The free block that a request gets."""
        at = bisect_left(self._free, (size, -1))
        if at == len(self._free):
            return None
        # A block that can be expanded counts as large as it can become.
        while self.expandable and at + 1 < len(self._free) and self._room(at + 1) < self._room(at):
            at += 1
        return self.blocks[self._free[at][1]]

    def _room(self, at: int) -> int:
        block = self.blocks[self._free[at][1]]
        after = self.blocks.get(block.end)
        return block.size + (after.size if after is not None and after.state is _State.UNMAPPED else 0)

    def take(self, block: _SegmentBlock, size: int) -> _SegmentBlock:
        """Use a free block for a request, leaving the rest of it free where the rest is worth a block."""
        self._remove(block)
        rest = block.size - size
        if rest >= SMALLEST if self.expandable or self.page == SMALL_PAGE else rest > SMALL:
            self._insert(_SegmentBlock(block.address + size, rest, _State.FREE))
            block.size = size
        block.state = _State.USED
        self._insert(block)
        return block

    def give(self, block: _SegmentBlock) -> None:
        """Free a block, together with its free neighbours."""
        self._remove(block)
        block.state = _State.FREE
        self._insert_merged(block)

    def grow(self, size: int) -> tuple[_SegmentBlock, int]:
        """A free block for a request that finds none, and the bytes that the GPU was asked for."""
        if not self.expandable:
            room = _segment_bytes(size)
            block = _SegmentBlock(next(self._segments), room, _State.FREE)
            self._insert(block)
            return block, room
        block, asked = self._lowest(size), 0
        while block.state is _State.UNMAPPED or block.size < size:
            unmapped = block if block.state is _State.UNMAPPED else self.blocks[block.end]
            missing = size if unmapped is block else size - block.size
            mapped = _rounded(min(missing, unmapped.size), self.page)
            self._remove(unmapped)
            if mapped < unmapped.size:
                rest = _SegmentBlock(unmapped.address + mapped, unmapped.size - mapped, _State.UNMAPPED)
                self._insert(rest)
            block = self._insert_merged(_SegmentBlock(unmapped.address, mapped, _State.FREE))
            asked += mapped
        return block, asked

    def _lowest(self, size: int) -> _SegmentBlock:
        """The first block of the lowest addresses that hold a request with no block in use, some of them
        unmapped."""
        for address in self._unmapped:
            first = self.blocks[address]
            before = self._ending.get(address)
            if before is not None and before.state is _State.FREE:
                first = before
            room, block = 0, self.blocks.get(first.address)
            while room < size and block is not None and block.state is not _State.USED:
                room += block.size
                block = self.blocks.get(block.end)
            if room >= size:
                return first
        raise AssertionError("an expandable segment has more addresses than any step needs")

    def shrink(self) -> int:
        """Give back to the GPU all segments that are free, or all whole pages; returns the bytes."""
        returned = 0
        for size, address in list(self._free):
            block = self.blocks[address]
            if not self.expandable:
                if address % _ADDRESSES == 0 and block.end not in self.blocks:  # all of its segment
                    self._remove(block)
                    returned += size
                continue
            first, last = _rounded(address, self.page), block.end // self.page * self.page
            if first >= last:
                continue
            self._remove(block)
            if first > address:
                self._insert(_SegmentBlock(address, first - address, _State.FREE))
            if last < block.end:
                self._insert(_SegmentBlock(last, block.end - last, _State.FREE))
            self._insert_merged(_SegmentBlock(first, last - first, _State.UNMAPPED))
            returned += last - first
        return returned

    def _insert_merged(self, block: _SegmentBlock) -> _SegmentBlock:
        """Insert a block, joined by neighbours in its state."""
        before = self._ending.get(block.address)
        if before is not None and before.state is block.state:
            self._remove(before)
            block = _SegmentBlock(before.address, before.size + block.size, block.state)
        after = self.blocks.get(block.end)
        if after is not None and after.state is block.state:
            self._remove(after)
            block = _SegmentBlock(block.address, block.size + after.size, block.state)
        self._insert(block)
        return block

    def _insert(self, block: _SegmentBlock) -> None:
        self.blocks[block.address] = self._ending[block.end] = block
        if block.state is _State.FREE:
            insort(self._free, (block.size, block.address))
        elif block.state is _State.UNMAPPED:
            insort(self._unmapped, block.address)

    def _remove(self, block: _SegmentBlock) -> None:
        del self.blocks[block.address], self._ending[block.end]
        if block.state is _State.FREE:
            del self._free[bisect_left(self._free, (block.size, block.address))]
        elif block.state is _State.UNMAPPED:
            del self._unmapped[bisect_left(self._unmapped, block.address)]


class Allocator:
    """torch's caching allocator, on paper.

    Args:
        expandable: with `expandable_segments:True`.
        limit_bytes: the most that it may take from the GPU (`torch.cuda.set_per_process_memory_fraction`); an
            expandable segment may go beyond by less than a page.

    Attributes:
        allocated_bytes: of the blocks in use.
        reserved_bytes: what it has taken from the GPU; peak_reserved_bytes: the most that this was.
        releases: how often it gave back what it could, to stay within the limit.
        failures: how often that was not enough, which on a GPU is an out-of-memory error; it goes beyond the
            limit then.
    """

    def __init__(self, *, expandable: bool, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_reserved_bytes = 0
        self.releases = self.failures = 0
        self._pools = (_Pool(expandable, SMALL_PAGE), _Pool(expandable, PAGE_BYTES))

    def allocate(self, size: int) -> tuple[int, int]:
        """Take room for a request of some bytes, more than none; returns what `free` takes."""
        size = _rounded(size, SMALLEST)
        large = size > SMALL
        pool = self._pools[large]
        block = pool.find(size)
        if block is None:
            self._make_room(_segment_bytes(size))
            block, asked = pool.grow(size)
            self.reserved_bytes += asked
            self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        block = pool.take(block, size)
        self.allocated_bytes += block.size
        return large, block.address

    def _make_room(self, size: int) -> None:
        if self.limit_bytes is None or self.reserved_bytes + size <= self.limit_bytes:
            return
        self.releases += 1
        self.reserved_bytes -= sum(pool.shrink() for pool in self._pools)
        self.failures += self.reserved_bytes + size > self.limit_bytes

    def free(self, allocation: tuple[int, int]) -> None:
        """Free what `allocate` returned."""
        large, address = allocation
        pool = self._pools[large]
        block = pool.blocks[address]
        self.allocated_bytes -= block.size
        pool.give(block)


def _segment_bytes(size: int) -> int:
    """Bytes that the GPU is asked for, to meet a request."""
    if size <= SMALL:
        return SMALL_PAGE
    return PAGE_BYTES if size < OWN_SEGMENT else _rounded(size, 2 * MIB)


def _rounded(size: int, unit: int) -> int:
    return -(-size // unit) * unit
