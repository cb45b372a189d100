"""The examples of the documentation run, and train as the plain loop does."""

import functools
import math
import re
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import transformers
from thoroughness import often

import monetlite
from monetlite.planning import beside_training, pipeline

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "examples"
SHOWN = re.compile(r"<!-- lines of: (\S+) -->\n```python\n(.*?)```", re.DOTALL)
NEEDS = {"lora": "peft", "accelerate_loop": "accelerate", "lightning_module": "lightning", "trainer": "accelerate"}
BY_TEST = {"plain", "within_budget", "step_in_backward", "torchrun_ddp", "model", "images"}
OTHERS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in BY_TEST)
LIKE_TESTS = {"trainer", "compiled"}
"""Examples of which test_trainer.py and test_torch_compile.py do everything, and compare it with plain training."""


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs an example with one layer, solved at estimated costs; its variables and what it prints at last."""
    monkeypatch.syspath_prepend(str(FOLDER))
    config = transformers.GPT2Config
    monkeypatch.setattr(transformers, "GPT2Config", lambda **sizes: config(**{**sizes, "n_layer": 1}))
    solve_model, solve_layouts = pipeline.solve_model, beside_training.solve_layouts

    def quick(model, inputs, budget, pricing, solving, **more):
        pricing = replace(pricing, device=pricing.device or "rtx-4090")
        return solve_model(model, inputs, budget, pricing, replace(solving, time_limit=0.3), **more)

    def quick_to_compile(profiles, budget, solving, **more):
        return solve_layouts(profiles, budget, replace(solving, time_limit=0.3), **more)

    monkeypatch.setattr(pipeline, "solve_model", quick)
    monkeypatch.setattr(beside_training, "solve_layouts", quick_to_compile)
    monkeypatch.setattr(monetlite, "solve", functools.partial(monetlite.solve, time_limit=0.3))

    def run(name):
        found = runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
        return found, float(capsys.readouterr().out.split()[-1])

    yield run
    for name in ("model", "images"):
        sys.modules.pop(name, None)


def test_the_same_losses_as_the_plain_loop(run):
    plain, _ = run("plain")
    within, _ = run("within_budget")
    schedule = monetlite.schedule_of(within["model"])
    assert schedule.peak_bytes <= schedule.budget_bytes
    assert within["losses"] == pytest.approx(plain["losses"], rel=1e-6)
    in_backward, _ = run("step_in_backward")
    assert in_backward["losses"] == pytest.approx(plain["losses"], rel=1e-6)


def test_the_convolutional_network_needs_no_other_library(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    _, last = run("cnn")
    assert 0 < last < 10


@pytest.mark.parametrize("name", often(OTHERS, *(name for name in OTHERS if name not in LIKE_TESTS)))
def test_every_other_example_trains(run, name):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    _, last = run(name)
    assert 0 < last < 2 * math.log(500)


QUICK = f"""
import runpy, sys
from dataclasses import replace
from monetlite.planning import pipeline
sys.path.insert(0, {str(FOLDER)!r})
solve_model = pipeline.solve_model

def quick(model, inputs, budget, pricing, solving, **more):
    pricing = replace(pricing, device=pricing.device or "rtx-4090")
    return solve_model(model, inputs, budget, pricing, replace(solving, time_limit=0.3), **more)

pipeline.solve_model = quick
runpy.run_path({str(FOLDER / "torchrun_ddp.py")!r}, run_name="__main__")
"""


@pytest.mark.thorough  # half a minute; see test_distributed.py
def test_torchrun(tmp_path):
    (tmp_path / "quick.py").write_text(QUICK)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, tmp_path / "quick.py"], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert 0 < float(done.stdout.split()[-1]) < 2 * math.log(500)


def shown():
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for path, text in SHOWN.findall(page.read_text(encoding="utf-8")):
            yield pytest.param(path, text, id=f"{page.name}: {path}")


@pytest.mark.parametrize(("path", "text"), list(shown()))
def test_lines_shown_are_lines_of_the_example(path, text):
    assert text in (ROOT / path).read_text(encoding="utf-8")


def test_the_readme_shows_the_loop():
    assert len([item for item in shown() if "README" in str(item.id)]) == 2
