"""Every command, used as people do by mistake or by force.

Into pipes that close, on narrow terminals, without characters, on wrong and existing files, misspelt, interrupted.
"""

import json
import lzma
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import run

import monetlite
from monetlite import cli

ROOT = Path(__file__).parents[2]
MONETS = "solution_un_11_inplace_conv_multiway_newnode_6.00.pkl"
NET = """
import torch
from torch import nn

def build(batch=4):
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)), torch.randn(batch, 32)
"""
SLOW = """
from monetlite.tracing import operator_graph
from net import build

once = operator_graph.capture

def again_and_again(*args, **options):
    while True:
        once(*args, **options)

operator_graph.capture = again_and_again
"""
"""The same model, which is captured until that is interrupted."""
MODEL = "--model net.py:build"
COMMANDS = (
    f"solve {MODEL} --device t4 --budget 100% --time-limit 0.3 --output out.yaml",
    f"solve --max-batch {MODEL} --device t4 --budget 60kB --time-limit 0.3",
    f"show mine.yaml {MODEL} --no-solve",
    f"show mine.yaml {MODEL} --time-limit 0.1",
    f"show mine.yaml {MODEL} --output out.png --csv out.csv",
    f"show mine.yaml {MODEL} --output out.html",
    f"show mine.yaml {MODEL} --batch 2 --output out.yaml",
    f"check mine.yaml {MODEL} --repeats 1 --no-budget-check",
    f"measure {MODEL} --device cpu --batch 1,2 --repeats 1 --warmup 0 --output out.md",
    f"measure {MODEL} --operators --device t4 --output out.json",
    f"compare {MODEL} --device cpu --budgets 100% --peers checkmate --repeats 1 --time-limit 0.3 --output out.md",
    "zoo list --model resnet50",
    "zoo show zoo:resnet50@6GB",
    "zoo get zoo:resnet50@6GB --output out.yaml",
    "zoo check mine.yaml",
    f"zoo import {MONETS}",
)
OLD = (
    f"explain mine.yaml {MODEL} --no-solve",
    f"plot mine.yaml {MODEL} --output out.svg",
    f"rescale mine.yaml {MODEL} --batch 2 --output out.yaml",
    f"verify mine.yaml {MODEL} --repeats 1",
    f"profile {MODEL} --device t4 --output out.json",
    f"max-batch {MODEL} --device t4 --budget 60kB",
)
FAILING = {"zoo check mine.yaml": 4}
"""A schedule of one's own model is not for the zoo."""
WRITING = [line for line in (*COMMANDS, *OLD) if "--output" in line]


@pytest.fixture(scope="module")
def things(tmp_path_factory):
    """A folder with a model, a schedule of it, and one of MONeT's solutions."""
    folder = tmp_path_factory.mktemp("things")
    (folder / "net.py").write_text(NET)
    packed = ROOT / "tests" / "zoo" / "monet_samples" / f"{MONETS}.xz"
    (folder / MONETS).write_bytes(lzma.decompress(packed.read_bytes()))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        options = ("--device", "t4", "--budget", "100%", "--time-limit", "0.5", "--output", "mine.yaml")
        assert run("solve", *MODEL.split(), *options).exit_code == 0
    return folder


@pytest.fixture
def folder(things, tmp_path, monkeypatch):
    """A copy of it to work in."""
    for path in things.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def printed(line, monkeypatch, encoding="utf-8", columns=80, stdout=None):
    """A command's exit code and what it printed, by the streams that a process prints by."""
    with (
        open(".out", "w", encoding=encoding) as out,
        open(".err", "w", encoding=encoding) as err,
        monkeypatch.context() as patch,
    ):
        streams = [cli.printing_to(stdout or out), cli.printing_to(err)]
        patch.setenv("COLUMNS", str(columns))
        patch.setattr(sys, "stdout", streams[0])
        patch.setattr(sys, "stderr", streams[1])
        try:
            cli.main(shlex.split(line), prog_name="monetlite")
            code = 0
        except SystemExit as left:
            code = left.code
        for stream in streams:
            stream.flush()
    told = "utf-8" if encoding == "ascii" else encoding  # click prints UTF-8 in place of ASCII
    return code, *(Path(name).read_text(encoding=told) for name in (".out", ".err"))


@pytest.mark.usefixtures("traced_once", "folder")
@pytest.mark.parametrize("line", COMMANDS)
def test_a_narrow_terminal_of_one_byte_loses_no_figures(line, monkeypatch):
    code, out, err = printed(line, monkeypatch, "cp1252", columns=40)
    assert code == FAILING.get(line, 0), out + err
    assert out
    assert not re.search(r"\w…", out), "no figure is cut short"
    assert not {"\x1b", "\r"} & {*out, *err}, "nothing that moves a cursor"
    assert "Traceback" not in err


def test_a_width_of_zero_is_not_known(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    usual = printed("zoo list --model resnet50", monkeypatch)
    assert "resnet50" in usual[1]
    assert printed("zoo list --model resnet50", monkeypatch, columns=0) == usual


@pytest.mark.usefixtures("traced_once", "folder")
@pytest.mark.parametrize("line", [line for line in COMMANDS if not line.startswith("compare")])
def test_a_reader_who_leaves_a_pipe_without_characters(line, monkeypatch):
    read, write = os.pipe()
    os.close(read)
    with open(write, "w", encoding="ascii") as left:
        code, _, err = printed(line, monkeypatch, "ascii", stdout=left)
    assert code == FAILING.get(line, 0), err
    assert "Traceback" not in err
    assert "bug" not in err


@pytest.mark.parametrize("line", WRITING)
def test_a_file_that_is_there_is_kept(line, folder, monkeypatch):
    monkeypatch.setattr("monetlite.cli.terminal.Terminal.import_torch", lambda _: pytest.fail("work was begun"))
    words = shlex.split(line)
    output = words[words.index("--output") + 1]
    (folder / output).write_text("dear")
    refused = run(*words)
    assert refused.exit_code == 2, refused.output
    assert f"{output} is there already; --force replaces it" in refused.stderr
    assert (folder / output).read_text() == "dear"


def test_force_replaces(folder):
    (folder / "out.yaml").write_text("dear")
    assert run("zoo", "get", "zoo:resnet50@6GB", "--output", "out.yaml", "--force").exit_code == 0
    assert monetlite.load_schedule("out.yaml").name == "resnet50"


@pytest.mark.usefixtures("folder")
def test_by_default_nothing_is_written_where_something_is(monkeypatch):
    monkeypatch.setattr("monetlite.cli.terminal.Terminal.import_torch", lambda _: pytest.fail("work was begun"))
    for line, name in (
        ("solve --model resnet50 --budget 6GB", "resnet50_6GB.yaml"),
        ("zoo get zoo:resnet50@6GB", "resnet50_184_6GB_p100.yaml"),
    ):
        Path(name).write_text("dear")
        refused = run(*line.split())
        assert refused.exit_code == 2
        assert name in refused.stderr
        assert Path(name).read_text() == "dear"


@pytest.fixture
def wrong(folder):
    """Files that are no schedules, and the word for each."""
    text = (folder / "mine.yaml").read_text()
    (folder / "folder").mkdir()
    for name, contents in {
        "empty": b"",
        "binary": bytes(range(256)),
        "text": b"root:x:0:0:root:/root:/bin/bash\n",
        "other.json": b'{"format": "something", "version": 1}',
        "cut": text[: len(text) // 2].encode(),
        "cut_between_lines": text.rpartition("\n...")[0].encode(),
    }.items():
        (folder / name).write_bytes(contents)
    return {
        "empty": "it is empty",
        "binary": "it is binary",
        "text": "no line `format: monetlite-schedule`",
        "other.json": "no line `format: monetlite-schedule`",
        "folder": "it is a folder",
        "cut": "truncated",
        "cut_between_lines": "truncated",
    }


@pytest.mark.parametrize("line", ["show {}", "check {}", "explain {}", "zoo show {}", "zoo check {}", "zoo add {}"])
def test_a_file_that_is_no_schedule_is_said_to_be_none(line, wrong):
    for name, says in wrong.items():
        refused = run(*line.format(f"./{name}").split())
        assert refused.exit_code == 4, (name, refused.output)
        assert says in refused.output, name
        cut = name.startswith("cut")
        assert ("not a schedule file" in refused.output) is not cut, name
        assert ("truncated" in refused.output) is cut, name
        assert ("monetlite solve" in refused.output) is (not cut and name != "folder"), name


def test_a_file_that_is_no_profile_or_solution_is_said_to_be_none(wrong):
    for name in wrong:
        refused = run("solve", "--profile", f"./{name}", "--budget", "50%")
        assert refused.exit_code == (2 if name == "folder" else 4), (name, refused.output)
        assert "truncated" not in refused.output
        assert "profile file" in refused.output or name == "folder"
        refused = run("zoo", "import", f"./{name}")
        assert refused.exit_code == 4, (name, refused.output)
        assert "MONeT solution" in refused.output
        refused = run("measure", "--model", f"./{name}")
        assert refused.exit_code == 2, (name, refused.output)
        assert "path/to/file.py" in refused.output


MISSPELT = {
    "sovle": "'solve'",
    "solve --modle resnet50": "--model",
    "solve --model resnt50 --budget 6GB": "did you mean resnet50",
    "solve --model hf:gptt2 --budget 6GB": "did you mean hf:gpt2",
    "solve --model nett.py:build --budget 6GB": "did you mean net.py?",
    "solve --model net.py:bild --budget 6GB": "did you mean build?",
    "solve --model resnet50 --budget 6XB": "write 6GB",
    "solve --model resnet50 --budget 6GB --device rtx4090x": "did you mean rtx-4090",
    "solve --model resnet50 --budget 6GB --device cuda:0": "did you mean cuda?",
    "solve --model resnet50 --budget 6GB --output nowhere/s.yaml": "no folder nowhere",
    "solve --model resnet50 --budget 6GB --optimizer adamm": "adamw",
    "max-batch --model resnt50 --budget 6GB": "did you mean resnet50",
    "show mien.yaml": "did you mean mine.yaml",
    "show resnet50@6GB": "did you mean zoo:resnet50@6GB?",
    "show mine.yaml --device t44": "did you mean t4",
    "check mien.yaml": "did you mean mine.yaml",
    "check zoo:resnt50@6GB": "did you mean resnet50",
    "measure --model resnt50": "did you mean resnet50",
    "measure --model resnet50 --operators --device t44": "did you mean t4",
    "measure --model resnet50 --output nowhere/t.md": "no folder nowhere",
    "compare --model resnt50": "did you mean resnet50",
    "compare --model resnet50 --output nowhere/t.md": "no folder nowhere",
    "compare --model resnet50 --peers chekpoint": "did you mean checkpoint",
    "compare --model resnet50 --budgets 6XB": "write 6GB",
    "zoo lst": "'list'",
    "zoo list --device p1000": "did you mean p100",
    "zoo list --model resnt50": "did you mean resnet50",
    "zoo get zoo:resnt50@6GB": "did you mean resnet50",
    "zoo get zoo:p10/resnet50@6GB": "did you mean p100",
    "zoo get zoo:resnet50@6XB": "write 6GB",
    "zoo import mine.pkl": "can't be read",
}
WITHOUT_TORCH = """
import contextlib, io, json, shlex, sys
from monetlite.cli import main

class NoTorch:
    def find_spec(self, name, *_):
        if name == "torch":
            raise KeyboardInterrupt

sys.meta_path.insert(0, NoTorch())
said = {}
for line in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            main(shlex.split(line), prog_name="monetlite")
            code = 0
        except SystemExit as left:
            code = left.code
    said[line] = [code, out.getvalue(), err.getvalue()]
print(json.dumps(said))
"""


def without_torch(lines):
    """Exit codes and outputs of commands in a process where importing torch is an interrupt."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, json.dumps(list(lines))],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.usefixtures("folder")
def test_misspelt_words_are_refused_before_torch_is_imported():
    for line, (code, out, err) in without_torch(MISSPELT).items():
        assert MISSPELT[line] in out + err, (line, out + err)
        assert "interrupted" not in err, f"torch was imported by {line}"
        assert code in ((0,) if line.startswith("zoo list --model") else (2, 4)), line


@pytest.mark.usefixtures("folder")
def test_something_is_said_before_torch_is_imported():
    lines = [f"{line} --force" if "--output" in line else line for line in (*COMMANDS, *OLD)]
    for line, (code, _, err) in without_torch(lines).items():
        if code == 0 or line == "zoo check mine.yaml":
            continue
        assert code == 4, (line, err)
        *before, last = err.splitlines()
        assert last == "monetlite: interrupted; no file is half-written"
        assert before[-1].startswith(("importing torch", "checking")), line


SOLVE, CHECK = COMMANDS[0], "check mine.yaml --model net.py:build"
PHASES = {
    "building": (SOLVE, "monetlite.cli.subjects.build_model"),
    "tracing": (SOLVE, "monetlite.tracing.trace_layouts"),
    "pricing": (SOLVE, "monetlite.planning.pipeline.price"),
    "solving": (SOLVE, "monetlite.planning.layouts.solve_budget"),
    "writing a schedule": (SOLVE, "os.fsync"),
    "searching batches": (COMMANDS[1], "monetlite.planning.batches.largest_batch"),
    "analysing": (COMMANDS[2], "monetlite.reporting.analysis.Analysis"),
    "searching beside a schedule": (COMMANDS[3], "monetlite.reporting.analysis_alternatives.alternative"),
    "drawing": (COMMANDS[4], "monetlite.reporting.plots.timeline_plot.draw_timeline"),
    "writing a picture": (COMMANDS[4], "os.fsync"),
    "writing a page": (COMMANDS[5], "os.fsync"),
    "checking": (CHECK, "monetlite.checking.verification.verify_own"),
    "measuring": (COMMANDS[8], "monetlite.checking.measuring.ModelMeasurer.run"),
    "writing a table": (COMMANDS[8], "os.fsync"),
    "comparing": (COMMANDS[10], "monetlite.checking.comparison.runner.compare"),
    "copying": (COMMANDS[13], "os.fsync"),
    "checking the zoo": (COMMANDS[14], "monetlite.zoo.check.Checker.check"),
    "importing": (COMMANDS[15], "monetlite.zoo.monet_solutions.read_monet"),
}


@pytest.mark.usefixtures("traced_once")
@pytest.mark.parametrize("phase", PHASES)
def test_interrupted_in_any_phase(phase, folder, monkeypatch):
    line, place = PHASES[phase]

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(place, interrupted)
    before = sorted(folder.iterdir())
    result = run(*shlex.split(line))
    assert result.exit_code == 4, result.output
    assert result.stderr.splitlines()[-1] == "monetlite: interrupted; no file is half-written"
    assert "Traceback" not in result.output
    assert sorted(folder.iterdir()) == before


def process(*arguments, **options):
    """The command as a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "monetlite", *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | options.pop("env", {}),
        **options,
    )


@pytest.mark.parametrize("work", ["importing torch", "tracing"])
def test_ctrl_c_reaches_a_process(work, folder):
    (folder / "slow.py").write_text(SLOW)
    slow = SOLVE.replace("net.py", "slow.py")
    begun = process(*shlex.split(slow), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    told = [begun.stderr.readline()]
    while not told[-1].startswith(work):
        told.append(begun.stderr.readline())
        assert told[-1], told
    begun.send_signal(signal.SIGINT)
    told += begun.stderr
    assert begun.wait() == 4, told
    assert told[0].startswith("importing torch")
    assert told[-1] == "monetlite: interrupted; no file is half-written\n"
    assert begun.stdout.read() == ""
    assert not (folder / "out.yaml").exists()


def test_a_process_whose_output_goes_nowhere():
    listed = process("zoo", "list", stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={"PYTHONUNBUFFERED": "1"})
    listed.stdout.readline()
    listed.stdout.close()
    assert (listed.wait(), listed.stderr.read()) == (0, b"")
    if os.path.exists("/dev/full"):
        with open("/dev/full", "wb") as full:
            lost = process("zoo", "list", stdout=full, stderr=subprocess.PIPE)
            assert lost.wait() == 4
            assert lost.stderr.read() == b"monetlite: the output can't be written: No space left on device\n"
    closed = process("zoo", "list", preexec_fn=lambda: os.close(1), stderr=subprocess.PIPE)
    assert (closed.wait(), closed.stderr.read()) == (0, b"")


@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
def test_a_process_of_another_encoding(encoding):
    env = {"PYTHONUTF8": "0", "PYTHONIOENCODING": encoding}
    shown = process("solve", "--help", stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
    out, err = shown.communicate()
    assert (shown.returncode, err) == (0, b"")
    assert "--budget" in out.decode("utf-8" if encoding == "ascii" else encoding)
