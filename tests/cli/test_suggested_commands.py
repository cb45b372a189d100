"""Commands that messages suggest, and names of files: every option that makes a difference is in them."""

import shlex
from itertools import combinations

import click
import pytest
from click.core import ParameterSource
from commands import run

from monetlite import cli
from monetlite.cli.command_options import ModelChoice
from monetlite.cli.output_names import name_of_copy, schedule_name
from monetlite.cli.running import suggested
from monetlite.core.options import PricingOptions, SolvingOptions

NET = """
import torch
from torch import nn

def build(batch=4):
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)), torch.randn(batch, 32)
"""
pytestmark = pytest.mark.usefixtures("traced_once")
GPT2 = "--model hf:gpt2 --sequence-length 512 --budget 8GB --device rtx-4060 --optimizer adamw --autocast bfloat16"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my net.py").write_text(NET)
    return tmp_path


def parsed(line):
    """The values that a command line gives to options of `solve`."""
    program, name, *words = shlex.split(line)
    assert program == "monetlite"
    command = cli.main.commands[name]
    context = command.make_context(name, words)
    line = ParameterSource.COMMANDLINE
    return {key: value for key, value in context.params.items() if context.get_parameter_source(key) is line}


def in_context(line, call):
    """A function's result inside of a command that was called by a line."""
    name, *words = shlex.split(line)
    root = click.Context(cli.main)
    with cli.main.commands[name].make_context(name, words, parent=root):
        return call()


@pytest.mark.parametrize("asked", ["solve --max-batch", "max-batch"])
def test_every_option_is_repeated(asked):
    more = "--reserved --tolerance 1e-05 --dtype bfloat16 --accumulate --seed 3"
    line = f"{asked} {GPT2} {more} --multiple-of 4 --time-limit 9 --json"
    found = in_context(line, lambda: suggested("solve", without=("max_batch", "multiple_of"), batch=25))
    assert parsed(found) == parsed(f"monetlite solve {GPT2} {more} --batch 25")


@pytest.mark.parametrize("asked", ["solve --max-batch", "max-batch"])
def test_the_largest_batch_comes_with_a_command_that_solves_for_it(asked, folder):
    options = ("--optimizer", "adamw", "--device", "t4", "--budget", "60kB", "--tolerance", "1e-5")
    found = run(*asked.split(), "--model", "my net.py:build", *options, "--batch", "8", "--time-limit", "1")
    assert found.exit_code == 0, found.output
    line = found.stdout.rstrip().splitlines()[-1]
    assert line.startswith("monetlite solve --model 'my net.py:build' --batch ")
    for option in zip(options[::2], ("adamw", "t4", "60kB", "1e-05")):
        assert " ".join(option) in line
    solved = run(*shlex.split(line)[1:], "--time-limit", "1")
    assert solved.exit_code == 0, solved.output


def test_a_schedule_of_other_sizes_suggests_show_with_them(folder):
    options = ("--model", "my net.py:build", "--device", "t4", "--budget", "100%", "--time-limit", "1")
    assert run("solve", *options, "--output", "s.yaml").exit_code == 0
    refused = run("explain", "s.yaml", "--model", "my net.py:build", "--batch", "8")
    assert refused.exit_code == 4
    line = "monetlite show s.yaml --model 'my net.py:build' --batch 8"
    assert line in refused.stderr
    assert run(*shlex.split(line)[1:]).exit_code == 0


def test_what_the_zoo_lacks_is_solved_for_the_same_step():
    refused = run("zoo", "get", "zoo:hf:llama-1b@1GB")
    assert refused.exit_code == 4
    given = parsed(refused.stderr[refused.stderr.index("monetlite solve") :])
    assert given == {
        "spec": "hf:llama-1b",
        "batch": 4,
        "sequence_length": 2048,
        "dtype": "bfloat16",
        "budget": "1GB",
        "device": "rtx-3090",
    }


def test_names_of_files_tell_options_apart():
    changes = [
        {"spec": "hf:bert"},
        {"batch": 8},
        {"sequence_length": 8},
        {"input_size": (8, 8)},
        {"dtype": "bfloat16"},
        {"autocast": "bfloat16"},
        {"device": "rtx-4060"},
        {"device": "cpu"},
        {"optimizer": "adamw"},
        {"accumulate": True},
        {"optimizer": "adam", "step_in_backward": True},
        {"layout": "channels_last"},
        {"tolerance": 1e-5},
        {"tolerance": 1e-4},
        {"implementations": "default"},
        {"reserved": True},
    ]
    kinds = (ModelChoice, PricingOptions, SolvingOptions)

    def name(budget="8GB", **options):
        choice, pricing, solving = (
            kind(**{key: value for key, value in options.items() if key in kind.__dataclass_fields__})
            for kind in kinds
        )
        return schedule_name(choice, budget, pricing, solving)

    pairs = [one | other for one, other in combinations(changes, 2)]
    options = [{}, *changes, *(item for item in pairs if not {"accumulate", "step_in_backward"} <= item.keys())]
    distinct = {tuple(sorted({"spec": "hf:gpt2", **item}.items())) for item in options}
    assert len({name(**dict(item)) for item in distinct}) == len(distinct)
    assert name(spec="hf:gpt2", budget="50%") != name(spec="hf:gpt2", budget="50GB")
    assert name(spec="hf:gpt2", device="GeForce RTX 4060") == name(spec="hf:gpt2", device="rtx-4060")
    for spec in ("a/b net.py:build", "hf:./x/config.json", "package.module:build"):
        assert name(spec=spec).parent.name == ""
    assert str(name(spec="resnet50", batch=184, budget="6GB")) == "resnet50_184_6GB.yaml"
    assert str(name_of_copy("p100/resnet50_184_6GB.yaml", "p100")) == "resnet50_184_6GB_p100.yaml"
    assert str(name_of_copy("there/mine.yaml", "p100")) == "mine.yaml"
