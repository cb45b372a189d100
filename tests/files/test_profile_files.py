"""Profile files: what is measured on one machine is solved for on another, and a damaged file is an error."""

import json
from dataclasses import replace

import commands
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_models import SmallCNN, tiny_transformer
from thoroughness import often

import monetlite
from monetlite.core.costs import profile_text
from monetlite.core.errors import ScheduleFileError
from monetlite.core.simulate import simulate
from monetlite.core.source import ModelSource
from monetlite.core.steps import plain_steps

MODELS = {
    "cnn": lambda: (SmallCNN(), (torch.randn(4, 3, 16, 16),)),
    "bert": lambda: tiny_transformer("bert", layers=1),
}


@pytest.mark.parametrize("name", often(MODELS, "cnn"))
def test_a_profile_is_what_it_was(name, tmp_path):
    model, inputs = MODELS[name]()
    graph = monetlite.trace(model, inputs)
    profile = monetlite.profile(graph, "rtx-3090", optimizer="adam", accumulate=True)
    profile = replace(profile, source=ModelSource(model="hf:gpt2", batch=4, sequence_length=8))
    profile.save(tmp_path / "p.json")
    loaded = monetlite.load_profile(tmp_path / "p.json")
    assert loaded.costs == profile.costs
    assert replace(loaded, graph=profile.graph) == profile
    for found, expected in zip(loaded.graph.operators, profile.graph.operators, strict=True):
        plain = [replace(item, call=None, again=None, guard=None) for item in expected.implementations]
        assert found == replace(expected, implementations=tuple(plain))
    assert replace(loaded.graph, operators=()) == replace(profile.graph, operators=())
    assert loaded.graph.structure == profile.graph.structure
    assert loaded.graph.operator_digests == profile.graph.operator_digests
    assert simulate(loaded, plain_steps(loaded.graph)) == simulate(profile, plain_steps(profile.graph))


@pytest.mark.thorough
def test_what_is_solved_from_a_file_trains_the_model(tmp_path):
    model, inputs = SmallCNN(channels=16), torch.randn(8, 3, 24, 24)
    monetlite.profile(monetlite.trace(model, inputs)).save(tmp_path / "p.json")
    schedule = monetlite.solve(monetlite.load_profile(tmp_path / "p.json"), "85%", time_limit=2)
    report = monetlite.verify(model, schedule, inputs, repeats=1)
    assert report.exact
    assert report.passed, report.reasons


def made():
    model, inputs = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), torch.randn(2, 4)
    return monetlite.profile(monetlite.trace(model, inputs), "t4")


TEXT = profile_text(made())
PLACES = []


def _places(data, at=()):
    PLACES.append(at)
    for key in data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ():
        _places(data[key], (*at, key))


_places(json.loads(TEXT))
WRONG = st.sampled_from(
    [None, -1, 0, 1, 2.5, 1e300, 2**70, True, "", "forward", "x", [], [0], [-1], [99], [0, 0], {}]
)


@given(at=st.sampled_from(PLACES), value=WRONG, how=st.sampled_from(["put", "drop", "twice"]))
def test_a_changed_file_is_an_error_or_another_profile(at, value, how, tmp_path_factory):
    data = holder = json.loads(TEXT)
    for key in at[:-1]:
        holder = holder[key]
    if not at:
        data = value
    elif how == "put":
        holder[at[-1]] = value
    elif how == "drop":
        del holder[at[-1]]
    elif isinstance(holder, list):
        holder.append(holder[at[-1]])
    path = tmp_path_factory.mktemp("changed") / "p.json"
    path.write_text(json.dumps(data))
    try:
        monetlite.load_profile(path)
    except ScheduleFileError as error:
        refusal = str(error)
    else:
        refusal = None
    assert refusal is None or str(path) in refusal


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (TEXT[: len(TEXT) // 2], "not a complete JSON file"),
        ("[" * 100_000, "no line `format: monetlite-profile`"),
        (TEXT.replace('"latency_ms": 0.0', '"latency_ms": NaN', 1), "NaN is not a number|not a complete"),
        (TEXT.replace('"version": 1', '"version": 2'), "reads version 1"),
        (TEXT.replace("monetlite-profile", "monetlite-schedule"), "its format is monetlite-schedule"),
        (TEXT.replace('"version": 1', '"version": 1, "version": 1'), "twice"),
    ],
)
def test_files_that_are_none(text, says, tmp_path):
    assert text != TEXT
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(ScheduleFileError, match=says):
        monetlite.load_profile(tmp_path / "p.json")


def test_a_size_that_somebody_changed(tmp_path):
    data = json.loads(TEXT)
    data["values"][0]["size_bytes"] += 1
    (tmp_path / "p.json").write_text(json.dumps(data))
    with pytest.raises(ScheduleFileError, match="it has been changed"):
        monetlite.load_profile(tmp_path / "p.json")


@pytest.mark.parametrize("field", ["reads", "overwrites"])
def test_what_is_read_has_been_written(field, tmp_path):
    """The first operator names its own output, or a later one."""
    data = json.loads(TEXT)
    written = [value for row in data["operators"] for value in row["implementations"][0]["writes"]]
    for value in (written[0], written[-1]):
        data["operators"][0]["implementations"][0][field] = [value]
        (tmp_path / "p.json").write_text(json.dumps(data))
        with pytest.raises(ScheduleFileError, match=f"{field}.*has {value}, which no operator before writes"):
            monetlite.load_profile(tmp_path / "p.json")


@pytest.mark.usefixtures("traced_once")
class TestCommands:
    MODEL = ("--model", "vgg11", "--batch", "32", "--input-size", "64", "--device", "t4")
    SOLVE = ("--budget", "95%", "--time-limit", "0.3")

    def run(self, *arguments, code=0):
        result = commands.run(*arguments, columns=80)
        assert result.exit_code == code, result.output
        return result

    def test_profile_here_solve_there(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        shown = self.run("measure", "--operators", *self.MODEL, "--output", "p.json")
        assert "monetlite solve --profile p.json" in shown.output
        self.run("solve", *self.MODEL, *self.SOLVE, "--output", "direct.yaml")
        shown = self.run("solve", "--profile", "p.json", *self.SOLVE)
        direct, by_file = (
            monetlite.load_schedule(name) for name in ("direct.yaml", "vgg11_32x64x64_95pct_t4.yaml")
        )
        assert "vgg11 on 32×3×64×64, as_traced, estimated for t4" in shown.output
        for name in ("fingerprint", "structure", "operators", "source", "device", "kind", "inputs", "budget_bytes"):
            assert getattr(by_file, name) == getattr(direct, name), name
        assert by_file.plain_peak_bytes == direct.plain_peak_bytes
        assert self.run("zoo", "check", "vgg11_32x64x64_95pct_t4.yaml").exit_code == 0

    @pytest.mark.thorough
    def test_two_layouts(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        for layout in ("as_traced", "channels_last"):
            self.run("measure", "--operators", *self.MODEL, "--layout", layout, "--output", f"{layout}.json")
        both = ("--profile", "channels_last.json", "--profile", "as_traced.json")
        asked = ("--tolerance", "1e-5", "--layout", "channels_last", "--output", "s.yaml")
        self.run("solve", *both, *self.SOLVE, *asked)
        assert monetlite.load_schedule("s.yaml").layout == "channels_last"
        refused = self.run("solve", *both[:2], *self.SOLVE, code=2)
        assert "give the profile of the step as traced, too" in " ".join(refused.output.split())
        refused = self.run("solve", *both[2:], *self.SOLVE, *asked, code=2)
        assert "one made with --layout channels_last" in " ".join(refused.output.split())
        refused = self.run("solve", *both[2:] * 2, *self.SOLVE, code=2)
        assert "not of one step in different layouts" in " ".join(refused.output.split())

    def test_one_of_both(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        assert "'--profile' in its place" in self.run("solve", *self.SOLVE, code=2).output
        refused = self.run("solve", "--profile", "p.json", "--compile", *self.SOLVE, code=2)
        assert "--compile is for solve --model" in refused.output
        (tmp_path / "p.json").write_text(TEXT)
        refused = self.run("solve", "--profile", "p.json", "--batch", "2", "--accumulate", *self.SOLVE, code=2)
        assert "a profile says what --batch, --accumulate would" in " ".join(refused.output.split())
        assert "can't be read" in self.run("solve", "--profile", "none.json", *self.SOLVE, code=4).output
