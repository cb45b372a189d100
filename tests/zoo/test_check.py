"""Checking a file: what is not as it says is found, and said."""

import functools
import json
import re
from dataclasses import replace

import commands
import pytest

import monetlite
import monetlite.planning.pipeline
from monetlite.core.choices import Choices
from monetlite.core.graph import LOSS_ONLY
from monetlite.core.options import SolvingOptions
from monetlite.core.source import ModelSource
from monetlite.planning.layouts import solve_layouts
from monetlite.zoo import check
from monetlite.zoo.check import Checker
from monetlite.zoo.collection import Shelf, file_name

OWN = """
import torch
def build(batch=64):
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    return model, torch.randn(batch, 8)
"""
SOURCE = ModelSource(model="vgg11", batch=256, input_size=(128, 128))


@pytest.fixture(scope="module", autouse=True)
def _traced_once():
    """All checkers of this file share the traced models."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(check, "traced", functools.cache(check.traced))
        yield


@pytest.fixture(scope="module")
def sound(_traced_once):
    profile = monetlite.profile(check.traced(SOURCE, "", "as_traced", "rtx-3090", LOSS_ONLY), "rtx-3090")
    return replace(monetlite.solve(profile, "70%", time_limit=1), source=SOURCE, seconds=1.0)


@pytest.fixture(scope="module")
def checker():
    return Checker()


def checked(checker, schedule, tmp_path):
    schedule.save(tmp_path / "s.yaml")
    return checker.check(tmp_path / "s.yaml")


def test_a_sound_file_passes(checker, sound, tmp_path):
    assert checked(checker, sound, tmp_path).passed


def test_every_figure_is_held_against_the_estimates(checker, sound, tmp_path):
    for wrong, message in (
        (replace(sound, peak_bytes=sound.peak_bytes - 1), "predicted.peak_bytes is"),
        (replace(sound, latency_ms=sound.latency_ms * 0.99), "predicted.latency_ms is"),
        (replace(sound, plain_peak_bytes=sound.plain_peak_bytes + 1), "plain.peak_bytes is"),
        (replace(sound, plain_latency_ms=sound.plain_latency_ms * 1.01), "plain.latency_ms is"),
        (replace(sound, budget_bytes=sound.peak_bytes - 1), "budget"),
        (replace(sound, lower_bound_ms=sound.latency_ms * 2), "solve.lower_bound_ms is"),
    ):
        assert any(message in problem for problem in checked(checker, wrong, tmp_path).problems), message


def test_another_model_of_the_same_name_is_said_with_its_first_difference(checker, sound, tmp_path):
    for other, message in (
        (
            replace(sound, source=replace(SOURCE, model="vgg13")),
            r"other operators .*begin to differ at features\.2",
        ),
        (replace(sound, source=replace(SOURCE, batch=4)), "other sizes"),
    ):
        (problem,) = checked(checker, other, tmp_path).problems
        assert re.search(message, problem), problem


def test_choices_that_are_not_legal(checker, sound, tmp_path):
    for choices, message in (
        (Choices(before={"nowhere": (("features.0", "default"),)}), "names operator 'nowhere'"),
        (Choices(implementations={"features.0": "magic"}), "as 'magic'"),
        (
            Choices(before={"classifier.6.backward": (("classifier.6.backward", "default"),)}),
            "classifier.6.backward",
        ),
    ):
        (problem,) = checked(checker, replace(sound, choices=choices), tmp_path).problems
        assert message in problem


def test_what_says_too_little_or_is_no_schedule(checker, sound, tmp_path):
    (problem,) = checked(checker, replace(sound, source=None), tmp_path).problems
    assert "doesn't say how to build its model" in problem
    (tmp_path / "x.yaml").write_text("format: other\n...\n")
    assert not checker.check(tmp_path / "x.yaml").passed
    assert not checker.check(tmp_path / "missing.yaml").passed


def test_of_a_measured_file_what_tensors_take_is_checked(checker, sound, tmp_path):
    """Plans of cuDNN included, which nothing here could run."""
    measured = replace(sound, kind="measured", device="cuda")
    planned = {**sound.choices.implementations, "features.0": "cudnn.engine11.k2=4.k12=-1"}
    assert checked(checker, measured, tmp_path).passed
    assert checked(
        checker, replace(measured, latency_ms=measured.latency_ms * 0.99, lower_bound_ms=0.0), tmp_path
    ).passed
    with_plans = replace(measured, choices=replace(sound.choices, implementations=planned))
    assert checked(checker, with_plans, tmp_path).problems == ()
    (problem,) = checked(checker, replace(measured, peak_bytes=10**6), tmp_path).problems
    assert "tensors alone take" in problem


@pytest.mark.thorough
def test_channels_last_is_compared_with_the_model_as_it_is(checker, tmp_path):
    layouts = [
        monetlite.profile(check.traced(SOURCE, "", layout, "rtx-3090"), "rtx-3090")
        for layout in ("as_traced", "channels_last")
    ]
    schedule = solve_layouts(layouts, "80%", SolvingOptions(tolerance=1e-5, time_limit=1), layout="channels_last")
    assert checked(checker, replace(schedule, source=SOURCE), tmp_path).problems == ()


def run(*args):
    return commands.run("zoo", *args)


@pytest.mark.usefixtures("traced_once")
class TestCommands:
    @pytest.fixture
    def folder(self, tmp_path, sound):
        shelf = Shelf(tmp_path / "schedules")
        shelf.add(sound)
        return shelf.folder

    def test_list_show_and_get(self, folder, sound, tmp_path):
        listed = run("list", "--folder", folder)
        assert listed.exit_code == 0
        assert "vgg11" in listed.output
        assert f"{sound.overhead:+.1%}" in listed.output
        (entry,) = json.loads(run("list", "--folder", folder, "--json").stdout)
        assert entry["file"] == file_name(sound)
        assert (
            "no schedule matches; there are schedules of vgg11"
            in run("list", "--folder", folder, "--batch", 257).output
        )
        shown = run("show", "zoo:vgg11", "--folder", folder)
        assert "--model vgg11 --batch 256 --input-size 128x128" in " ".join(shown.output.split())
        assert (
            json.loads(run("show", "zoo:vgg11", "--folder", folder, "--json").stdout)["peak_bytes"]
            == sound.peak_bytes
        )
        got = run("get", "zoo:vgg11", "--folder", folder, "--output", tmp_path / "mine.yaml")
        assert got.exit_code == 0
        assert monetlite.load_schedule(tmp_path / "mine.yaml") == sound

    def test_check(self, folder, sound):
        assert "1 of 1 files are sound" in run("check", "--folder", folder).output
        file = folder / file_name(sound)
        file.write_text(file.read_text().replace(f"peak_bytes: {sound.peak_bytes}", "peak_bytes: 12345"))
        failed = run("check", file)
        assert failed.exit_code == 4
        assert "predicted.peak_bytes is 12345" in failed.output
        assert "0 of 1 files are sound" in failed.output

    def test_add(self, folder, sound, tmp_path):
        sound.save(tmp_path / "mine.yaml")
        (folder / "index.yaml").unlink()
        (folder / file_name(sound)).write_bytes(b"\xff")
        assert "--force" in run("add", tmp_path / "mine.yaml", "--folder", folder).output
        added = run("add", tmp_path / "mine.yaml", "--folder", folder, "--force")
        assert added.exit_code == 0, added.output
        assert not Shelf(folder).stale()
        replace(sound, peak_bytes=1).save(tmp_path / "wrong.yaml")
        before = sorted(folder.rglob("*"))
        refused = run("add", tmp_path / "wrong.yaml", "--folder", folder)
        assert refused.exit_code == 4
        assert "was not added" in refused.output
        assert sorted(folder.rglob("*")) == before

    @pytest.mark.thorough
    def test_rescale(self, folder, sound, tmp_path):
        output, file = tmp_path / "half.yaml", folder / file_name(sound)
        result = commands.run("show", str(file), "--batch", "16", "--output", str(output))
        assert result.exit_code == 0, result.output
        assert max(map(len, result.stdout.splitlines()[:3])) <= 80
        half = monetlite.load_schedule(output)
        assert half.source == replace(SOURCE, batch=16)
        assert half.peak_bytes < sound.peak_bytes
        assert {**half.choices.before} == {**sound.choices.before}
        assert run("check", output).exit_code == 0, "its figures are those of the new sizes"
        elsewhere = commands.run("rescale", str(file), "--device", "t4", "--json")
        facts = json.loads(elsewhere.stdout)
        assert facts["to"]["device"] == "t4"
        assert facts["to"]["latency_ms"] > facts["from"]["latency_ms"]

    def test_rescale_a_model_of_ones_own(self, tmp_path):
        (tmp_path / "own.py").write_text(OWN)
        spec, file = f"{tmp_path / 'own.py'}:build", tmp_path / "own.yaml"
        sizes = ("--device", "t4", "--budget", "90%", "--time-limit", "1", "--output", file)
        assert commands.run("solve", "--model", spec, *sizes).exit_code == 0
        nameless = commands.run("show", file, "--batch", "32")
        assert nameless.exit_code == 2
        assert "--model" in nameless.output
        result = commands.run("show", file, "--batch", "32", "--model", spec)
        assert result.exit_code == 0, result.output
        assert [line.split()[1] for line in result.stdout.splitlines()[1:3]] == ["64", "32"]
        facts = json.loads(commands.run("show", file, "--batch", "32", "--model", spec, "--json").stdout)
        assert (facts["from"]["file"], facts["from"]["output"]) == (str(file), None)
        assert commands.run("show", file, "--batch", "32", "--model", spec, "--no-solve").exit_code == 0
        refused = commands.run("show", file, "--batch", "32", "--model", spec, "--seed", "1")
        assert "--seed is for a schedule at its own sizes: this one was solved for 64×" in refused.stderr

    def test_a_file_that_is_not_there(self, folder):
        assert "nope.yaml can't be read" in run("show", "nope.yaml", "--folder", folder).output

    def test_a_folder_without_a_collection_says_how_to_begin_one(self, tmp_path):
        for command in ("check", "list"):
            result = run(command, "--folder", tmp_path)
            assert result.exit_code == 4
            assert f"there is no collection in {tmp_path}; `monetlite zoo add FILE" in result.output

    def test_errors_are_messages(self, folder):
        for arguments in (["show", "zoo:nothing"], ["get", "zoo:vgg11@1MB"]):
            result = run(*arguments, "--folder", folder)
            assert result.exit_code == 4
            assert "Traceback" not in result.output
