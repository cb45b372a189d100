"""Before the core is compiled there are answers already, and waiting for it ends when time is up."""

import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from random_graphs import random_profile

from monetlite.core import child_processes
from monetlite.core.options import SolvingOptions
from monetlite.core.simulate import simulate
from monetlite.core.steps import plain_steps
from monetlite.solving import solve_profile
from monetlite.solving.annealing import compiled, compiling, greedy
from monetlite.solving.annealing.compiled import evaluate, evaluate_interpreted, new_scratch
from monetlite.solving.annealing.flat_problem import flatten, keep_everything
from monetlite.solving.annealing.greedy import Greedy
from monetlite.solving.annealing.lowest_peak import lower_peak
from monetlite.solving.annealing.search import search
from monetlite.solving.incumbent import Incumbent
from monetlite.solving.problem import Problem
from monetlite.solving.smallest import smallest_budget


class NeverDone:
    """A process that compiles for ever."""

    pid = 2**30  # of no process

    def poll(self) -> int | None:
        return None


@pytest.fixture
def nothing_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """As on a machine that never ran this; what is started, is returned, and never ends."""
    started: list[list[str]] = []

    def start(command: list[str], **_: object) -> NeverDone:
        started.append(command)
        return NeverDone()

    monkeypatch.setattr(compiled, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(compiling, "_compiling", None)
    monkeypatch.setattr(compiling, "_loaded", False)
    monkeypatch.setattr(subprocess, "Popen", start)
    return started


def test_a_first_solve_in_no_time(nothing_compiled: list[list[str]]) -> None:
    profile = random_profile(random.Random(3), forward_operators=40)
    budget_bytes = int(0.9 * simulate(profile, plain_steps(profile.graph)).peak_bytes)
    with pytest.warns(UserWarning, match="later solves find better schedules"):
        solution = solve_profile(profile, budget_bytes, SolvingOptions(time_limit=0.5))
    assert nothing_compiled
    assert solution.steps is not None
    assert simulate(profile, solution.steps, budget_bytes).latency_ms == solution.latency_ms


def test_one_process_compiles_for_all_threads(
    nothing_compiled: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = subprocess.Popen

    def start_slowly(command: list[str], **by: object) -> object:
        time.sleep(0.05)
        return start(command, **by)

    monkeypatch.setattr(subprocess, "Popen", start_slowly)
    threads = [threading.Thread(target=compiling.begin_compiling) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(nothing_compiled) == 1


def test_compiled_code_is_loaded_before_plans_for_the_smallest_budget_are_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Loading takes a second, which is as long as these have."""
    order: list[str] = []
    monkeypatch.setattr("monetlite.solving.smallest.load", lambda: order.append("loaded"))
    monkeypatch.setattr("monetlite.solving.smallest.is_ready", lambda: True)
    monkeypatch.setattr("monetlite.solving.smallest.in_blocks", lambda *_: order.append("in blocks"))
    smallest_budget(random_profile(random.Random(3), forward_operators=40), seconds=0.2)
    assert order == ["loaded", "in blocks"]


def test_what_comes_before_compiling_has_an_end() -> None:
    problem = flatten(Problem.of(random_profile(random.Random(3), forward_operators=40)))
    budget_bytes = int(0.9 * problem.plain_peak_bytes)
    for interpreted in (True, False):
        assert Greedy(problem, budget_bytes, interpreted=interpreted).first() is not None
        assert Greedy(problem, budget_bytes, interpreted=interpreted, deadline=time.monotonic()).first() is None


def test_what_is_compiled_is_not_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some thousand times slower, which solves of few seconds have no time for."""

    def refuse(*_: object) -> float:
        raise AssertionError

    monkeypatch.setattr(greedy, "evaluate_interpreted", refuse)
    profile = random_profile(random.Random(3), forward_operators=40)
    budget_bytes = int(0.9 * simulate(profile, plain_steps(profile.graph)).peak_bytes)
    assert solve_profile(profile, budget_bytes, SolvingOptions(time_limit=1)).steps is not None


def test_known_schedules_are_kept(nothing_compiled: list[list[str]]) -> None:
    profile = random_profile(random.Random(3), forward_operators=30)
    plain = plain_steps(profile.graph)
    peak_bytes = simulate(profile, plain).peak_bytes
    found = Incumbent(Problem.of(profile), peak_bytes)
    search(found, seconds=0.1, starts=[plain])
    assert found.peak_bytes is not None
    assert found.peak_bytes <= peak_bytes
    lean = Incumbent(Problem.of(profile), 0)
    assert lower_peak(lean, seconds=0.1) is None
    assert lean.smallest_bytes is not None
    assert lean.smallest_bytes <= peak_bytes
    assert len(nothing_compiled) == 1  # The second found the first one's still at it.


def test_waiting_stops_when_asked(nothing_compiled: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes on compiling gives way to what comes next, training most likely."""
    given: list[tuple[int, int, int]] = []
    monkeypatch.setattr(os, "setpriority", lambda *args: given.append(args))
    assert not compiling.ensure_compiled(time.monotonic() + 600, lambda: True)
    assert len(nothing_compiled) == 1
    assert given == [(os.PRIO_PROCESS, NeverDone.pid, child_processes.NICENESS)]


def test_a_solve_waits_for_what_is_compiled_once(
    nothing_compiled: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A minute at most: its own time would be up before the search began."""
    told: list[str] = []
    monkeypatch.setattr(compiling, "COMPILING_SECONDS", 0.2)
    began = time.monotonic()
    compiling.await_compiled(told.append)
    assert time.monotonic() - began >= 0.2
    assert told == ["compiling the search, once on this machine"]
    assert len(nothing_compiled) == 1
    monkeypatch.setattr(compiling, "is_ready", lambda: True)
    compiling.await_compiled(told.append)
    assert len(told) == 1


def test_the_process_that_compiles_finds_modules_as_this_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "here_alone.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(compiling, "_compiling", None)
    monkeypatch.setattr(compiling, "_COMMAND", "import here_alone")
    assert compiling._compiler().wait() == 0


def test_without_a_cache_it_compiles_here_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(compiled, "cache_folder", lambda: None)
    monkeypatch.setattr(compiling, "_loaded", False)
    compiling.await_compiled(told.append)
    compiling.await_compiled(told.append)
    assert len(told) == 1
    assert "NUMBA_CACHE_DIR" in told[0]
    assert compiling.is_ready()
    assert compiling.ensure_compiled(0.0)


def test_a_full_disk_keeps_no_search_from_running(tmp_path: Path) -> None:
    """Numba writes each function once it is compiled."""
    script = """
import numba.core.caching as caching, warnings
def full(*_): raise OSError(28, "No space left on device")
caching.FunctionCache.save_overload = full
from monetlite.solving.annealing import compiling
with warnings.catch_warnings(record=True) as caught:
    compiling.load()
assert [str(item.message)[-23:] for item in caught] == ["No space left on device"], caught
assert compiling.is_ready()
"""
    environment = {**child_processes.own_environment(), "NUMBA_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)


@pytest.mark.parametrize("seed", range(10))
def test_interpreted_and_compiled_agree(seed: int) -> None:
    profile = random_profile(random.Random(seed), forward_operators=12)
    problem = flatten(Problem.of(profile))
    budget_bytes = int(0.8 * problem.plain_peak_bytes)
    numbers = np.random.default_rng(seed)
    choices = keep_everything(problem)
    choices[problem.droppable] = numbers.integers(0, 16, problem.droppable.size)
    results = []
    for way in (evaluate, evaluate_interpreted):
        scratch = new_scratch(problem.value_count, problem.operator_count, 20 * problem.operator_count + 64)
        cost = way(problem.tables, choices, scratch, budget_bytes, 1.0, 0.5, np.inf)
        results.append((cost, *scratch.totals))
    assert results[0] == pytest.approx(results[1])
    greedy, quick = (
        Greedy(problem, budget_bytes, interpreted=interpreted).first() for interpreted in (False, True)
    )
    assert greedy == quick
