"""Model files that print, or end the program: a command's output stays its own."""

import json
import subprocess
import sys

import commands
import pytest

FILE = """
import os
import sys
import torch
from torch import nn

print("loading")

class Talks(nn.Module):
    def __init__(self, ends=False):
        super().__init__()
        self.layer, self.ends = nn.Linear(8, 8), ends

    def forward(self, x):
        print("running")
        if self.ends and "ENDS" in os.environ:
            sys.exit(0)
        return self.layer(x)

def build(batch=4):
    print("building")
    return Talks(), torch.randn(batch, 8)

def ends(batch=4):
    return Talks(ends=True), torch.randn(batch, 8)
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "talks.py").write_text(FILE)
    return tmp_path / "talks.py"


def test_what_a_model_prints_is_not_the_commands_output(file, tmp_path):
    schedule = tmp_path / "s.yaml"
    quick = ("--model", f"{file}:build", "--json")
    for command in (
        ("solve", *quick, "--budget", "110%", "--device", "cpu", "--time-limit", "1", "--output", schedule),
        ("check", schedule, *quick, "--repeats", "1"),
        ("measure", *quick, "--repeats", "1", "--warmup", "0"),
        ("compare", *quick, "--budgets", "100%", "--peers", "checkmate", "--repeats", "1", "--time-limit", "0.5"),
    ):
        result = commands.run(*command)
        json.loads(result.stdout)
        assert "ing\n" in result.stderr


def test_a_model_that_ends_the_program_has_not_passed(file, tmp_path, monkeypatch):
    schedule = tmp_path / "s.yaml"
    quick = ("--model", f"{file}:ends")
    solved = commands.run(
        "solve", *quick, "--budget", "110%", "--device", "t4", "--time-limit", "1", "--output", schedule
    )
    assert solved.exit_code == 0, solved.output
    monkeypatch.setenv("ENDS", "1")
    result = commands.run("check", schedule, *quick, "--repeats", "1")
    assert result.exit_code == 4
    assert "ended the program" in result.stderr


def test_warnings_are_for_people(file, tmp_path):
    program = "import warnings; warnings.warn('mind this'); from monetlite.cli.running import guard; "
    program += "guard(lambda: warnings.warn('and this'), False)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "UserWarning: mind this" in done.stderr
    assert done.stderr.endswith("\nwarning: and this\n")
