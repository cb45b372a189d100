"""From a solution of the relaxation to steps that come close to it, for a search to begin with.

The relaxation (`relaxation`) ignores part of the memory that a schedule needs, so what it finds best is rarely
legal as it is; but it sees the whole problem at once, and what it stores is mostly what is best to store.
"""

from collections.abc import Iterator

from monetlite.core.steps import Step
from monetlite.solving.bounding.relaxation import Meaning
from monetlite.solving.bounding.zero_one import Floats
from monetlite.solving.problem import Option, Problem


def guided_steps(problem: Problem, meaning: Meaning, solution: Floats) -> tuple[Step, ...] | None:
    """Steps that store, keep and choose as a solution of the relaxation does; None if there are none.

    They run what is missing right before it is read, may overwrite what is read again, and may need more
    memory than there is: a place to start from, for `annealing.encoding.encode`.

    Args:
        problem: the problem. meaning: of the relaxation's columns. solution: their values, 0 to 1.
    """
    try:
        return tuple(_Reading(problem, meaning, solution).steps())
    except _NoWay:
        return None


class _NoWay(Exception):
    """Something is read that nothing makes."""


class _Reading:
    def __init__(self, problem: Problem, meaning: Meaning, solution: Floats) -> None:
        self.problem = problem
        self.meaning = meaning
        self.solution = solution
        self.available: set[int] = set()
        self.ran: set[int] = set()

    def steps(self) -> Iterator[Step]:
        problem, forward = self.problem, self.problem.forward_main
        stored = {value for value, column in self.meaning.stored.items() if self.solution[column] > 0.5}
        early = {maker for value in stored for maker in problem.producers[value] if maker not in problem.position}
        for at in range(forward):
            yield from self._run(problem.main[at], self._chosen(at))
            for operator in sorted(early):
                option = self._cheapest(operator)
                if option.reads <= self.available:
                    early.discard(operator)
                    yield from self._run(operator, option)
        self._keep(stored)
        ends = iter(zip(self.meaning.checkpoints, self.meaning.live, strict=True))
        checkpoint, live = next(ends, (forward - 1, {}))
        for at in range(forward, len(problem.main)):
            yield from self._run(problem.main[at], self._chosen(at))
            if at == checkpoint:
                checkpoint, live = next(ends, (len(problem.main), {}))
            soon = {
                value
                for later in range(at + 1, min(checkpoint + 1, len(problem.main)))
                for value in self._chosen(later).reads
            }
            self._keep(soon | {value for value, column in live.items() if self.solution[column] > 0.5})

    def _keep(self, values: set[int]) -> None:
        self.available -= self.meaning.modelled - values

    def _chosen(self, at: int) -> Option:
        options = self.meaning.chosen[at]
        return max(options, key=lambda item: self.solution[item[1]] if item[1] >= 0 else 1.0)[0]

    def _cheapest(self, operator: int) -> Option:
        options = self.problem.options[operator]
        if not options:
            raise _NoWay
        return min(options, key=lambda option: option.again_ms if operator in self.ran else option.first_ms)

    def _run(self, operator: int, option: Option) -> Iterator[Step]:
        """Run an operator, and before it everything that makes its missing inputs."""
        waiting = [(operator, option)]
        while waiting:
            operator, option = waiting[-1]
            missing = sorted(option.reads - self.available)
            if not missing:
                waiting.pop()
                self.available |= option.writes
                self.ran.add(operator)
                yield operator, option.choice
                continue
            makers = [maker for maker in self.problem.producers[missing[0]] if maker in self.problem.extra_set]
            if not makers or len(waiting) > len(self.problem.options):
                raise _NoWay
            waiting.append((makers[0], self._cheapest(makers[0])))
