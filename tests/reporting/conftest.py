"""A real model's report, opened once for all tests of a process."""

from pathlib import Path

import pytest
from browsers import Page, chromium

from monetlite.cli.opening import open_schedule
from monetlite.reporting.html import write_report
from monetlite.reporting.memory import break_down
from monetlite.schedule import plain_steps, simulate


@pytest.fixture(scope="session")
def resnet(tmp_path_factory):
    """A real model's schedule, from the collection that comes with monetlite."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MONETLITE_CACHE", str(tmp_path_factory.mktemp("cache")))
        return open_schedule("zoo:resnet50@6GB", None, None, True, {})


@pytest.fixture(scope="session")
def resnet_file(resnet, tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "resnet50.html"
    write_report(path, resnet.schedule, resnet.profile, resnet.plain)
    return path


@pytest.fixture(scope="session")
def runs(resnet):
    """What Python knows of both runs."""
    return {
        "scheduled": break_down(resnet.profile, simulate(resnet.profile, resnet.schedule)),
        "plain": break_down(resnet.plain, simulate(resnet.plain, plain_steps(resnet.plain.graph))),
    }


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture
def page(browser, resnet_file):
    return Page(browser, resnet_file)


@pytest.fixture
def synthetic(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts")
    from synthetic_steps import transformer_step

    return transformer_step
