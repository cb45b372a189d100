"""Every command and every piece of Python in the README and the documentation runs as it stands there.

Commands are those of a page, in order, in one folder, with less time to solve and fewer repetitions than people
give them, and smaller images and models. What a page takes for granted (a model, a file of somebody's) is laid
out beforehand. Files that are quoted, and the commands that CI itself runs, have tests of their own.
"""

import contextlib
import json
import lzma
import re
import runpy
import shlex
import shutil
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import monetlite
from monetlite.cli import main
from monetlite.planning import model_steps, pipeline

ROOT = Path(__file__).parent.parent
SAMPLES = ROOT / "tests" / "zoo" / "monet_samples"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"(?:<!-- ([^>]*) -->\n)?```(\w+)\n(.*?)```", re.DOTALL)
INDENTED = re.compile(r"^    (?=python |monetlite )(.*)$", re.MULTILINE)
QUICK = {
    "solve": {"time_limit": 0.5, "multiple_of": 256},
    "show": {"time_limit": 0.3, "points": 2},
    "check": {"repeats": 1},
    "measure": {"repeats": 1, "warmup": 0},
    "compare": {"repeats": 1, "time_limit": 0.2, "peers": "checkpoint"},
}
"""What commands do where a page doesn't say otherwise."""
SMALL = {name: QUICK[name] | {"input_size": "64"} for name in ("check", "measure")}
"""And with ResNet-50 in the README."""
MONETS = "solution_vgg16_176_inplace_conv_multiway_newnode_7.00.pkl"
BY_CI = (
    "python3 -m venv",
    *(f".venv/bin/{command}" for command in ("pip ", "python -m pytest", "ruff", "mypy", "lint-imports")),
)
"""What `.ci/run` runs, in a fresh clone."""
ELSEWHERE = ("lines of: ", "example: ")
"""Quotations of files that test_examples.py and test_docs.py run."""


def blocks(page, *languages):
    for note, language, text in BLOCK.findall(page.read_text(encoding="utf-8")):
        if language in languages and not note.startswith(ELSEWHERE):
            yield text


def commands(page):
    lines = [line for text in blocks(page, "bash") for line in text.replace("\\\n", " ").splitlines()]
    for line in (*lines, *INDENTED.findall(page.read_text(encoding="utf-8"))):
        words = shlex.split(line, comments=True)
        for command in " ".join(map(shlex.quote, words)).split(" '&&' "):
            if command and not command.startswith(BY_CI):
                yield command.removeprefix(".venv/bin/")


SELDOM = ("choosing-a-budget.md", "tutorial.md", "implementations.md", "estimates.md", "exporting.md")
"""Pages whose commands are much like those of others."""


def commanding():
    marks = {page: [pytest.mark.thorough] for page in PAGES if page.name in SELDOM}
    return [pytest.param(page, id=page.name, marks=marks.get(page, ())) for page in PAGES if any(commands(page))]


def programming():
    return [pytest.param(page, id=page.name) for page in PAGES if any(blocks(page, "python"))]


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x):
        return self.layers(x)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder in which what the pages talk of is there."""
    monkeypatch.chdir(tmp_path)
    for file in (ROOT / "docs" / "examples" / "tutorial").glob("*.py"):
        smaller = file.read_text(encoding="utf-8").replace("96, 96", "24, 24").replace("range(6)", "range(3)")
        (tmp_path / file.name).write_text(smaller, encoding="utf-8")
    (tmp_path / "path" / "to").mkdir(parents=True)
    shutil.copy(tmp_path / "segment.py", tmp_path / "path" / "to" / "file.py")
    (tmp_path / "gpt2.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 2}), encoding="utf-8")
    return tmp_path


@pytest.fixture
def one_thread():
    """Several threads wait for each other longer than small operators take."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("page", commanding())
@pytest.mark.usefixtures("traced_once", "one_thread")
def test_commands(page, folder, request, monkeypatch):
    if page.name == "zoo.md":
        request.getfixturevalue("things_of_the_zoo")
    monkeypatch.setattr(model_steps, "WORTH_A_PROCESS", float("inf"))
    elsewhere = set(commands(PAGES[0])) if page != PAGES[0] else set()
    for command in dict.fromkeys(commands(page)):
        if command in elsewhere:
            continue
        program, *arguments = shlex.split(shorter(command))
        if program == "python":
            run_script(monkeypatch, *arguments)
            continue
        assert program == "monetlite", command
        done = CliRunner().invoke(main, arguments, default_map=QUICK | (SMALL if page == PAGES[0] else {}))
        assert done.exit_code == 0, f"{command}\n{done.output}"


SHORTER = {
    "hf:Qwen/Qwen3-8B --gpu": "hf:gpt2.json --time-limit 1 --gpu",
    "--sequence-length 8192 --lora": "--sequence-length 64 --lora",
    "--time-limit 10": "--time-limit 0.5",
    "--model mobilenet_v2 --batch 16 --input-size 160": "--model path/to/file.py:build",
    "--model hf:gpt2 ": "--model hf:gpt2.json ",
    "solve --model resnet50 --budget 6GB": "solve --model resnet18 --budget 6GB",
    "--max-batch --model resnet18 --budget 8GB": "--max-batch --model path/to/file.py:build --budget 200MB",
    "--max-batch ": "--max-batch --time-limit 0.3 ",
    "--kind tradeoff": "--kind tradeoff --time-limit 0.3",
    "measure --model resnet50 ": "measure --model resnet18 ",
    "measure --operators --model mobilenet_v2 ": "measure --operators --model vgg11 ",
    "check resnet50_6GB.yaml": "check resnet18_6GB.yaml",
    "monetlite show zoo:resnet50@6GB": "monetlite show zoo:vgg16@9GB",
}
"""Less time, and models of fewer layers. `.ci/installed.py` solves ResNet-50 itself."""


def shorter(command):
    for long, short in SHORTER.items():
        command = command.replace(long, short)
    return command


def run_script(monkeypatch, name, *arguments):
    """A script of the tutorial; of the repository's others, which take long, only what they can be asked."""
    before = set(sys.modules)
    path = ROOT / name if name.startswith("scripts/") else Path(name).resolve()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", [str(path), *(["--help"] if name.startswith("scripts/") else arguments)])
        patch.syspath_prepend(path.parent)
        ending = pytest.raises(SystemExit, match=r"^0$") if sys.argv[1:] else contextlib.nullcontext()
        with ending:
            runpy.run_path(str(path), run_name="__main__")
    for module in set(sys.modules) - before:
        if Path(getattr(sys.modules[module], "__file__", None) or "").parent == path.parent:
            del sys.modules[module]


@pytest.fixture
def things_of_the_zoo(folder):
    """A schedule of somebody's for a model that has a name, a collection to add it to, and one of MONeT's files."""
    (folder / MONETS).write_bytes(lzma.decompress((SAMPLES / f"{MONETS}.xz").read_bytes()))
    options = ["--model", "vgg11", "--batch", "2", "--input-size", "64", "--device", "t4", "--budget", "100%"]
    done = CliRunner().invoke(main, ["solve", *options, "--time-limit", "1", "--output", "mine.yaml"])
    assert done.exit_code == 0, done.output
    (folder / "schedules").mkdir()


@pytest.mark.parametrize("page", programming())
def test_snippets(page, folder, monkeypatch):
    """Pieces of one page share their names, beginning from a model and what it is called with."""
    solve_model = pipeline.solve_model

    def quick(model, inputs, budget, pricing, solving, **more):
        pricing = replace(pricing, device=pricing.device or "rtx-4090")
        return solve_model(model, inputs, budget, pricing, replace(solving, time_limit=1), **more)

    monkeypatch.setattr(pipeline, "solve_model", quick)
    monkeypatch.setattr(monetlite, "limit_reserved", lambda budget: None)  # there is no GPU
    model = Small()
    names = {"torch": torch, "monetlite": monetlite, "model": model, "example_inputs": torch.randn(4, 8)}
    for text in blocks(page, "python"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of autocast on a GPU that is not there
            exec(compile(text, str(page), "exec"), names)
        names["model"] = Small()


def test_there_is_something_to_run():
    assert len([command for page in PAGES for command in commands(page)]) > 20
    assert len([text for page in PAGES for text in blocks(page, "python")]) > 3
