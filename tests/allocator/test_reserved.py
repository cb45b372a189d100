"""What a schedule reserves on a GPU, and schedules for a budget of that."""

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
from commands import run
from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import random_profile
from step_lists import live_before, recompute

import monetlite
from monetlite.allocator import least_limit, reserve
from monetlite.allocator.reserved import requests_of
from monetlite.core.costs import Profile
from monetlite.core.errors import DeviceError, IllegalSchedule, InfeasibleBudget
from monetlite.core.graph import Implementation
from monetlite.core.simulate import simulate
from monetlite.core.steps import plain_steps
from monetlite.reporting.text_solve import reserved_in_words

BUDGET = 480 * 10**6


@pytest.fixture(scope="module")
def for_the_peak(profile: Profile) -> monetlite.Schedule:
    return monetlite.solve(profile, BUDGET, time_limit=2)


@pytest.fixture(scope="module")
def for_reserved(profile: Profile) -> monetlite.Schedule:
    return monetlite.solve(profile, BUDGET, reserved=True, time_limit=4)


def test_a_peak_is_allocated_and_more_is_reserved(profile: Profile, for_the_peak: monetlite.Schedule) -> None:
    for steps in (plain_steps(profile.graph), for_the_peak.steps(profile.graph)):
        timeline = simulate(profile, steps)
        by_default = reserve(profile, steps, expandable=False)
        expandable = reserve(profile, steps, expandable=True)
        assert timeline.peak_bytes < expandable.peak_bytes <= by_default.peak_bytes
        assert by_default.fits
        assert not by_default.releases


@settings(deadline=None, max_examples=100)
@given(seed=st.integers(0, 2**32), expandable=st.booleans())
def test_requests_add_up_to_the_timeline(seed: int, expandable: bool) -> None:
    """In blocks that need no rounding, the most that is allocated at a time is what `simulate` says."""
    rng = random.Random(seed)
    profile = in_blocks(random_profile(rng, rng.randint(2, 12)), 20 * 2**20)
    steps = recompute(
        profile.graph,
        drop=lambda _: rng.random() < 0.5,
        choose=lambda index: rng.randrange(len(profile.graph.operators[index].implementations)),
    )
    try:
        timeline = simulate(profile, steps)
    except IllegalSchedule:  # an operand is overwritten that is read later, or can't be made again
        return
    operators = profile.graph.operators
    for live, (index, choice) in zip(live_before(profile.graph, timeline), steps, strict=True):
        if live.intersection(operators[index].implementations[choice].writes):
            return  # computed though it is there, which no solver has done
    in_use: dict[int, int] = {}
    most_bytes = 0
    for number, size in requests_of(profile.graph, timeline):
        in_use[number] = size
        most_bytes = max(most_bytes, sum(in_use.values()))
    assert timeline.resident_bytes + most_bytes == timeline.peak_bytes
    assert timeline.peak_bytes <= reserve(profile, steps, expandable=expandable).peak_bytes


def in_blocks(profile: Profile, block_bytes: int) -> Profile:
    """The same step with every byte a block, no operand overwritten by a result of another size, and no operator
    that takes less than its results.
    """
    graph = profile.graph
    size = [value.size_bytes for value in graph.values]

    def resized(implementation: Implementation) -> Implementation:
        written = sum(size[value] for value in implementation.writes)
        same = len(implementation.writes) == 1 and all(
            size[value] == written for value in implementation.overwrites
        )
        return implementation if same else replace(implementation, overwrites=())

    return replace(
        profile,
        graph=replace(
            graph,
            values=tuple(replace(value, size_bytes=value.size_bytes * block_bytes) for value in graph.values),
            operators=tuple(
                replace(operator, implementations=tuple(map(resized, operator.implementations)))
                for operator in graph.operators
            ),
        ),
        costs=tuple(
            tuple(
                replace(
                    cost,
                    workspace_bytes=max(0, cost.workspace_bytes) * block_bytes,
                    recompute_workspace_bytes=(
                        None
                        if cost.recompute_workspace_bytes is None
                        else max(0, cost.recompute_workspace_bytes) * block_bytes
                    ),
                )
                for cost in costs
            )
            for costs in profile.costs
        ),
    )


def test_the_least_limit_is_enough_and_the_peak_is_not(profile: Profile, for_the_peak: monetlite.Schedule) -> None:
    timeline = simulate(profile, for_the_peak)
    least = least_limit(profile, for_the_peak)
    within = reserve(profile, for_the_peak, expandable=True, limit_bytes=least)
    assert within.fits
    assert within.peak_bytes <= least
    assert not reserve(profile, for_the_peak, expandable=True, limit_bytes=timeline.peak_bytes).fits


def test_a_budget_of_reserved_memory_is_kept_where_one_of_the_peak_is_not(
    profile: Profile, for_the_peak: monetlite.Schedule, for_reserved: monetlite.Schedule
) -> None:
    assert not reserve(profile, for_the_peak, expandable=True, limit_bytes=BUDGET).fits
    assert for_the_peak.reserved_bytes is None
    timeline = simulate(profile, for_reserved)
    within = reserve(profile, for_reserved, expandable=True, limit_bytes=BUDGET)
    assert within.fits
    assert within.peak_bytes <= BUDGET == for_reserved.budget_bytes
    assert timeline.peak_bytes == for_reserved.peak_bytes < for_reserved.reserved_bytes <= BUDGET
    assert 0 < for_reserved.smallest_proven_bytes <= for_reserved.smallest_reached_bytes <= timeline.peak_bytes
    assert for_reserved.lower_bound_ms <= for_the_peak.latency_ms <= 1.05 * for_reserved.latency_ms


def test_a_file_says_what_is_reserved(for_reserved: monetlite.Schedule, tmp_path: Path) -> None:
    for_reserved.save(tmp_path / "schedule.yaml")
    assert monetlite.load_schedule(tmp_path / "schedule.yaml").reserved_bytes == for_reserved.reserved_bytes
    assert "reserved_bytes" in (tmp_path / "schedule.yaml").read_text()


def test_what_cannot_be_reserved_is_refused(profile: Profile, for_reserved: monetlite.Schedule) -> None:
    smallest = simulate(profile, for_reserved).resident_bytes + 60 * 10**6
    with pytest.raises(InfeasibleBudget, match=r"is too small|no schedule was found"):
        monetlite.solve(profile, smallest, reserved=True, time_limit=0.5)
    with pytest.raises(DeviceError, match="costs are a CPU's"):
        monetlite.solve(monetlite.core.costs.Profile(**{**vars(profile), "device": "cpu"}), BUDGET, reserved=True)


@pytest.mark.thorough
@pytest.mark.usefixtures("traced_once")
def test_the_command_line_says_what_the_gpu_shows(tmp_path: Path) -> None:
    common = ("solve", "--model", "resnet18", "--batch", "48", "--input-size", "160", "--device", "rtx-3090")
    wanted = (*common, "--budget", "480MB", "--time-limit", "2", "--output", tmp_path / "s.yaml")
    facts = json.loads(run(*wanted, "--reserved", "--json").stdout)
    assert facts["peak_bytes"] < facts["reserved_bytes"] <= 480 * 10**6
    assert facts["reserved"]["default_bytes"] > 480 * 10**6
    assert facts["reserved"]["releases"] >= 0
    table = " ".join(run(*wanted, "--force", columns=80).stdout.split())
    assert "reserved by torch's default settings" in table
    assert "--reserved keeps it in the budget" in table
    assert re.search(r"of tensors 4\d\d MB, estimated for rtx-3090 of the allocator", table)
    assert "MB (a guess; monetlite measure shows it)" in table
    schedule = monetlite.load_schedule(tmp_path / "s.yaml")
    facts = {"default_bytes": 2 * 10**9, "least_limit_bytes": 470 * 10**6, "releases": 3}
    assert "gives free pages back 3× a step" in reserved_in_words(replace(schedule, reserved_bytes=1), facts)
