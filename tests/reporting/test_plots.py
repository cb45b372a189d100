"""Pictures show what `simulate` says, can be read, and are files like any other."""

import csv
import itertools
import json
import os
import random
import sys
from dataclasses import replace
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from commands import run
from matplotlib.colors import to_rgb
from matplotlib.patches import StepPatch
from matplotlib.text import Text
from pictures import assert_readable, plot, stacks, words_of_svg
from step_lists import recompute_everything, schedule_of
from thoroughness import often

import monetlite
from monetlite.core.graph import Phase
from monetlite.core.simulate import simulate
from monetlite.core.step_analysis import Fate, Holding
from monetlite.core.steps import plain_steps
from monetlite.reporting.analysis import analyse
from monetlite.reporting.palette import FILLS
from monetlite.reporting.plots.choices_plot import columns_of, draw_choices, in_at_most
from monetlite.reporting.plots.drawing import save_figure
from monetlite.reporting.plots.timeline_plot import MAX_COLUMNS, columns, draw_timeline

STARTS = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}
WRITTEN_OFTEN = [("timeline", "png"), ("choices", "svg")]


@pytest.mark.parametrize(
    ("kind", "ending"),
    often(
        [*(("timeline", ending) for ending in STARTS), ("choices", "svg")], ("timeline", "png"), ("choices", "svg")
    ),
)
def test_pictures_are_written_and_the_same_each_time(kind, ending, solved, subject, work_folder):
    result = plot(solved, "--output", f"a.{ending}", "--kind", kind)
    assert result.exit_code == 0, result.output
    assert f"{kind} written to a.{ending}" in result.stdout
    content = (work_folder / f"a.{ending}").read_bytes()
    assert content.startswith(STARTS[ending])
    figure = draw_timeline(subject) if kind == "timeline" else draw_choices(subject)
    save_figure(figure, f"b.{ending}", f"{subject.title}: {kind}")
    assert content == (work_folder / f"b.{ending}").read_bytes()
    assert sorted(os.listdir(work_folder)) == [f"a.{ending}", f"b.{ending}"]


def test_a_timeline_names_what_people_look_for(solved, subject, work_folder):
    assert plot(solved, "--output", "t.svg").exit_code == 0
    words = words_of_svg("t.svg")
    for named in (
        subject.plain.peak_operator,
        subject.scheduled.peak_operator,
        "net.py:build, batch 8",
        "costs estimated for p100",
        "budget",
        f"({subject.overhead:+.1%})",
        "plain training: peak",
        "scheduled: peak",
        "forward",
        "backward",
        "stored",
        "gradients in flight",
    ):
        assert named in words, named
    assert "sans-serif" in Path("t.svg").read_text(encoding="utf-8")


def test_the_areas_drawn_sum_to_what_simulate_says(subject):
    figure = draw_timeline(subject, by_time=False)
    for axes, side in zip(figure.axes, (subject.plain, subject.scheduled), strict=True):
        timeline = simulate(side.profile, side.timeline.steps)
        areas = stacks(axes)
        assert np.array_equal(areas[-1][1], timeline.memory_bytes)
        assert np.array_equal(areas[0][2], np.zeros(len(timeline.steps)))
        for (_, above, _, _), (_, _, below, _) in itertools.pairwise(areas):
            assert np.array_equal(above, below)
        for label, above, below, edges in areas:
            assert np.array_equal(above - below, side.bytes_of[Holding(label)])
            assert np.allclose(edges, np.arange(len(timeline.steps) + 1))
    drawn = {label for axes in figure.axes for label, *_ in stacks(axes)}
    assert {"weights", "stored", "gradients in flight"} <= drawn


def test_along_time_a_step_is_as_wide_as_it_is_long(subject):
    figure = draw_timeline(subject)
    for axes, side in zip(figure.axes, (subject.plain, subject.scheduled), strict=True):
        timeline = side.timeline
        _, top, _, edges = stacks(axes)[-1]
        finest = axes.get_xlim()[1] / MAX_COLUMNS
        begin = 0.0
        for latency_ms, memory_bytes in zip(timeline.latencies_ms, timeline.memory_bytes, strict=True):
            if latency_ms > 3 * finest:
                column = np.searchsorted(edges, begin + latency_ms / 2) - 1
                assert top[column] == memory_bytes
            begin += latency_ms
        assert top.max() == timeline.peak_bytes
        assert edges[-1] == pytest.approx(timeline.latency_ms, abs=5 * finest)


@pytest.mark.parametrize("seed", range(16))
def test_columns_lose_no_step_that_matters(seed):
    rng = random.Random(seed)
    count = rng.choice([1, 2, 10, 5_000])
    widths = [rng.choice([0.0, 1e-6, 0.01, 1.0, 5.0]) * rng.random() for _ in range(count)]
    memory_bytes = [rng.randrange(10**6) for _ in range(count)]
    extent = max(sum(widths), 1e-3)
    edges, steps = columns(widths, memory_bytes, extent)
    assert len(edges) == len(steps) + 1 <= MAX_COLUMNS + 2
    assert all(after - before > 0.99 * extent / MAX_COLUMNS for before, after in itertools.pairwise(edges))
    assert steps == sorted(set(steps))
    assert max(memory_bytes) in [memory_bytes[step] for step in steps]
    ends = list(itertools.accumulate(widths))
    for step, left, right in zip(steps, edges, edges[1:], strict=False):
        if widths[step] > 5 * extent / MAX_COLUMNS:
            assert left <= ends[step] - widths[step] / 2 <= right


@pytest.mark.thorough
def test_ten_thousand_operators(large, tmp_path):
    for name, figure in (("timeline", draw_timeline(large)), ("operators", draw_timeline(large, by_time=False))):
        for axes, side in zip(figure.axes, (large.plain, large.scheduled), strict=True):
            _, top, _, edges = stacks(axes)[-1]
            assert len(edges) <= MAX_COLUMNS + 2
            assert top.max() == side.peak_bytes
        assert_readable(figure)
        save_figure(figure, tmp_path / f"{name}.svg", name)
        assert (tmp_path / f"{name}.svg").stat().st_size < 3e6
    figure = draw_choices(large)
    assert_readable(figure)
    drawn = [item for item in figure.findobj(StepPatch) if item.get_fill() and item.get_label() == Fate.STORED]
    assert 60 <= len(drawn[0].get_data().values) <= 240


@pytest.mark.parametrize(
    "draw", [draw_timeline, draw_choices, lambda subject: draw_timeline(subject, by_time=False)]
)
def test_nothing_is_written_over_anything_else(draw, subject):
    assert_readable(draw(subject))


@pytest.mark.parametrize("shift", [0.02, 0.5, 0.98])
def test_a_peak_anywhere_has_a_label_that_fits(shift, synthetic):
    """Of the longest names there are, at either end of the step and in the middle."""
    name = "base_model.model.transformer.h.11.attention.self.query_key_value.lora_B.default.backward_weight"
    made = synthetic(3)
    at = int(shift * len(made.graph.operators))
    operators, costs = list(made.graph.operators), list(made.costs)
    operators[at] = replace(operators[at], name=name)
    costs[at] = tuple(replace(cost, workspace_bytes=10**10) for cost in costs[at])
    graph = replace(made.graph, operators=tuple(operators))
    profile = replace(made, graph=graph, costs=tuple(costs))
    steps = plain_steps(graph)
    shown = analyse(schedule_of(profile, steps), profile, profile)
    assert shown.plain.peak_operator == name
    figure = draw_timeline(shown)
    labels = [item.get_text() for item in figure.findobj(Text) if " at base_model" in item.get_text()]
    assert len(labels) == 2
    assert all(label.endswith("backward_weight") for label in labels)
    assert_readable(figure)


def test_choices_are_what_the_steps_say(opened):
    graph = opened.profile.graph
    steps = recompute_everything(graph)
    shown = analyse(opened.schedule, opened.profile, opened.plain, steps).scheduled
    found = columns_of(shown)
    written = {
        value
        for index, _ in steps
        if graph.operators[index].phase is Phase.FORWARD
        for value in graph.operators[index].writes
        if graph.values[value].size_bytes > 8
    }
    assert sum(sum(column.bytes_of.values()) for column in found) == pytest.approx(
        sum(graph.values[value].size_bytes for value in written), abs=100
    )
    begins = shown.timeline.border
    again = [index for index, _ in steps[begins:] if graph.operators[index].phase is Phase.FORWARD]
    assert sum(column.again for column in found) == len(again) > 10
    convolution = next(column for column in found if column.name == "1.0")
    size_bytes = 8 * 8 * 32 * 32 * 4
    assert convolution.bytes_of == {Fate.RECOMPUTED: size_bytes}
    assert convolution.again == steps[begins:].count((graph.by_name["1.0"], 0)) > 0
    plain = analyse(opened.schedule, opened.profile, opened.plain, plain_steps(graph)).scheduled
    stored = {column.name: column for column in columns_of(plain)}["1.0"]
    assert (dict(stored.bytes_of), stored.again, dict(stored.ways)) == ({Fate.STORED: size_bytes}, 0, {})


@pytest.mark.thorough
def test_choices_name_other_implementations(opened, subject, solved, work_folder):
    choices = opened.schedule.choices
    again = [how for runs in choices.before.values() for _, how in runs]
    others = len(choices.implementations) + sum(how != "default" for how in again)
    assert others
    result = plot(solved, "--kind", "choices", "--output", "c.svg", "--csv", "c.csv", "--json")
    facts = json.loads(result.stdout)
    assert sum(item["runs"] for item in facts["implementations"]) == others
    begins = subject.scheduled.timeline.border
    phases = [subject.scheduled.profile.graph.operators[index].phase for index, _ in opened.steps[begins:]]
    assert facts["runs_again"] == phases.count(Phase.FORWARD)
    words = words_of_svg("c.svg")
    for item in facts["implementations"]:
        assert item["name"] in words
    with open("c.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert facts["forward_operators"] == len(rows)
    assert sum(int(row["stored_bytes"]) for row in rows) == facts["stored_bytes"]


def test_many_operators_share_columns(large):
    operators = columns_of(large.scheduled)
    for most in (240, 100, 7, 1):
        merged = in_at_most(operators, most)
        assert len(merged) <= most
        for fate in Fate:
            assert sum(column.bytes_of.get(fate, 0) for column in merged) == sum(
                column.bytes_of.get(fate, 0) for column in operators
            )
        assert sum(column.again for column in merged) == sum(column.again for column in operators)
    assert [column.name for column in merged] == [operators[0].name]
    assert in_at_most(operators, len(operators)) == operators


def test_the_numbers_behind_a_timeline(solved, subject, work_folder):
    result = plot(solved, "--output", "t.png", "--csv", "t.csv", "--json")
    facts = json.loads(result.stdout)
    assert facts["scheduled"]["peak_operator"] == subject.scheduled.peak_operator
    assert facts["scheduled"]["peak_bytes"] == sum(facts["scheduled"]["peak_holds_bytes"].values())
    with open("t.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    for run_of, side in (("plain", subject.plain), ("scheduled", subject.scheduled)):
        memory_bytes = [int(row["memory_bytes"]) for row in rows if row["run"] == run_of]
        assert memory_bytes == list(side.timeline.memory_bytes)
    for row in rows:
        assert sum(int(row[f"{holding.replace(' ', '_')}_bytes"]) for holding in Holding) == int(
            row["memory_bytes"]
        )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--output", "t.jpg"), "should end in .png, .svg, .pdf"),
        (("--output", "t"), "should end in"),
        (("--output", "t.html", "--kind", "timeline"), "a timeline is not written as .html"),
        (("--output", "t.png", "--kind", "report"), "a report is not written as .png"),
        (("--output", "absent/t.png"), "no folder absent"),
        (("--output", "t.png", "--csv", "absent/t.csv"), "no folder absent"),
        (("--output", "t.png", "--csv", "./t.png"), "same file"),
        (("--output", "t.html", "--csv", "t.csv"), "--csv"),
        (("--output", "t.png", "--points", "3"), "--points is for --kind tradeoff"),
        (("--output", "t.png", "--kind", "choices", "--x", "time"), "--x is for --kind timeline"),
        (("--output", "t.png", "--kind", "tradeoff", "--points", "1"), "--points"),
        (("--output", "t.png", "--kind", "tradeoff", "--time-limit", "nan"), "--time-limit"),
        (("--output", "t.png", "--kind", "pie"), "--kind"),
        (("--kind", "choices"), "--output"),
        (("--output", "t.png", "--no-solve"), "--no-solve is for the text"),
    ],
)
def test_usage_errors_before_any_work(options, says, solved, work_folder, monkeypatch):
    module = sys.modules["monetlite.cli.show_command"]
    monkeypatch.setattr(module, "open_schedule", lambda *_, **__: pytest.fail("opened in vain"))
    result = plot(solved, *options)
    assert result.exit_code == 2, result.output
    assert says in " ".join(result.stderr.split())
    assert os.listdir(work_folder) == []


def test_a_file_that_is_there_is_kept_and_its_option_named(solved, work_folder):
    (work_folder / "t.csv").write_text("dear")
    result = plot(solved, "--output", "t.png", "--csv", "t.csv")
    assert result.exit_code == 2
    assert "t.csv is there already; --force replaces it, --csv names another file" in result.stderr
    assert (work_folder / "t.csv").read_text() == "dear"


def test_a_schedule_that_is_not_there(work_folder):
    result = run("show", "absent.yaml", "--output", "t.png")
    assert result.exit_code == 4
    assert "absent.yaml can't be read" in result.stderr
    assert os.listdir(work_folder) == []


def test_a_write_that_fails_leaves_the_old_picture(solved, work_folder, monkeypatch):
    (work_folder / "t.png").write_bytes(b"what was there")

    def full_disk(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    result = plot(solved, "--output", "t.png", "--force")
    assert result.exit_code == 4
    assert "No space left on device" in result.stderr
    assert (work_folder / "t.png").read_bytes() == b"what was there"
    assert os.listdir(work_folder) == ["t.png"]


def test_a_persons_own_settings_change_nothing_and_stay(subject, tmp_path):
    save_figure(draw_timeline(subject), tmp_path / "a.png", "a")
    with matplotlib.rc_context({"font.size": 30, "text.usetex": True, "savefig.bbox": "tight", "figure.dpi": 50}):
        before = dict(matplotlib.rcParams)
        save_figure(draw_timeline(subject), tmp_path / "b.png", "a")
        assert dict(matplotlib.rcParams) == before
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_areas_that_can_touch_differ_in_lightness_or_pattern():
    def lightness(colour):
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in to_rgb(colour)]
        return np.cbrt(np.dot(linear, (0.2126, 0.7152, 0.0722)))

    for one, other in itertools.combinations(FILLS.values(), 2):
        assert one.hatch != other.hatch or abs(lightness(one.colour) - lightness(other.colour)) > 0.12


def test_names_that_look_like_formulas(opened, tmp_path):
    shown = analyse(replace(opened.schedule, name="price_$x^2$_\\frac"), opened.profile, opened.plain)
    save_figure(draw_timeline(shown), tmp_path / "t.svg", "t")
    assert "price_$x^2$_\\frac" in words_of_svg(tmp_path / "t.svg")


def test_nothing_uses_state_that_everybody_shares():
    """`pyplot` keeps every figure, and picks a window system."""
    sources = list(Path(monetlite.__file__).parent.rglob("*.py"))
    assert sum("matplotlib" in source.read_text(encoding="utf-8") for source in sources) >= 4
    assert [source for source in sources if "pyplot" in source.read_text(encoding="utf-8")] == []
