"""What a schedule reserves on a GPU, and schedules for a budget of that."""

import json
from pathlib import Path

import pytest
from commands import run

import monetlite
from monetlite.allocation import Allocator, least_limit, reserve
from monetlite.costs import Profile
from monetlite.errors import DeviceError, InfeasibleBudget
from monetlite.models import build_model
from monetlite.schedule import plain_steps, simulate

BUDGET = 480 * 10**6


@pytest.fixture(scope="module")
def profile() -> Profile:
    built = build_model("resnet18", batch=48, input_size=(160, 160))
    return monetlite.profile(monetlite.trace(built.model, built.example_inputs), "rtx-3090")


@pytest.fixture(scope="module")
def for_the_peak(profile: Profile) -> monetlite.Schedule:
    return monetlite.solve(profile, BUDGET, time_limit=2)


@pytest.fixture(scope="module")
def for_reserved(profile: Profile) -> monetlite.Schedule:
    return monetlite.solve(profile, BUDGET, reserved=True, time_limit=4)


def test_a_peak_is_allocated_and_more_is_reserved(profile: Profile, for_the_peak: monetlite.Schedule) -> None:
    for steps in (plain_steps(profile.graph), for_the_peak.steps(profile.graph)):
        timeline = simulate(profile, steps)
        by_default = reserve(profile, timeline, expandable=False)
        expandable = reserve(profile, timeline, expandable=True)
        assert timeline.peak_bytes < expandable.peak_bytes <= by_default.peak_bytes
        assert by_default.fits
        assert not by_default.releases


def test_requests_add_up_to_the_timeline(
    profile: Profile, for_the_peak: monetlite.Schedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every request is met and freed once, and the most that is allocated at a time is the peak, rounding aside."""
    made: list[Allocator] = []
    live: list[int] = []
    requests: list[int] = []
    start, allocate, free = Allocator.__init__, Allocator.allocate, Allocator.free

    def watched_start(self: Allocator, *, expandable: bool, limit_bytes: int | None = None) -> None:
        start(self, expandable=expandable, limit_bytes=limit_bytes)
        made.append(self)
        live.append(0)
        requests.append(0)

    def watched_allocate(self: Allocator, size: int) -> tuple[int, int]:
        live[-1] += 1
        requests[-1] = max(requests[-1], live[-1])
        return allocate(self, size)

    def watched_free(self: Allocator, allocation: tuple[int, int]) -> None:
        live[-1] -= 1
        free(self, allocation)

    monkeypatch.setattr(Allocator, "__init__", watched_start)
    monkeypatch.setattr(Allocator, "allocate", watched_allocate)
    monkeypatch.setattr(Allocator, "free", watched_free)
    for steps in (plain_steps(profile.graph), for_the_peak.steps(profile.graph)):
        timeline = simulate(profile, steps)
        reserve(profile, timeline, expandable=True)
        wanted = timeline.peak_bytes - timeline.resident_bytes
        assert 0 <= made[-1].peak_allocated_bytes - wanted <= 512 * requests[-1]
        assert live[-1] == made[-1].allocated_bytes == 0


def test_the_least_limit_is_enough_and_the_peak_is_not(profile: Profile, for_the_peak: monetlite.Schedule) -> None:
    timeline = simulate(profile, for_the_peak)
    least = least_limit(profile, timeline)
    within = reserve(profile, timeline, expandable=True, limit_bytes=least)
    assert within.fits
    assert within.peak_bytes <= least
    assert within.releases > 0
    assert not reserve(profile, timeline, expandable=True, limit_bytes=timeline.peak_bytes).fits


def test_a_budget_of_reserved_memory_is_kept_where_one_of_the_peak_is_not(
    profile: Profile, for_the_peak: monetlite.Schedule, for_reserved: monetlite.Schedule
) -> None:
    assert not reserve(profile, simulate(profile, for_the_peak), expandable=True, limit_bytes=BUDGET).fits
    assert for_the_peak.reserved_bytes is None
    timeline = simulate(profile, for_reserved)
    within = reserve(profile, timeline, expandable=True, limit_bytes=BUDGET)
    assert within.fits
    assert within.peak_bytes <= BUDGET == for_reserved.budget_bytes
    assert timeline.peak_bytes == for_reserved.peak_bytes < for_reserved.reserved_bytes <= BUDGET
    assert for_reserved.lower_bound_ms <= for_the_peak.latency_ms <= 1.05 * for_reserved.latency_ms


def test_a_file_says_what_is_reserved(for_reserved: monetlite.Schedule, tmp_path: Path) -> None:
    for_reserved.save(tmp_path / "schedule.yaml")
    assert monetlite.load_schedule(tmp_path / "schedule.yaml").reserved_bytes == for_reserved.reserved_bytes
    assert "reserved_bytes" in (tmp_path / "schedule.yaml").read_text()


def test_what_cannot_be_reserved_is_refused(profile: Profile, for_reserved: monetlite.Schedule) -> None:
    smallest = simulate(profile, for_reserved).resident_bytes + 60 * 10**6
    with pytest.raises(InfeasibleBudget, match=r"is too small|no schedule was found"):
        monetlite.solve(profile, smallest, reserved=True, time_limit=2)
    with pytest.raises(DeviceError, match="costs are a CPU's"):
        monetlite.solve(monetlite.costs.Profile(**{**vars(profile), "device": "cpu"}), BUDGET, reserved=True)


def test_the_command_line_says_what_the_gpu_shows(tmp_path: Path) -> None:
    common = ("solve", "--model", "resnet18", "--batch", "48", "--input-size", "160", "--device", "rtx-3090")
    wanted = (*common, "--budget", "480MB", "--time-limit", "2", "--output", tmp_path / "s.yaml")
    facts = json.loads(run(*wanted, "--reserved", "--json").stdout)
    assert facts["peak_bytes"] < facts["reserved_bytes"] <= 480 * 10**6
    assert facts["reserved"]["default_bytes"] > 480 * 10**6
    table = " ".join(run(*wanted, columns=80).stdout.split())
    assert "reserved by torch's default settings" in table
    assert "--reserved keeps it in the budget" in table
