"""What an explanation says is so: its facts, derived again from the steps alone."""

import json
import math
import random
import re
from dataclasses import replace

import pytest
import torch
from commands import run
from random_graphs import random_profile
from small_models import SmallCNN
from step_lists import drop_once, free_profile, recompute, recompute_everything, schedule_of
from torch import nn

import monetlite
from monetlite.core.graph import Phase
from monetlite.core.schedule import Status
from monetlite.core.simulate import simulate
from monetlite.core.step_analysis import Fate
from monetlite.core.steps import plain_steps, stored_values
from monetlite.core.units import format_bytes
from monetlite.reporting import analysis_alternatives
from monetlite.reporting.analysis import analyse
from monetlite.reporting.analysis_alternatives import stored_by_one
from monetlite.reporting.analysis_overhead import Cause, overhead_shares
from monetlite.reporting.analysis_tensors import largest_tensors, peak_step_of
from monetlite.reporting.text_explain import story
from monetlite.solving.incumbent import Solution

pytestmark = pytest.mark.usefixtures("traced_once")

MODEL = """
import torch
from torch import nn

def build(batch=4):
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    for _ in range(4):
        layers += [nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2048, 4)), (torch.randn(batch, 3, 16, 16),)
"""


@pytest.fixture(scope="module")
def profile():
    graph = monetlite.trace(SmallCNN().train(), (torch.randn(4, 3, 16, 16),))
    return monetlite.profile(graph, "p100")


def explained(profile, steps):
    return analyse(schedule_of(profile, steps), profile, profile, tuple(steps))


def random_explanations(count):
    """Explanations of legal random schedules of random graphs, with the profile and the steps."""
    for seed in range(count):
        rng = random.Random(seed)
        profile = random_profile(rng)
        graph = profile.graph
        steps = recompute(
            graph,
            drop=lambda _, rng=rng: rng.random() < 0.5,
            choose=lambda index, rng=rng, graph=graph: rng.randrange(len(graph.operators[index].implementations)),
        )
        try:
            simulate(profile, steps)
        except monetlite.MonetliteError:
            steps = recompute(graph, drop=lambda _, rng=rng: rng.random() < 0.5)
        yield profile, steps, explained(profile, steps)


def test_the_shares_of_the_overhead_are_all_of_it():
    causes = set()
    for profile, steps, found in random_explanations(80):
        expected = simulate(profile, steps).latency_ms - simulate(profile, plain_steps(profile.graph)).latency_ms
        assert math.fsum(share.extra_ms for share in overhead_shares(found)) == pytest.approx(expected, abs=1e-9)
        causes.update(share.cause for share in overhead_shares(found))
    assert {Cause.RECOMPUTED, Cause.SLOWER, Cause.FASTER} <= causes


def test_runs_again_are_those_of_the_steps():
    for profile, steps, found in random_explanations(40):
        runs = {}
        for index, _ in steps:
            runs.setdefault(profile.graph.operators[index].name, []).append(index)
        again = {name: len(indexes) - 1 for name, indexes in runs.items() if len(indexes) > 1}
        told = {}
        for share in (share for share in overhead_shares(found) if share.cause is Cause.RECOMPUTED):
            told[share.operator] = told.get(share.operator, 0) + share.runs
        free = {
            operator.name
            for operator, costs in zip(profile.graph.operators, profile.costs, strict=True)
            if any(cost.of_run(again=True)[0] == 0 for cost in costs)
        }
        assert {name: count for name, count in told.items() if name not in free} == {
            name: count for name, count in again.items() if name not in free
        }


def stays_by_brute_force(graph, steps, value):
    """(writer's step, last step in memory, steps that read) of each version that is written, by looking ahead."""
    reads = [set(graph.operators[index].implementations[choice].reads) for index, choice in steps]
    writes = [set(graph.operators[index].implementations[choice].writes) for index, choice in steps]
    begins = [at for at in range(len(steps)) if value in writes[at]]
    found = []
    for begin, following in zip(begins, [*begins, len(steps)][1:], strict=True):
        # A step that reads a value and writes it anew reads the version before.
        until = range(begin + 1, min(following + 1, len(steps)))
        readers = [at for at in until if value in reads[at]]
        found.append((begin, max(readers, default=begin), tuple(readers)))
    return found


def test_tensors_stay_from_where_they_are_written_to_where_they_are_last_read():
    fates = set()
    for profile, steps, found in random_explanations(60):
        graph = profile.graph
        value_of = {value.name: index for index, value in enumerate(graph.values)}
        backward = (at for at, (index, _) in enumerate(steps) if graph.operators[index].phase is Phase.BACKWARD)
        begins = next(backward, len(steps))
        for tensor in largest_tensors(found.scheduled):
            fates.add(tensor.fate)
            if tensor.fate is Fate.HELD:
                continue
            expected = stays_by_brute_force(graph, steps, value_of[tensor.name])
            numbers = [(begin + 1, end + 1) for begin, end, _ in expected]
            assert [(stay.begin, stay.end) for stay in tensor.stays] == numbers
            for stay, (begin, _, readers) in zip(tensor.stays, expected, strict=True):
                assert stay.readers == tuple(graph.operators[steps[at][0]].name for at in readers)
                assert (stay.before is not None) == (begin >= begins)
                if stay.before is not None:
                    after = [graph.operators[index] for index, _ in steps[begin:]]
                    assert stay.before == next(item.name for item in after if item.phase is Phase.BACKWARD)
            crossing = any(begin < begins <= end for begin, end, _ in expected)
            assert (tensor.fate in (Fate.STORED, Fate.STORED_THEN_RECOMPUTED)) == crossing
            if tensor.fate is Fate.FREED:
                assert max(end for _, end, _ in expected) < begins
            if tensor.fate is Fate.NEVER_MADE:
                assert expected == []
    assert {Fate.STORED, Fate.RECOMPUTED, Fate.FREED} <= fates


def test_the_peak_is_split_into_what_is_held_there():
    for profile, steps, found in random_explanations(40):
        timeline, peak = simulate(profile, steps), peak_step_of(found.scheduled)
        assert peak.memory_bytes == timeline.peak_bytes == timeline.memory_bytes[peak.step - 1]
        assert sum(peak.held_bytes.values()) == timeline.peak_bytes
        assert peak.operator == profile.graph.operators[steps[peak.step - 1][0]].name
        assert peak.own_bytes <= peak.memory_bytes
        sizes = [held.size_bytes for held in peak.largest]
        assert sizes == sorted(sizes, reverse=True)


def test_plain_training_has_no_overhead_and_nothing_recomputed(profile):
    found = explained(profile, plain_steps(profile.graph))
    assert overhead_shares(found) == ()
    assert found.overhead == 0
    assert all(not tensor.spared for tensor in largest_tensors(found.scheduled))
    assert found.scheduled.peak_bytes == found.plain.peak_bytes


def test_an_implementation_that_spares_a_tensor_is_named():
    """ReLU's gradient from its input: the output, which plain training keeps, is not needed."""
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.Sigmoid(), nn.Linear(16, 2))
    profile = free_profile(monetlite.trace(model, torch.randn(64, 6)))
    graph = profile.graph
    backward = graph.by_name["1.backward"]
    how = [item.name for item in graph.operators[backward].implementations].index("from_input")

    def only_for_relu(value):
        return graph.values[value].name == "1"

    steps = recompute(graph, only_for_relu, lambda index: how if index == backward else 0)
    tensors = {tensor.name: tensor for tensor in largest_tensors(explained(profile, steps).scheduled)}
    spared = {(item.operator, item.implementation) for item in tensors["1"].spared}
    assert ("1.backward", "from_input") in spared
    # The next layer's weight gradient reads the output too: it is computed again for that.
    assert tensors["1"].fate is Fate.RECOMPUTED
    assert tensors["1"].recomputations[0].readers == ("2.mm.backward",)
    assert tensors["0"].fate is Fate.STORED
    assert "1.backward" in tensors["0"].stays[0].readers
    assert "Computed again once, before 2.mm.backward" in story(tensors["1"])


def test_what_another_schedule_stores(profile):
    graph = profile.graph
    plain, lean = plain_steps(graph), recompute_everything(graph)
    kept = stored_by_one(graph, plain, lean)
    names = {graph.values[value].name for value in stored_values(graph, plain) if not graph.values[value].held}
    lean_names = {graph.values[value].name for value in stored_values(graph, lean)}
    assert {item.name for item in kept} == names - lean_names != set()
    assert any(item.recomputed for item in kept)
    assert stored_by_one(graph, plain, plain) == ()


def test_another_devices_costs_are_not_those_it_was_solved_with(profile):
    steps = drop_once(profile.graph)
    schedule = schedule_of(profile, steps)
    assert analyse(schedule, profile, profile).as_solved
    other = monetlite.profile(profile.graph, "a100-40gb")
    found = analyse(schedule, other, other, steps)
    assert not found.as_solved
    assert found.costs == "estimated for a100-40gb"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A person's folder, with a model and a schedule for four fifths of plain training's memory."""
    folder = tmp_path_factory.mktemp("work")
    (folder / "net.py").write_text(MODEL)
    arguments = ("--model", f"{folder}/net.py:build", "--device", "p100", "--time-limit", "1", "--budget", "75%")
    result = run("solve", *arguments, "--output", folder / "s.yaml")
    assert result.exit_code == 0, result.output
    return folder


def test_the_command_explains_in_words_that_fit_a_terminal(folder, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    result = run("show", folder / "s.yaml", "--model", f"{folder}/net.py:build", "--time-limit", "0.5")
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert result.stdout.isascii()
    assert "estimated for p100" in text
    for heading in (
        "How the peak comes about",
        "The 10 largest tensors",
        "Where the step takes longer",
        "What limits going lower",
        "What 10% more memory would buy",
        "What 10% less memory would cost",
    ):
        assert heading in text
    assert "Computed again" in text


def test_the_commands_facts_agree_with_the_schedule(folder):
    result = run("show", folder / "s.yaml", "--model", f"{folder}/net.py:build", "--time-limit", "0.5", "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    schedule = monetlite.load_schedule(folder / "s.yaml")
    assert facts["peak"]["memory_bytes"] == schedule.peak_bytes <= facts["budget_bytes"] == schedule.budget_bytes
    assert facts["latency_ms"] == pytest.approx(schedule.latency_ms)
    assert facts["overhead_ms"] == pytest.approx(schedule.latency_ms - schedule.plain_latency_ms)
    assert sum(share["extra_ms"] for share in facts["overhead"]) == pytest.approx(facts["overhead_ms"])
    assert facts["costs"] == "estimated"
    more, less, limit = facts["more_memory"], facts["less_memory"], facts["limit"]
    assert more["budget_bytes"] == schedule.budget_bytes * 110 // 100
    assert more["peak_bytes"] <= more["budget_bytes"]
    assert more["latency_ms"] <= facts["latency_ms"]
    assert less["budget_bytes"] == schedule.budget_bytes * 90 // 100
    assert less["lower_bound_ms"] >= schedule.lower_bound_ms
    assert limit["proven_bytes"] <= limit["peak"]["memory_bytes"] <= schedule.peak_bytes
    if less["latency_ms"] is not None:
        assert less["peak_bytes"] <= less["budget_bytes"]
        assert less["latency_ms"] >= less["lower_bound_ms"]


@pytest.mark.thorough
def test_without_solving_there_are_no_alternatives(folder):
    result = run("show", folder / "s.yaml", "--model", f"{folder}/net.py:build", "--no-solve")
    assert result.exit_code == 0, result.output
    assert "10% more" not in result.stdout
    assert "What limits going lower" in result.stdout
    facts = json.loads(
        run("show", folder / "s.yaml", "--model", f"{folder}/net.py:build", "--no-solve", "--json").stdout
    )
    assert (facts["limit"], facts["more_memory"], facts["less_memory"]) == (None, None, None)


@pytest.mark.thorough
def test_a_peak_over_the_budget_is_told(folder, tmp_path):
    schedule = monetlite.load_schedule(folder / "s.yaml")
    edited = tmp_path / "edited.yaml"
    budget_bytes = schedule.peak_bytes // 2
    text = (folder / "s.yaml").read_text()
    edited.write_text(re.sub(r"(?m)^budget_bytes: \d+", f"budget_bytes: {budget_bytes}", text))
    for file, told in ((folder / "s.yaml", False), (edited, True)):
        result = run("show", file, "--model", f"{folder}/net.py:build", "--no-solve")
        assert result.exit_code == 0, result.output
        words = f"The peak exceeds the budget by {format_bytes(schedule.peak_bytes - budget_bytes)}"
        assert (words in " ".join(result.stdout.split())) is told
        assert (f"{format_bytes(schedule.peak_bytes)} over " in " ".join(result.stdout.split())) is told


@pytest.mark.thorough
def test_costs_of_another_device_are_told_from_the_files(folder):
    model = ("--model", f"{folder}/net.py:build")
    result = run("show", folder / "s.yaml", *model, "--no-solve", "--device", "t4")
    text = " ".join(result.stdout.split())
    assert "estimated for t4" in text
    assert "p100" not in text
    assert "written with other costs" in text
    assert "(proven)" not in text
    facts = json.loads(run("show", folder / "s.yaml", *model, "--no-solve", "--device", "t4", "--json").stdout)
    assert (facts["smallest_proven_bytes"], facts["smallest_reached_bytes"]) == (0, None)


@pytest.mark.thorough
def test_a_budget_of_reserved_memory_is_compared_with_others_of_its_kind(folder, tmp_path, monkeypatch):
    """The search is a stand-in. It finds a faster schedule of the same peak, for which more is reserved."""
    own = monetlite.load_schedule(folder / "s.yaml")
    replace(own, reserved_bytes=own.budget_bytes).save(tmp_path / "s.yaml")
    asked = []

    def solve(profile, budget_bytes, options, **_):
        asked.append((budget_bytes, options.reserved))
        return Solution(
            status=Status.FEASIBLE,
            steps=own.steps(profile.graph),
            latency_ms=own.latency_ms / 2,
            peak_bytes=own.peak_bytes,
            lower_bound_ms=0.0,
            smallest_proven_bytes=0,
            reserved_bytes=budget_bytes,
        )

    monkeypatch.setattr(analysis_alternatives, "solve_profile", solve)
    show = ("show", tmp_path / "s.yaml", "--model", f"{folder}/net.py:build", "--time-limit", "0.1")
    result = run(*show)
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert asked == [(own.budget_bytes * 110 // 100, True), (own.budget_bytes * 90 // 100, True)]
    for budget_bytes in (own.budget_bytes, *(budget_bytes for budget_bytes, _ in asked)):
        assert f"ithin {format_bytes(budget_bytes)} of reserved memory" in text
    more, less = text.split("What 10% less memory would cost")
    assert "It fits the present budget too" not in more
    assert "It fits the present budget too" in less
    assert "of reserved memory" in run("zoo", "show", tmp_path / "s.yaml").stdout
    on_cpu = run(*show, "--device", "cpu")
    assert on_cpu.exit_code == 0, on_cpu.output
    assert "a CPU reserves none" in on_cpu.stderr
    assert "10%" not in on_cpu.stdout


def test_what_cannot_be_explained(folder):
    (folder / "other.py").write_text(MODEL.replace("nn.ReLU()", "nn.GELU()"))
    for arguments, code, says in (
        (("absent.yaml",), 4, "absent.yaml"),
        ((folder / "s.yaml",), 2, "--model"),
        ((folder / "s.yaml", "--model", f"{folder}/net.py:build", "--batch", "2"), 4, "solved for inputs of"),
        ((folder / "s.yaml", "--model", f"{folder}/other.py:build"), 4, "solved for"),
        ((folder / "s.yaml", "--time-limit", "0"), 2, "--time-limit"),
    ):
        result = run("explain", *arguments, "--no-solve")
        assert result.exit_code == code, (arguments, result.output)
        assert says in result.stderr, (arguments, result.output)
        assert result.stdout == ""
        assert "Traceback" not in result.output
