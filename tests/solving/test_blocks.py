"""Blocks, their plans and the master program, against brute force on random steps of a few blocks."""

import contextlib
import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from random_graphs import random_blocks, random_profile
from thoroughness import often

from monetlite.core.blocks import find_blocks
from monetlite.core.graph import Phase
from monetlite.core.options import SolvingOptions
from monetlite.core.simulate import simulate
from monetlite.core.steps import plain_steps
from monetlite.solving import solve_profile, solver
from monetlite.solving.blocks import deep_step, master_program
from monetlite.solving.blocks.block_plans import Plan, PlanSearch
from monetlite.solving.blocks.deep_step import DeepStep
from monetlite.solving.blocks.master_program import MasterProgram
from monetlite.solving.bounding.latency_bound import latency_bounds
from monetlite.solving.exhaustive import exhaustive, exhaustive_smallest_peak
from monetlite.solving.problem import Problem

NEVER = time.monotonic() + 10**6


def in_blocks(rng: random.Random, most: int = 4) -> DeepStep:
    """A random step of two to four blocks, with plans of one and of two."""
    while True:
        profile = random_blocks(rng, rng.randint(2, most))
        blocks = find_blocks(profile.graph)
        if len(blocks) > 1:
            break
    step = DeepStep(profile, blocks, seed=0)
    for length in (1, 2):
        step.sweep(length, 0.02, lambda: False)
    return step


def covers(step: DeepStep) -> list[list[tuple[int, int]]]:
    """Every sequence of stretches that holds each block once."""
    places, count = sorted(step.plans()), len(step.blocks)

    def onwards(start: int) -> list[list[tuple[int, int]]]:
        if start == count:
            return [[]]
        return [[place, *rest] for place in places if place[0] == start for rest in onwards(place[1])]

    return onwards(0)


def test_an_interrupt_ends_all_searches_for_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = random_blocks(random.Random(0), 5)
    deep = DeepStep(profile, find_blocks(profile.graph), 0)
    presses, ended = [signal.SIGINT], []

    def search(self: PlanSearch, points: int, seconds: float, finished: Callable[[], bool]) -> None:
        time.sleep(0.2)  # until the main thread waits
        with contextlib.suppress(IndexError):
            os.kill(os.getpid(), presses.pop())
        end = time.monotonic() + 3
        while not finished() and time.monotonic() < end:
            time.sleep(0.01)
        ended.append(finished())

    monkeypatch.setattr(PlanSearch, "sweep", search)
    with pytest.raises(KeyboardInterrupt):
        deep.sweep(1, 60.0, lambda: False)
    assert ended
    assert all(ended)


@pytest.mark.parametrize("seed", range(60))
def test_blocks_are_a_partition_in_order(seed: int) -> None:
    rng = random.Random(seed)
    build = rng.choice([random_blocks, lambda rng, count: random_profile(rng, forward_operators=4 * count)])
    graph = build(rng, rng.randint(1, 6)).graph
    blocks = find_blocks(graph)
    assert sorted(index for block in blocks for index in (*block.forward, *block.backward)) == [
        *range(len(graph.operators))
    ]
    backward = [index for block in reversed(blocks) for index in block.backward]
    assert backward == sorted(backward)
    main = [i for block in blocks for i in block.forward if not graph.operators[i].optional]
    assert main == sorted(main)
    for at, block in enumerate(blocks):
        later = {value for other in blocks[at + 1 :] for value in other.written}
        behind = {value for index in block.backward for value in graph.operators[index].implementations[0].reads}
        read_late = {v for v in behind & later if graph.operators[graph.writer[v]].phase is Phase.FORWARD}
        assert not read_late, "the backward part of a block reads nothing that later blocks compute forward"


@pytest.mark.parametrize("seed", range(20))
def test_blocks_begin_where_they_are_told_to(seed: int) -> None:
    rng = random.Random(seed)
    graph = random_blocks(rng, rng.randint(2, 6)).graph
    starts = [block.forward[0] for block in find_blocks(graph)[1:]]
    chosen = sorted(rng.sample(starts, min(len(starts), 3)))
    blocks = find_blocks(graph, chosen)
    assert [block.forward[0] for block in blocks[1:]] == chosen
    assert sorted(index for block in blocks for index in (*block.forward, *block.backward)) == [
        *range(len(graph.operators))
    ]


def test_a_step_that_is_wide_everywhere_is_one_block() -> None:
    profile = random_blocks(random.Random(0), 4)
    graph = profile.graph
    assert len(find_blocks(graph)) > 2
    wide = [index for index, op in enumerate(graph.operators) if op.phase is Phase.FORWARD]
    last = wide[-1]
    everything = {value for index in wide[:-1] for value in graph.operators[index].writes}
    ways = tuple(
        replace(way, reads=tuple(sorted({*way.reads, *everything})), overwrites=())
        for way in graph.operators[last].implementations
    )
    operators = list(graph.operators)
    operators[last] = replace(operators[last], implementations=ways)
    assert len(find_blocks(replace(graph, operators=tuple(operators)))) == 1


@pytest.mark.parametrize("seed", often(range(40), *range(16)))
def test_plans_add_up(seed: int) -> None:
    """Plans put together are a legal schedule, as fast as they say, within the memory that the rows say."""
    rng = random.Random(seed)
    step = in_blocks(rng)
    plans = step.plans()
    resident = step.profile.graph.resident.total
    for _ in range(10):
        places = rng.choice(covers(step))
        chosen = [(place, rng.choice(plans[place])) for place in places]
        timeline = simulate(step.profile, step.steps(chosen))
        assert timeline.latency_ms == pytest.approx(sum(plan.time_ms for _, plan in chosen))
        assert timeline.peak_bytes <= resident + _rows(step, chosen)


def _rows(step: DeepStep, chosen: list[tuple[tuple[int, int], Plan]]) -> int:
    """The most memory that any row of the master program says."""
    kept_bytes, most = 0, 0
    for (_, end), plan in chosen:
        most = max(
            most, kept_bytes + plan.forward_bytes, kept_bytes + plan.backward_bytes + step.later_bytes[end - 1]
        )
        kept_bytes += plan.kept_bytes
    return most


@pytest.mark.parametrize("seed", often(range(25), *range(10)))
def test_the_master_program_is_solved_exactly(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds what trying every combination of plans finds."""
    rng = random.Random(1000 + seed)
    step = in_blocks(rng, most=3)
    plans = {place: of[:4] for place, of in step.plans().items()}
    everything = [
        list(zip(places, of, strict=True))
        for places in covers(step)
        for of in itertools.product(*(plans[place] for place in places))
    ]
    needs = sorted(_rows(step, chosen) for chosen in everything)
    for room_bytes in {needs[0] - 1, needs[0], needs[len(needs) // 2], needs[-1]}:
        fitting = [chosen for chosen in everything if _rows(step, chosen) <= room_bytes]
        master = MasterProgram(plans, step.later_bytes, room_bytes)
        found = master.solve(NEVER, 0.0)
        if not fitting:
            assert found is None
            continue
        assert found is not None
        assert _rows(step, found) <= room_bytes
        best_ms = min(sum(plan.time_ms for _, plan in chosen) for chosen in fitting)
        assert sum(plan.time_ms for _, plan in found) == pytest.approx(best_ms)
        with monkeypatch.context() as patch:  # among few plans it may find a slower one, but never none
            patch.setattr(master_program, "NEAR", 2)
            among_few = master.solve(NEVER, 0.0)
        assert among_few is not None
        assert _rows(step, among_few) <= room_bytes


@pytest.mark.parametrize("seed", range(20))
def test_a_solve_by_blocks_is_legal_and_within_its_bound(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the true optimum; small as they are, these steps would not be planned by blocks."""
    monkeypatch.setattr(solver, "_MIN_DEEP_OPERATORS", 0)
    monkeypatch.setattr(deep_step, "MIN_BLOCKS", 2)
    monkeypatch.setattr(solver, "SMALL_OPERATORS", 0)
    rng = random.Random(2000 + seed)
    profile = random_blocks(rng, rng.randint(2, 3), operators=2)
    problem = Problem.of(profile)
    smallest = exhaustive_smallest_peak(problem).smallest_reached_bytes
    assert smallest is not None
    plain = simulate(profile, plain_steps(profile.graph))
    budget_bytes = (smallest + plain.peak_bytes) // 2
    optimum = exhaustive(problem, budget_bytes)
    solution = solve_profile(profile, budget_bytes, SolvingOptions(time_limit=0.7, seed=seed))
    assert solution.lower_bound_ms <= optimum.latency_ms * (1 + 1e-9)
    if solution.steps is not None:
        timeline = simulate(profile, solution.steps, budget_bytes)
        assert timeline.latency_ms >= optimum.latency_ms * (1 - 1e-9)


@pytest.mark.parametrize("seed", often(range(40), *range(16)))
def test_no_relaxation_of_any_size_exceeds_the_optimum(seed: int) -> None:
    rng = random.Random(3000 + seed)
    profile = random_blocks(rng, rng.randint(2, 4), operators=2)
    problem = Problem.of(profile)
    smallest = exhaustive_smallest_peak(problem)
    assert smallest.smallest_reached_bytes is not None
    plain = simulate(profile, plain_steps(profile.graph))
    budget_bytes = rng.randint(
        smallest.smallest_reached_bytes, max(plain.peak_bytes, smallest.smallest_reached_bytes)
    )
    optimum = exhaustive(problem, budget_bytes)
    bounds = [*latency_bounds(problem, budget_bytes, seconds=10)]
    assert len(bounds) > 3
    for bound in bounds:
        assert bound.lower_bound_ms <= optimum.latency_ms * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(15))
def test_prices_are_multipliers(seed: int) -> None:
    """At a linear optimum no plan that is there has a negative reduced cost, and one of each block's has none."""
    step = in_blocks(random.Random(4000 + seed))
    plans = step.plans()
    needs = sorted(
        _rows(
            step,
            [(place, min(plans[place], key=lambda plan: (plan.kept_bytes, plan.backward_bytes))) for place in of],
        )
        for of in covers(step)
    )
    prices = MasterProgram(plans, step.later_bytes, needs[0] + 3).prices()
    assert prices is not None
    reduced_ms = {place: [prices[place].reduced_ms(plan) for plan in of] for place, of in plans.items()}
    for of in reduced_ms.values():
        assert min(of) >= -1e-6
    for block in range(len(step.blocks)):
        holding = [min(of) for (start, end), of in reduced_ms.items() if start <= block < end]
        assert min(holding) == pytest.approx(0, abs=1e-6)
