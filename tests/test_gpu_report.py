"""scripts/gpu_report.py, tried without a GPU. What measures needs torch and three small packages alone."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import monetlite
from monetlite.allocator.allocator import MIB, PAGE_BYTES
from monetlite.checking.comparison.peer_runs import PeerRun
from monetlite.profiling import measured_calls

SCRIPT = Path(__file__).parent.parent / "scripts" / "gpu_report.py"
NOT_THERE = "cvxpy pyscipopt highspy scipy numba rich click platformdirs jsonschema matplotlib transformers"
LEAN = f"import sys\nsys.modules.update(dict.fromkeys({NOT_THERE.split()}))\n"
"""A `sitecustomize.py` for machines with little on them."""
SMALL = ("--small", "--model", "gpt", "--device", "cpu")


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(SCRIPT.parent))
    yield SimpleNamespace(**runpy.run_path(str(SCRIPT)))
    sys.path.remove(str(SCRIPT.parent))


def one(script, command, *arguments):
    """A job in this process, as the script has them in processes of their own."""
    return script.main([str(item) for item in (command, *arguments, *SMALL)])


def rows_of(folder):
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


@pytest.mark.thorough
def test_profile_there_solve_here_measure_there(script, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("MONETLITE_CACHE")
    report, solved = tmp_path / "report", tmp_path / "solved"
    job = ("--output", report, "--job", "profile", "gpt")
    cost = measured_calls.cost_of_call

    def refuse(candidate, *rest, **options):
        if candidate.call.target.startswith("aten.gelu."):
            raise RuntimeError("device-side assert")
        return cost(candidate, *rest, **options)

    # One operator that can't be measured is a row, and so is the profile that is not there. The others are kept.
    monkeypatch.setattr(measured_calls, "cost_of_call", refuse)
    assert one(script, "profile", *job) == 0
    operator, profile = rows_of(report)
    assert "gelu" in operator["setting"]
    assert "device-side assert" in operator["failure"]
    assert profile["failure"] == "1 operators can't be measured"
    monkeypatch.setattr(measured_calls, "cost_of_call", cost)
    (report / "rows.jsonl").unlink()
    assert one(script, "profile", *job, "--seconds", "0") == script.AGAIN
    assert one(script, "profile", *job) == 0
    assert one(script, "solve", report, "--time-limit", "0.5", "--output", solved) == 0
    assert {path.name for path in solved.iterdir()} == {"gpt_90pct.yaml", "gpt_75pct.yaml"}, capsys.readouterr().out

    (tmp_path / "sitecustomize.py").write_text(LEAN)
    measure = ("measure", solved, *SMALL, "--part", "a", "--no-compiled", "--repeats", "2", "--output", report)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, SCRIPT, *measure], capture_output=True, text=True, check=False, env=environment
    )
    rows = rows_of(report)[1:]
    assert [row["way"] for row in rows] == ["plain PyTorch", "monetlite", "monetlite"], done.stderr
    checks = {check["what"]: check for row in rows for check in row["checks"]}
    for what in (
        "runs, and trains as plain PyTorch does",
        "peak within the budget, bytes",
        "predicted peak off by",
    ):
        assert checks[what]["passed"], checks
    assert "predicted plain step time off by" in checks, "which tests don't time"
    assert "## gpt, 16×64" in (report / "report.md").read_text()
    files = [path.relative_to(report) for path in report.rglob("*") if path.is_file()]
    assert len(files) <= 8
    assert all(
        len(path.parts) <= 3 and set(str(path)) <= set("._-/") | set(map(chr, range(48, 123))) for path in files
    )

    # What is there is not measured again, and the rest is, in the next call.
    job = ("--output", report, "--no-compiled", "--repeats", "2", "--job", "b", "gpt")
    assert one(script, "measure", solved, *job, "--seconds", "0") == script.AGAIN
    assert one(script, "measure", solved, *job) == 0
    both = rows_of(report)[1:]
    assert both[:3] == rows
    assert [row["way"] for row in both[3:5]] == ["plain PyTorch", "checkpoint"]
    assert {row["part"] for row in both[3:]} == {"b"}
    before = (report / "rows.jsonl").read_text()
    one(script, "measure", solved, *job)
    assert [row for row in rows_of(report) if row["way"] != "plain PyTorch"] == [
        row for row in map(json.loads, before.splitlines()) if row["way"] != "plain PyTorch"
    ]


def test_a_row_that_ends_the_process_twice_is_a_failure(script, tmp_path):
    key = ("a", "gpt", "monetlite", "budget 1 GB")
    for _ in range(2):
        rows = script.Rows(tmp_path)
        assert not rows.done(key)
        rows.begin(key)
    rows = script.Rows(tmp_path)
    assert rows.done(key)
    assert rows.lost(key)
    assert rows_of(tmp_path)[0]["failure"] == "ended the process, 2 times"


@pytest.mark.thorough
def test_gradients_are_compared_where_plain_training_fits(script):
    """Plain training of the whole batch runs out of memory, and so does half of it."""
    model, inputs = script.SUBJECTS["gpt"].build(True)
    bench = script.Bench(model, inputs, {}, script.default_loss, "cpu")
    schedule = monetlite.optimize(model, inputs, "80%", device="cpu", time_limit=0.5)
    ours = script.scheduled(script.Peer.MONETLITE, schedule, schedule.budget_bytes)

    class Memory:
        """Of a machine that plain training of more than four sequences does not fit."""

        def __init__(self, *arguments):
            self.bench, self.batch = script.Bench(*arguments), len(arguments[1][0])

        def enter(self, contender):
            if contender.peer is script.Peer.PLAIN and self.batch > 4:
                return script.Entrant(run=PeerRun(peer=contender.peer, failure=script.OUT_OF_MEMORY))
            return self.bench.enter(contender)

    compare = script.gradients_at_smaller_batch
    compare.__globals__["Bench"] = Memory
    try:
        entrant, said = compare(bench, ours, bench.enter(ours))
    finally:
        compare.__globals__["Bench"] = script.Bench
    assert said == " (batch 4)"
    assert entrant.run.gradient_difference == 0.0
    assert entrant.run.faults == ()


def event(action, size, address=0):
    return {"action": action, "size": size, "addr": address}


def test_the_allocators_model_is_held_to_what_it_did(script):
    """Three blocks of 4 MiB fit into one segment of 20 MiB; a fourth finds room where the second was."""
    size = 4 * MIB
    events = [event("segment_alloc", PAGE_BYTES), *(event("alloc", size, number) for number in range(3))]
    events += [event("free_requested", size, 1), event("free_completed", size, 1), event("alloc", size, 7)]
    found = script.held_to_model(events, expandable=False)
    assert found == {
        "requests": 4,
        "peak_reserved_bytes": PAGE_BYTES,
        "by_model_bytes": PAGE_BYTES,
        "largest_difference_bytes": 0,
        "parts": None,
    }
    # An allocator that takes a second segment for the fourth.
    events.insert(6, event("segment_alloc", PAGE_BYTES))
    found = script.held_to_model(events, expandable=False)
    assert found["largest_difference_bytes"] == PAGE_BYTES
    assert found["parts"] == {
        "event": 7,
        "size_bytes": size,
        "reserved_bytes": 2 * PAGE_BYTES,
        "by_model_bytes": PAGE_BYTES,
    }


def test_time_between_kernels_is_found(script):
    """Kernels that overlap count once, and what runs beside another one ends no wait."""
    ran = [
        (0.0, 4.0, "a"),
        (1.0, 1.0, "beside a"),
        (3.0, 2.0, "b"),
        (8.0, 1.0, "c"),
        (9.0, 1.0, "d"),
        (10.5, 0.5, "e"),
    ]
    found = script.recorded_kernels.__globals__["kernel_times"](reversed(ran), 2)
    assert (found["kernels"], found["kernels_ms"], found["idle_ms"]) == (3.0, 3.75, 1.75)
    assert found["gaps"] == [(3.0, "b", "c"), (0.5, "d", "e")]
    row = {"part": "a", "model": "gpt", "way": "monetlite", "setting": "6 GB", "note": "", **found}
    page = script.page([row], {})
    assert "| gpt | monetlite | 6 GB | 3 | 3.8 | 1.8 | 3.00 ms before c |" in page
