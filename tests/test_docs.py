"""What the documentation shows is what there is."""

import re
from pathlib import Path

import pytest
import torch
from small_models import assert_same, step, twin
from step_lists import free_profile, schedule_of
from torch import nn

import monetlite
from monetlite.cli import main
from monetlite.core.devices import known_devices
from monetlite.core.schedule import schedule_schema
from monetlite.core.steps import plain_steps

ROOT = Path(__file__).parent.parent
EXAMPLE = re.compile(r"<!-- example: (\S+) -->\n```python\n(.*?)```\n<!-- end -->", re.DOTALL)


def examples():
    for page in (ROOT / "docs").glob("*.md"):
        for path, text in EXAMPLE.findall(page.read_text(encoding="utf-8")):
            yield pytest.param(path, text, id=f"{page.name}: {path}")


@pytest.mark.parametrize(("path", "text"), list(examples()))
def test_a_file_shown_is_the_file(path, text):
    assert (ROOT / path).read_text(encoding="utf-8") == text


def test_there_are_examples():
    assert list(examples())


@pytest.mark.parametrize("slope", [0.01, 0.3])
def test_the_worked_example_works(slope):
    """A file in the folder is all it takes: the tracer offers it, and a schedule runs it, bit for bit."""
    torch.manual_seed(0)
    layers = (nn.Linear(6, 16), nn.LeakyReLU(slope), nn.Linear(16, 16), nn.LeakyReLU(slope), nn.Linear(16, 3))
    model, inputs = nn.Sequential(*layers), (torch.randn(5, 6),)
    graph = monetlite.trace(model, inputs)
    steps, used = [], 0
    for index, choice in plain_steps(graph):
        names = [item.name for item in graph.operators[index].implementations]
        if "from_output_inplace" in names:
            choice, used = names.index("from_output_inplace"), used + 1
        steps.append((index, choice))
    assert used == 2
    wrapped = monetlite.MONeTWrapper(twin(model), schedule_of(free_profile(graph), steps))
    assert_same(step(wrapped, inputs), step(twin(model), inputs))


def test_a_slope_that_turns_the_sign_is_left_alone():
    graph = monetlite.trace(nn.Sequential(nn.Linear(6, 4), nn.LeakyReLU(-0.5), nn.Linear(4, 2)), torch.randn(3, 6))
    backward = next(op for op in graph.operators if op.family == "leaky_relu_backward")
    assert not any("from_output" in item.name for item in backward.implementations)


def paths_of_schema(described, shared, prefix=""):
    for name, item in described.get("properties", {}).items():
        yield prefix + name
        for part in (item, *item.get("anyOf", [])):
            yield from paths_of_schema(shared.get(part.get("$ref"), {}), shared, f"{prefix}{name}.")


def test_every_field_of_a_schedule_file_is_documented():
    text = (ROOT / "docs" / "schedule-files.md").read_text(encoding="utf-8")
    schema = schedule_schema()
    shared = {f"#/$defs/{name}": item for name, item in schema["$defs"].items()}
    paths = list(paths_of_schema(schema, shared))
    assert len(paths) > 30
    assert [path for path in paths if f"| `{path}` |" not in text] == []


def test_every_command_is_in_the_readme_or_the_docs():
    text = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
    assert [name for name in main.commands if f"monetlite {name}" not in text] == []


def test_the_cards_of_the_page_are_those_that_are_known():
    page = (ROOT / "docs" / "fit.md").read_text(encoding="utf-8")
    listed = {}
    for least, most, names in re.findall(r"^\| (\d+)(?: to (\d+)| and more)? \| (`[^|]*) \|$", page, re.MULTILINE):
        for name in re.findall(r"`([^`]+)`", names):
            listed[name] = (int(least), int(most or least))
    assert listed.keys() == known_devices().keys(), "docs/fit.md has a table of the cards"
    for name, (least, most) in listed.items():
        gib = known_devices()[name].memory_bytes / 2**30
        assert least <= gib <= most or (least == 80 and gib > 80), name
