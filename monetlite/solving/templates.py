"""Templates of the boolean program: sequences of slots, each of which runs one operator or does nothing."""

import random
from dataclasses import dataclass

from monetlite.schedule import Step
from monetlite.solving.options import Outline


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for one run of an operator. `main`: it must run; `fixed`: a candidate that must run too."""

    operator: int
    main: bool
    fixed: bool = False


def full_template(outline: Outline, passes: int = 1) -> list[Slot]:
    """Every main operator, and before each of them every candidate that could be of use there."""
    slots: list[Slot] = []
    operators = outline.profile.graph.operators
    for at, main in enumerate(outline.main):
        useful = outline.useful_before(at)
        candidates = [
            operator
            for operator in outline.extra
            if any(not useful.isdisjoint(option.writes) for option in outline.options[operator])
            and (operators[operator].optional or at >= outline.forward_main)
            and (operators[operator].rerunnable or operators[operator].optional)
        ]
        for _ in range(passes):
            slots.extend(Slot(operator, main=False) for operator in candidates)
        slots.append(Slot(main, main=True))
    return slots


def window_template(outline: Outline, steps: tuple[Step, ...], *, seed: int, width: int) -> list[Slot]:
    """The steps themselves, and every candidate within a random window of `width` backward stages."""
    places = len(outline.main)
    backward = places - outline.forward_main
    start = outline.forward_main + random.Random(seed).randrange(max(1, backward - width + 1))
    window = range(start, min(places, start + width))
    candidates: dict[int, list[int]] = {}
    stage: list[int] = []
    for slot in full_template(outline):
        if slot.main:
            candidates[outline.position[slot.operator]] = stage
            stage = []
        else:
            stage.append(slot.operator)
    slots: list[Slot] = []
    ran: set[int] = set()
    pending: list[int] = []
    for operator, _ in steps:
        if operator in outline.position and operator not in ran:
            at = outline.position[operator]
            offered = candidates[at] if at in window else []
            slots.extend(Slot(other, main=False) for other in _merged(pending, offered))
            slots.append(Slot(operator, main=True))
            pending = []
        else:
            pending.append(operator)
        ran.add(operator)
    return slots


def _merged(first: list[int], second: list[int]) -> list[int]:
    """A sequence that has both as subsequences; `second` is in graph order."""
    merged: list[int] = []
    rest = list(second)
    for operator in first:
        if operator in rest:
            at = rest.index(operator)
            merged.extend(rest[: at + 1])
            rest = rest[at + 1 :]
        else:
            merged.append(operator)
    return merged + rest
