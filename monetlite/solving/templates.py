"""Templates of the boolean program: sequences of slots, each of which runs one operator or does nothing."""

from dataclasses import dataclass

from monetlite.solving.options import Outline


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for one run of an operator; a `main` one must run."""

    operator: int
    main: bool


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
