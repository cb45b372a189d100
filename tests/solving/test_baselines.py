"""What others do, as steps."""

import contextlib
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from random_graphs import random_profile

from monetlite.core.choices import Choices
from monetlite.core.errors import IllegalSchedule
from monetlite.core.graph import Phase, ValueKind
from monetlite.core.options import SolvingOptions
from monetlite.core.simulate import simulate
from monetlite.core.steps import plain_steps
from monetlite.solving import baselines, solve_profile
from monetlite.solving.annealing.flat_problem import flatten
from monetlite.solving.annealing.greedy import Greedy
from monetlite.solving.annealing.search import search
from monetlite.solving.incumbent import Incumbent
from monetlite.solving.problem import Problem


@pytest.mark.parametrize("seed", range(40))
def test_every_baseline_is_legal(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randint(1, 14)
    profile = random_profile(rng, count)
    boundaries = sorted(rng.sample(range(1, count + 1), min(count, 3)))
    for steps in (
        baselines.sqrt_checkpointing(profile),
        baselines.segment_checkpointing(profile),
        baselines.segment_checkpointing(profile, boundaries),
        baselines.segment_checkpointing(profile, []),
    ):
        simulate(profile, steps)
        runs = Counter(operator for operator, _ in steps)
        for index, operator in enumerate(profile.graph.operators):
            assert runs[index] <= (2 if operator.rerunnable else 1) or operator.optional


@pytest.mark.parametrize("seed", range(20))
def test_lighter_implementations_lower_the_peak_as_far_as_one_change_can(seed: int) -> None:
    profile = random_profile(random.Random(seed), 8)
    steps = baselines.segment_checkpointing(profile)
    before = simulate(profile, steps)
    assert baselines.with_lighter_implementations(profile, steps, before.peak_bytes) == steps
    least = baselines.with_lighter_implementations(profile, steps, 0)
    peaks = [lighter.peak_bytes for lighter in baselines.lighter_steps(profile, steps)]
    assert peaks == sorted(set(peaks), reverse=True)
    after = simulate(profile, least)
    assert [index for index, _ in least] == [index for index, _ in steps]
    assert after.peak_bytes <= before.peak_bytes
    index, _ = least[after.peak_step]
    for choice in range(len(profile.graph.operators[index].implementations)):
        changed = (*least[: after.peak_step], (index, choice), *least[after.peak_step + 1 :])
        with contextlib.suppress(IllegalSchedule):
            assert simulate(profile, changed).peak_bytes >= after.peak_bytes


def test_sqrt_checkpointing_of_a_chain() -> None:
    """16 operators in 4 segments: each is re-run once, but for the last of each segment: that is kept."""
    from test_search import chain

    profile = chain(16)
    steps = baselines.sqrt_checkpointing(profile)
    runs = Counter(operator for operator, _ in steps)
    assert [runs[operator] for operator in range(16)] == [2, 2, 2, 1] * 3 + [2, 2, 2, 2]
    plain = simulate(profile, plain_steps(profile.graph))
    assert simulate(profile, steps).peak_bytes < plain.peak_bytes


@pytest.mark.parametrize("seed", range(30))
def test_as_many_reruns_are_left_out_as_a_budget_has_memory_for(seed: int) -> None:
    profile = random_profile(random.Random(seed), 8)
    plain = simulate(profile, plain_steps(profile.graph))
    for steps in baselines.checkpointing_settings(profile):
        whole = simulate(profile, steps)
        least, most = sorted((whole.peak_bytes, plain.peak_bytes))
        for budget_bytes in (least, (least + most) // 2, most, 10 * most):
            fewer = baselines.with_fewer_reruns(profile, steps, budget_bytes)
            found = simulate(profile, fewer)
            fewest = simulate(profile, baselines.with_fewer_reruns(profile, steps, budget_bytes, parts=len(steps)))
            assert fewest.latency_ms <= found.latency_ms
            assert fewest.peak_bytes <= max(budget_bytes, whole.peak_bytes)
            if budget_bytes < whole.peak_bytes:
                assert fewer == steps or found.peak_bytes <= budget_bytes
                continue
            assert found.peak_bytes <= budget_bytes
            assert found.latency_ms <= whole.latency_ms
            assert Counter(fewer) <= Counter(steps)
            assert {index for index, _ in fewer} == {index for index, _ in steps}
            if budget_bytes == 10 * most and len(steps) - len(set(steps)) < 64:
                assert len(fewer) == len(set(steps)), "something is still run twice"


def test_boundaries_from_module_paths() -> None:
    profile = random_profile(random.Random(1), 6, optional=False)
    modules = iter(["stem", "layer1.0.conv", "layer1.0.norm", "layer1.1.conv", "layer2.0.conv", "head"])
    operators = tuple(
        replace(operator, module=next(modules)) if operator.phase is Phase.FORWARD else operator
        for operator in profile.graph.operators
    )
    graph = replace(profile.graph, operators=operators)
    assert baselines.module_boundaries(graph) == [1, 3, 4, 5]
    assert baselines.module_boundaries(graph, depth=1) == [1, 4, 5]
    assert baselines.module_boundaries(profile.graph) == []


def test_boundaries_where_one_value_passes() -> None:
    from test_search import chain

    assert baselines.articulation_boundaries(chain(5).graph) == [1, 2, 3, 4]


def test_greedy_fits_or_says_so() -> None:
    feasible = 0
    for seed in range(20):
        profile = random_profile(random.Random(seed), 8)
        budget_bytes = int(0.8 * simulate(profile, plain_steps(profile.graph)).peak_bytes)
        steps = Greedy(flatten(Problem.of(profile)), budget_bytes).best()
        if steps is not None:
            feasible += 1
            simulate(profile, steps, budget_bytes)
    assert feasible >= 10
    assert Greedy(flatten(Problem.of(profile)), 1).best() is None


def test_checkmate_has_default_implementations_only() -> None:
    for seed in range(10):
        profile = random_profile(random.Random(seed), 4)
        budget_bytes = simulate(profile, plain_steps(profile.graph)).peak_bytes
        restricted = baselines.restrict_checkmate(profile)
        found = Incumbent(Problem.of(restricted), budget_bytes)
        search(found, seconds=0.05)
        assert found.steps is not None
        steps = Choices.of_steps(restricted.graph, found.steps).steps(profile.graph)
        assert all(choice == 0 for _, choice in steps)
        assert simulate(profile, steps, budget_bytes).latency_ms == found.latency_ms


def test_gist_reruns_nothing_and_reads_masks() -> None:
    for seed in range(10):
        profile = random_profile(random.Random(seed), 4)
        budget_bytes = simulate(profile, plain_steps(profile.graph)).peak_bytes
        restricted = baselines.restrict_gist(profile)
        found = Incumbent(Problem.of(restricted), budget_bytes)
        search(found, seconds=0.05)
        assert found.steps is not None
        steps = Choices.of_steps(restricted.graph, found.steps).steps(profile.graph)
        assert simulate(profile, steps, budget_bytes).latency_ms == found.latency_ms
        assert max(Counter(operator for operator, _ in steps).values()) == 1
        for operator, choice in steps:
            reads = profile.graph.operators[operator].implementations[choice].reads
            assert choice == 0 or any(profile.graph.values[v].kind is ValueKind.INTERMEDIATE for v in reads)


def test_no_setting_of_checkpointing_is_faster_at_its_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every module, every second, ...: at the peak of each, a solve is at least as fast."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    from synthetic_steps import transformer_step

    profile = transformer_step(4)
    settings = [simulate(profile, steps) for steps in baselines.checkpointing_settings(profile)]
    assert len({timeline.peak_bytes for timeline in settings}) > 2
    for timeline in settings:
        solution = solve_profile(profile, timeline.peak_bytes, SolvingOptions(time_limit=0.3))
        assert solution.latency_ms is not None
        assert solution.latency_ms <= timeline.latency_ms * (1 + 1e-9)


def test_settings_that_the_first_time_was_too_short_for_are_tried_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    monkeypatch.setattr("monetlite.solving.solver._SETTINGS_SHARE", 0.0)
    monkeypatch.setattr("monetlite.solving.solver.in_blocks", lambda profile, seed: None)
    from synthetic_steps import transformer_step

    profile = transformer_step(4)
    settings = [simulate(profile, steps) for steps in baselines.checkpointing_settings(profile)]
    leanest_bytes = min(timeline.peak_bytes for timeline in settings)
    solution = solve_profile(profile, leanest_bytes, SolvingOptions(time_limit=1.0))
    assert "checkpointing" in solution.methods
