"""The allocator on paper: its rules one by one, and all of them against a second way to write them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_allocator import NaiveAllocator
from thoroughness import some

from monetlite.allocator import Allocator

KIB, MIB = 2**10, 2**20


@pytest.mark.parametrize(
    ("size", "reserved", "allocated"),
    [
        (1, 2 * MIB, 512),
        (513, 2 * MIB, KIB),
        (MIB, 2 * MIB, MIB),
        (MIB + 1, 20 * MIB, MIB + 512),
        (10 * MIB - 512, 20 * MIB, 10 * MIB - 512),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),  # what is left, a mebibyte, is not worth a block
        (11 * MIB - 512, 12 * MIB, 11 * MIB - 512),
    ],
)
def test_a_request_by_the_default_settings(size: int, reserved: int, allocated: int) -> None:
    allocator = Allocator(expandable=False)
    allocator.allocate(size)
    assert (allocator.reserved_bytes, allocator.allocated_bytes) == (reserved, allocated)


def test_the_smallest_free_block_that_fits_is_taken_and_neighbours_become_one() -> None:
    allocator = Allocator(expandable=False)
    large, small = allocator.allocate(100 * MIB), allocator.allocate(40 * MIB)
    allocator.free(large)
    allocator.free(small)
    first = allocator.allocate(30 * MIB)
    assert first == small
    halves = [allocator.allocate(50 * MIB), allocator.allocate(50 * MIB)]
    assert halves[0] == large
    for half in halves:
        allocator.free(half)
    assert allocator.allocate(100 * MIB) == large
    assert allocator.reserved_bytes == 140 * MIB


def test_between_blocks_lies_what_no_request_fits() -> None:
    """Ten blocks of 20 MiB, every other freed: 100 MiB are free, and 40 are taken anew."""
    for expandable in (False, True):
        allocator = Allocator(expandable=expandable)
        blocks = [allocator.allocate(20 * MIB) for _ in range(10)]
        for block in blocks[::2]:
            allocator.free(block)
        allocator.allocate(40 * MIB)
        assert allocator.reserved_bytes == 240 * MIB
        assert allocator.allocated_bytes == 140 * MIB


def test_within_a_limit_free_pages_go_back_first() -> None:
    for expandable in (False, True):
        allocator = Allocator(expandable=expandable, limit_bytes=200 * MIB)
        blocks = [allocator.allocate(20 * MIB) for _ in range(10)]
        for block in blocks[::2]:
            allocator.free(block)
        allocator.allocate(40 * MIB)
        assert (allocator.reserved_bytes, allocator.releases, allocator.failures) == (140 * MIB, 1, 0)
        allocator.allocate(80 * MIB)
        assert (allocator.reserved_bytes, allocator.releases, allocator.failures) == (220 * MIB, 2, 1)


def test_only_whole_pages_and_whole_segments_go_back() -> None:
    for expandable, reserved, failures in ((False, 70 * MIB, 1), (True, 60 * MIB, 0)):
        allocator = Allocator(expandable=expandable, limit_bytes=60 * MIB)
        allocator.free(allocator.allocate(40 * MIB))
        allocator.allocate(10 * MIB)  # half of the first page, a quarter of the only segment
        allocator.allocate(2 * MIB)
        allocator.allocate(29 * MIB)  # one more than is left
        assert (allocator.releases, allocator.failures) == (1, failures)
        assert allocator.reserved_bytes == reserved


def test_pages_may_go_beyond_a_limit_by_less_than_one() -> None:
    allocator = Allocator(expandable=True, limit_bytes=50 * MIB)
    allocator.allocate(2 * MIB)
    allocator.allocate(29 * MIB)
    assert (allocator.reserved_bytes, allocator.failures) == (40 * MIB, 0)
    allocator.allocate(10 * MIB)
    assert (allocator.reserved_bytes, allocator.failures) == (60 * MIB, 0)


requests = st.lists(
    st.tuples(
        st.integers(1, 64 * MIB) | st.integers(1, 3 * MIB) | st.sampled_from([MIB, MIB + 1, 10 * MIB, 20 * MIB]),
        st.integers(0, 7),
        st.booleans(),
    ),
    max_size=60,
)


@settings(deadline=None, max_examples=some(300))
@given(requests=requests, expandable=st.booleans(), limit=st.none() | st.integers(20 * MIB, 400 * MIB))
def test_any_requests_against_the_list_of_intervals(
    requests: list[tuple[int, int, bool]], expandable: bool, limit: int | None
) -> None:
    ours, theirs = Allocator(expandable=expandable, limit_bytes=limit), NaiveAllocator(expandable, limit)
    live: list[tuple[tuple[int, int], tuple]] = []
    for size, which, frees in requests:
        if frees and live:
            block, other = live.pop(which % len(live))
            ours.free(block)
            other[0].drop(*other[1:])
        else:
            live.append((ours.allocate(size), theirs.allocate(size)))
        assert ours.reserved_bytes == theirs.reserved
        assert ours.allocated_bytes == theirs.used <= ours.reserved_bytes
        assert (ours.releases, ours.failures) == (theirs.releases, theirs.failures)
        if limit is not None and not ours.failures:
            assert ours.peak_reserved_bytes <= limit + 20 * MIB * expandable
    for block, other in live:
        ours.free(block)
        other[0].drop(*other[1:])
    assert ours.allocated_bytes == theirs.used == 0
