"""scripts/gpu_report.py, tried without a GPU: measured and checked with torch, numpy, networkx and pyyaml alone."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
NOT_THERE = "cvxpy pyscipopt highspy scipy numba rich click platformdirs jsonschema matplotlib transformers"
LEAN = f"""
import runpy, sys
for name in {NOT_THERE.split()}:
    sys.modules[name] = None
sys.argv = sys.argv[1:]
import torch
torch.set_num_threads(1)
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as ended:
    if ended.code or sys.argv[1] != "profile":
        raise
    sys.argv += ["--seconds", "0"]  # what is there is not measured again
    runpy.run_path(sys.argv[0], run_name="__main__")
"""
SMALL = ("--small", "--model", "gpt")


SCRIPT = ROOT / "scripts" / "gpu_report.py"


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-c", LEAN, SCRIPT, *arguments], capture_output=True, text=True, check=False
    )


def test_profile_there_solve_here_measure_there(tmp_path, monkeypatch, capsys):
    profiles, solved, report = (tmp_path / name for name in ("profiles", "solved", "report"))
    done = run("profile", "--device", "cpu", *SMALL, "--output", profiles)
    assert done.returncode == 0, done.stderr
    monkeypatch.syspath_prepend(SCRIPT.parent)
    here = ("solve", profiles, *SMALL, "--time-limit", "0.5", "--output", solved)
    assert runpy.run_path(str(SCRIPT))["main"]([str(item) for item in here]) == 0
    assert {path.name for path in solved.iterdir()} == {"gpt_90pct.yaml", "gpt_75pct.yaml"}, capsys.readouterr().out
    options = ("--device", "cpu", "--no-compiled", "--repeats", "2", "--output", report)
    done = run("measure", solved, *SMALL, "--model", "vit", *options)
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["left_out"] == [f"vit: no schedule in {solved}"], done.stderr
    rows = found["models"]["gpt"]["rows"]
    assert [row["way"] for row in rows] == ["plain PyTorch", "monetlite", "monetlite", "checkpoint"]
    checks = {check["what"]: check for row in rows for check in row["checks"]}
    held = ("runs, and trains as plain PyTorch does", "peak within the budget, bytes", "predicted peak off by")
    for what in held:
        assert checks[what]["passed"], checks
    assert "predicted step time off by" in checks, "which tests don't time"
    page = (tmp_path / "report.md").read_text()
    assert "## gpt, 16×64" in page
    assert page.count("| monetlite: budget") >= 2
