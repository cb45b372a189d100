"""What is in memory at a main operator whatever the schedule: the ground that every bound stands on."""

from dataclasses import dataclass

from monetlite.solving.options import Option, Outline


@dataclass(frozen=True, kw_only=True)
class Lifetimes:
    """What is known of values before anything is decided.

    `fixed_bytes[m]` is live before main operator m in every schedule, and is no modelled value;
    `pinned_until[v]` is the last main operator before which value v certainly is live, −1 if there is none.
    """

    fixed_bytes: list[int]
    pinned_until: list[int]


def certain_lifetimes(outline: Outline) -> Lifetimes:
    """The values that are live before each main operator whatever the schedule, modelled values left out.

    A value that only a main operator makes, and that cannot be made again, stays from its maker to the last
    main operator that reads it in every implementation; a held value stays to the end.
    """
    count = len(outline.main)
    pinned_until = [-1] * len(outline.size_bytes)
    for at, operator in enumerate(outline.main):
        for value in outline.must_read[operator]:
            pinned_until[value] = at
    change = [0] * (count + 1)
    for value, makers in enumerate(outline.producers):
        if len(makers) != 1 or makers[0] not in outline.position:
            pinned_until[value] = -1
            continue
        maker, made_at = makers[0], outline.position[makers[0]]
        if value not in outline.always_writes[maker]:
            pinned_until[value] = -1
            continue
        if outline.held[value]:
            pinned_until[value] = count - 1
        elif made_at < outline.forward_main and outline.profile.graph.operators[maker].rerunnable:
            # It can be made again in the backward part: certain only up to its last forward reader.
            pinned_until[value] = max(
                (at for at in outline.main_readers[value] if at < outline.forward_main), default=-1
            )
        if pinned_until[value] > made_at:
            change[made_at + 1] += outline.size_bytes[value]
            change[pinned_until[value] + 1] -= outline.size_bytes[value]
        else:
            pinned_until[value] = -1
    fixed_bytes, running = [], 0
    for at in range(count):
        running += change[at]
        fixed_bytes.append(running)
    return Lifetimes(fixed_bytes=fixed_bytes, pinned_until=pinned_until)


def own_bytes(outline: Outline, at: int, option: Option, lifetimes: Lifetimes, modelled: frozenset[int]) -> int:
    """What main operator `at` needs with an option beyond `fixed_bytes` and modelled values."""
    size = outline.size_bytes
    reads = sum(
        size[value] for value in option.reads if value not in modelled and not pinned(outline, lifetimes, value, at)
    )
    return reads + sum(size[value] for value in option.writes) + option.first_extra_bytes


def pinned(outline: Outline, lifetimes: Lifetimes, value: int, at: int) -> bool:
    """Whether `fixed_bytes[at]` counts the value."""
    if lifetimes.pinned_until[value] < at:
        return False
    return outline.position[outline.producers[value][0]] < at
