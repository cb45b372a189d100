"""From a solution of the relaxation to steps that come close to it, for a search to begin with.

The relaxation ignores part of the memory that a schedule needs, so what it finds best is rarely legal as it is; but
it sees the whole problem at once, and what it stores is mostly what is best to store.
"""

from collections import Counter
from collections.abc import Iterator

from monetlite.core.steps import Step
from monetlite.solving.bounding.relaxation import Relaxation
from monetlite.solving.bounding.zero_one import Floats
from monetlite.solving.problem import Option


def guided_steps(relaxation: Relaxation, solution: Floats) -> tuple[Step, ...] | None:
    """Steps that store, keep and choose as a solution of the relaxation does; None if there are none.

    They run what is missing right before it is read, may overwrite what is read again, and may need more
    memory than there is: a place to start from, for `annealing.flat_problem.encode`.

    Args:
        relaxation: of the problem. solution: the values of its columns, 0 to 1.
    """
    try:
        return tuple(_steps(relaxation, solution))
    except _NoWay:
        return None


class _NoWay(Exception):
    """Something is read that nothing makes."""


def _steps(relaxation: Relaxation, solution: Floats) -> Iterator[Step]:
    problem = relaxation.problem
    main, forward = problem.main, problem.forward_main
    available: set[int] = set()
    touched: set[int] = set()
    ran: set[int] = set()

    def cheapest(operator: int, wanted: int | None = None) -> Option:
        """The fastest option of an operator that writes a value, if one is wanted."""
        able = [option for option in problem.options[operator] if wanted is None or wanted in option.writes]
        if not able:
            raise _NoWay
        return min(able, key=lambda o: o.again_ms if operator in ran else o.first_ms)

    def run(operator: int, option: Option) -> Iterator[Step]:
        """Run an operator, and before it everything that makes its missing inputs."""
        waiting = [(operator, option)]
        while waiting:
            operator, option = waiting[-1]
            missing = sorted(option.reads - available)
            if not missing:
                waiting.pop()
                available.update(option.writes)
                touched.update(option.writes)
                ran.add(operator)
                yield operator, option.choice
                continue
            maker = problem.graph.writer[missing[0]]
            if maker not in problem.extra_set or len(waiting) > len(problem.options):
                raise _NoWay
            waiting.append((maker, cheapest(maker, missing[0])))

    chosen = [
        max(options, key=lambda item: solution[item[1]] if item[1] >= 0 else 1.0)[0]
        for options in relaxation.chosen
    ]
    stored = {value for value, column in relaxation.stored.items() if solution[column] > 0.5}
    early = {problem.graph.writer[value] for value in stored}.difference(problem.position)
    for at in range(forward):
        yield from run(main[at], chosen[at])
        for operator in sorted(early):
            option = cheapest(operator)
            if option.reads <= available:
                early.discard(operator)
                yield from run(operator, option)
    available -= relaxation.modelled - stored
    start = forward
    for checkpoint, live in zip((*relaxation.checkpoints, len(main) - 1), (*relaxation.live, {}), strict=True):
        span, start = range(start, checkpoint + 1), checkpoint + 1
        kept = {value for value, column in live.items() if solution[column] > 0.5}
        readers = Counter(value for at in span for value in chosen[at].reads)
        available -= relaxation.modelled - kept - readers.keys()
        for at in span:
            touched.clear()
            yield from run(main[at], chosen[at])
            readers.subtract(chosen[at].reads)
            if at < checkpoint:
                touched |= chosen[at].reads
                available -= {value for value in touched & relaxation.modelled if not readers[value]} - kept
