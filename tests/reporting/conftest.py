"""What the tests of pictures and reports look at, opened or solved once for all tests of a process."""

from pathlib import Path

import pytest
from browsers import Page, chromium
from commands import run
from step_lists import schedule_of

from monetlite.cli.command_options import ModelChoice
from monetlite.cli.running import Terminal
from monetlite.cli.subjects import open_schedule
from monetlite.core.options import SolvingOptions
from monetlite.planning.tradeoff import trade_off
from monetlite.reporting.analysis import analyse
from monetlite.reporting.html import write_report
from monetlite.solving.baselines import segment_checkpointing

MODEL = """
import torch
from torch import nn

def block(channels):
    return nn.Sequential(
        nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(), nn.Dropout(0.1)
    )

def build():
    blocks = [block(8) for _ in range(4)]
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), *blocks, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 256, 4)
    ), (torch.randn(8, 3, 32, 32),)
"""


@pytest.fixture(autouse=True)
def _traced_once(traced_once):
    """The model of `solved` is traced for the first command alone."""


@pytest.fixture(scope="session")
def resnet(tmp_path_factory):
    """A real model's schedule, from the collection that comes with monetlite."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MONETLITE_CACHE", str(tmp_path_factory.mktemp("cache")))
        return open_schedule("zoo:resnet50@6GB", ModelChoice(), None, Terminal(as_json=True))


@pytest.fixture(scope="session")
def resnet_file(resnet, tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "resnet50.html"
    write_report(path, analyse(resnet.schedule, resnet.profile, resnet.plain))
    return path


@pytest.fixture(scope="session")
def runs(resnet):
    """What Python knows of both runs."""
    analysis = analyse(resnet.schedule, resnet.profile, resnet.plain)
    return {"scheduled": analysis.scheduled, "plain": analysis.plain}


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture
def page(browser, resnet_file):
    return Page(browser, resnet_file)


@pytest.fixture(scope="session")
def synthetic():
    """Makes profiles of steps of a transformer, of as many layers as it is asked for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[2] / "scripts")
        from synthetic_steps import transformer_step

    return transformer_step


@pytest.fixture(scope="session")
def solved(tmp_path_factory):
    """A folder with a model and a schedule for it, as `monetlite solve` leaves it."""
    folder = tmp_path_factory.mktemp("solved")
    (folder / "net.py").write_text(MODEL)
    spec = f"{folder}/net.py:build"
    options = ("--budget", "75%", "--device", "p100", "--time-limit", "2", "--output", f"{folder}/s.yaml")
    result = run("solve", "--model", spec, *options)
    assert result.exit_code == 0, result.output
    return folder / "s.yaml", spec


@pytest.fixture(scope="session")
def opened(solved):
    path, spec = solved
    return open_schedule(str(path), ModelChoice(spec=spec), None, Terminal(as_json=True))


@pytest.fixture(scope="session")
def subject(opened):
    return analyse(opened.schedule, opened.profile, opened.plain)


@pytest.fixture(scope="session")
def large(synthetic):
    """A step of 10,000 operators, checkpointed."""
    profile = synthetic(270)
    steps = segment_checkpointing(profile)
    assert len(profile.graph.operators) > 9_700
    assert len(steps) > 12_000
    return analyse(schedule_of(profile, steps), profile, profile)


@pytest.fixture(scope="session")
def traded(opened):
    return trade_off(opened.profile, opened.plain, opened.steps, SolvingOptions(time_limit=3), points=4)
