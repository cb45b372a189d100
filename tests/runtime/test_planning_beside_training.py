"""A first schedule at once, and a better one in its place between two steps: the same training."""

import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from small_models import SmallCNN, assert_same, step, twin
from torch import nn

import monetlite
from monetlite.core.costs import without_costs
from monetlite.core.errors import CudnnError, InfeasibleBudget
from monetlite.core.options import split_options
from monetlite.planning import beside_training
from monetlite.planning.beside_training import PlanningBesideTraining
from monetlite.profiling.measured import Measurement
from monetlite.runtime import schedule_search
from monetlite.runtime.fitting import Fitting
from monetlite.runtime.schedule_search import StepClock
from monetlite.runtime.serving import own_bytes
from monetlite.solving.annealing import compiling
from monetlite.solving.bounding.peak_bound import smallest_budget_bound
from monetlite.solving.problem import Problem


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        for layer in self.layers:
            x = nn.functional.dropout(nn.functional.gelu(layer(x)), 0.2) + x
        return self.head(self.norm(x))


@pytest.fixture(scope="module")
def planned():
    """A model, its inputs, and two schedules that store different values."""
    model, inputs = Dropping(), (torch.randn(64, 16),)
    graph = monetlite.trace(model, inputs)
    profile = monetlite.profile(graph, "rtx-3090")
    schedules = [monetlite.solve(profile, share, time_limit=0.3) for share in ("100%", "82%")]
    assert schedules[0].choices != schedules[1].choices
    return model, inputs, schedules


def given(monkeypatch, *schedules):
    """Have the planning beside training find these schedules, one at each border."""
    waiting = list(schedules)

    class Given(PlanningBesideTraining):
        def first(self, *, settle=True):
            return waiting.pop(0)

        def advance(self, seconds):
            found = waiting.pop(0) if waiting else None
            self.finished = not waiting
            return found

    monkeypatch.setattr(schedule_search, "PlanningBesideTraining", Given)


def test_every_step_is_plain_training_s_while_programs_are_exchanged(planned, monkeypatch):
    original, inputs, (small, large) = planned
    given(monkeypatch, small, large, small, large)
    model, plain = twin(original), twin(original)
    monetlite.within(model, budget="1GB", device="rtx-3090")
    ran = []
    for seed in range(6):
        torch.manual_seed(seed)
        expected = step(plain, inputs)
        torch.manual_seed(seed)
        assert_same(step(model, inputs), expected)
        ran.append(monetlite.schedule_of(model).choices)
    assert ran == [item.choices for item in (small, large, small, large, large, large)]


def test_a_step_ends_by_the_programs_that_it_began_by(planned, monkeypatch):
    original, inputs, (small, large) = planned
    given(monkeypatch, small, large)
    model, plain = twin(original), twin(original)
    monetlite.within(model, budget="1GB", device="rtx-3090")
    losses = []
    for of in (plain, model):
        torch.manual_seed(0)
        # The second call exchanges the programs; the backward pass of the first comes after it.
        outputs = [of(*inputs).square().sum() for _ in range(3)]
        for output in reversed(outputs):
            output.backward()
        losses.append(outputs)
    assert torch.equal(torch.stack(losses[0]), torch.stack(losses[1]))
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_the_first_plan_is_bettered_by_a_process(caplog, cache_folder):
    """The real thing: rough costs, a second of solving, measuring between steps, and a process."""
    torch.manual_seed(0)
    model, inputs = SmallCNN(), (torch.randn(4, 3, 12, 12),)
    plain = twin(model)
    monetlite.within(model, budget="90%", time_limit=1.0)
    with caplog.at_level(logging.INFO, logger="monetlite"):
        assert_same(step(model, inputs), step(plain, inputs))
        end = time.monotonic() + 90
        ends = "plan was found", "better plan,", "plan, with measured costs"  # the last where the first was as good
        while not any(end_of in line for line in caplog.messages for end_of in ends):
            assert time.monotonic() < end, caplog.messages
            if any(line.startswith("measured ") for line in caplog.messages):
                time.sleep(0.05)  # the process has the core
            assert_same(step(model, inputs), step(plain, inputs))
    assert caplog.messages[0].startswith("captured ")
    assert caplog.messages[1].startswith("plan: ")
    assert any(line.startswith("measured ") for line in caplog.messages)
    assert any(line in caplog.messages[-1] for line in ends[1:]), caplog.messages
    assert monetlite.schedule_of(model).kind == "measured"


def test_where_plain_training_fits_it_is_the_first_plan(monkeypatch, cache_folder):
    """Of default operators, nothing is faster: no search is needed."""
    monkeypatch.setattr(beside_training, "solve_layouts", lambda *_, **__: pytest.fail("searched"))
    model, inputs = SmallCNN(), (torch.randn(4, 3, 12, 12),)
    plain = twin(model)
    monetlite.within(model, budget="1GB")
    for _ in range(2):
        assert_same(step(model, inputs), step(plain, inputs))
    schedule = monetlite.schedule_of(model)
    assert schedule.overhead == 0
    assert schedule.peak_bytes == schedule.plain_peak_bytes


def test_a_budget_below_what_default_implementations_need_is_planned_for_at_once(monkeypatch, cache_folder):
    """Other implementations run once, too; nothing is measured at length."""
    monkeypatch.setattr(PlanningBesideTraining, "_settled", lambda *_: pytest.fail("solved for all the time"))
    monkeypatch.setattr(Measurement, "run", lambda *_: pytest.fail("measured"))
    model, inputs = nn.Sequential(nn.Linear(8, 256), nn.GELU(), nn.Linear(256, 1)), (torch.randn(4096, 8),)
    plain = twin(model)
    graph = monetlite.trace(model, inputs)
    defaults = graph.restricted(lambda item: False)
    assert defaults != graph
    budget_bytes = smallest_budget_bound(Problem.of(without_costs(defaults))) - 2**20
    monetlite.within(model, budget=budget_bytes, time_limit=5)
    assert_same(step(model, inputs), step(plain, inputs))
    schedule = monetlite.schedule_of(model)
    assert schedule.peak_bytes <= budget_bytes
    assert any(name != "default" for name in schedule.choices.implementations.values())


@pytest.mark.thorough
@pytest.mark.parametrize("found_in_a_part", [True, False])
def test_where_nothing_is_found_soon_a_part_of_the_time_limit_is_tried_before_all(found_in_a_part, monkeypatch):
    limits, solved = [], PlanningBesideTraining._solved

    def solve(planning, profiles, solving):
        limits.append(solving.time_limit)
        if solving.time_limit < (1 if found_in_a_part else 8):
            raise InfeasibleBudget("not found yet", budget_bytes=2, proven_bytes=1, reached_bytes=None)
        return solved(planning, profiles, solving)

    monkeypatch.setattr(PlanningBesideTraining, "_solved", solve)
    monkeypatch.setattr(PlanningBesideTraining, "_plain_fits", lambda *_: False)
    monkeypatch.setattr(beside_training, "FIRST_SECONDS", (0.1, 0.2))
    graph = monetlite.trace(SmallCNN(), torch.randn(2, 3, 16, 16))
    pricing, solving = split_options({"device": "rtx-3090", "time_limit": 8.0})
    planning = PlanningBesideTraining([graph], "90%", pricing, solving)
    schedule = planning.first()
    assert schedule.peak_bytes <= schedule.budget_bytes
    assert limits[-1] == (1.0 if found_in_a_part else 8.0)
    assert all(limit <= 1 for limit in limits[:-1])


class Waits(Exception):
    """Stands for waiting until the search is compiled."""


@pytest.mark.parametrize(("proven_bytes", "raised"), [(1, Waits), (3, InfeasibleBudget)])
def test_a_budget_that_only_the_search_may_keep_to_waits_for_it_to_be_compiled(proven_bytes, raised, monkeypatch):
    def fail(*_):
        raise InfeasibleBudget("not found", budget_bytes=2, proven_bytes=proven_bytes, reached_bytes=None)

    def wait(_):
        raise Waits

    monkeypatch.setattr(PlanningBesideTraining, "_solved", fail)
    monkeypatch.setattr(compiling, "await_compiled", wait)
    graph = monetlite.trace(SmallCNN(), torch.randn(2, 3, 16, 16))
    planning = PlanningBesideTraining([graph], "50%", *split_options({"device": "rtx-3090"}))
    with pytest.raises(raised):
        planning.first()


def test_what_does_not_fit_is_refused_at_the_first_step(planned):
    original, inputs, _ = planned
    model = monetlite.within(twin(original), budget="20%", device="rtx-3090", time_limit=0.3)
    with pytest.raises(InfeasibleBudget, match="is too small"):
        model(*inputs)


def test_waiting_finds_the_best_plan_in_the_first_step_by_one_capture(planned, monkeypatch, caplog):
    original, inputs, _ = planned
    monkeypatch.setattr(PlanningBesideTraining, "first", None)
    model = monetlite.within(twin(original), budget="100%", device="rtx-3090", time_limit=0.3, wait=True)
    with caplog.at_level(logging.INFO, logger="monetlite"):
        for _ in range(3):
            model(*inputs).sum().backward()
    assert caplog.text.count("captured ") == 1
    assert caplog.text.count("plan: ") == 1
    assert "better plan" not in caplog.text


@pytest.mark.thorough
@pytest.mark.parametrize("wait", [False, True])
def test_a_share_is_not_less_than_before_once_layers_are_frozen(wait):
    """Plain training of the last layer alone takes little, and no plan of it takes a share of that."""
    blocks = (nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(3))
    ends = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *blocks, *ends)
    x = torch.randn(16, 3, 32, 32)
    monetlite.within(model, budget="60%", device="rtx-3090", time_limit=0.3, wait=wait)
    step(model, (x,))
    before_bytes = monetlite.schedule_of(model).budget_bytes
    model[:-1].requires_grad_(False)
    model(x).sum().backward()
    schedule = monetlite.schedule_of(model)
    assert schedule.peak_bytes <= schedule.budget_bytes == before_bytes


def test_an_error_of_a_better_plan_leaves_training_as_it_is(planned, monkeypatch, caplog):
    original, inputs, (small, large) = planned
    given(monkeypatch, small, large)
    model = twin(original)
    monetlite.within(model, budget="1GB", device="rtx-3090")
    step(model, inputs)

    def fit(*_):
        raise CudnnError("torch.backends.cudnn.benchmark would tune again")

    monkeypatch.setattr(Fitting, "fit", fit)
    with caplog.at_level(logging.INFO, logger="monetlite"):
        step(model, inputs)
    assert "a better plan is not taken: torch.backends.cudnn.benchmark" in caplog.text
    assert monetlite.schedule_of(model).choices == small.choices


def test_a_process_that_can_not_start_leaves_training_as_it_is(monkeypatch, caplog, cache_folder):
    model, inputs = SmallCNN(), (torch.randn(4, 3, 12, 12),)
    monetlite.within(model, budget="90%", time_limit=0.5, device="rtx-3090")

    def start(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(beside_training, "SolvingProcess", start)
    with caplog.at_level(logging.INFO, logger="monetlite"):
        for _ in range(3):
            step(model, inputs)
    assert caplog.text.count("no better plan is looked for: [Errno 28]") == 1


def test_what_is_done_between_steps_counts_as_one_step_more_at_most(monkeypatch):
    now = iter([0.0, 1.0, 2.0, 602.0, 603.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    clock = StepClock()
    assert [clock.border() for _ in range(4)] == [0.0, 1.0, 2.0, 1.0]


@pytest.mark.parametrize("optimizer", [None, "adamw"])
def test_measuring_beside_training_has_the_room_that_the_budget_leaves(optimizer, monkeypatch):
    rooms = []

    class Noted(Measurement):
        def __init__(self, graph, device, **given):
            rooms.append(given["room_bytes"])
            super().__init__(graph, device, **given)

    monkeypatch.setattr(beside_training, "Measurement", Noted)
    model, image = SmallCNN(), torch.randn(4, 3, 32, 32)
    monetlite.within(model, budget="50MB", optimizer=optimizer)
    model(image).sum().backward()
    weights = own_bytes(model.parameters())
    states = 2 * weights if optimizer else 0
    assert rooms == [50_000_000 - own_bytes([*model.parameters(), *model.buffers(), image]) - states]


def test_a_budget_that_leaves_operators_unmeasured_is_refused_with_what_comes_on_top():
    """The second refusal has all costs: a transposed convolution takes workspace on a CPU."""
    layers = nn.Sequential(nn.Conv2d(3, 24, 3), nn.Tanh(), nn.ConvTranspose2d(24, 7, 3), nn.Tanh())
    image = torch.randn(4, 3, 29, 29)
    with pytest.raises(InfeasibleBudget, match="are not measured: their workspace comes on top") as refused:
        monetlite.MONeTWrapper(layers, budget="1%")(image)
    with pytest.raises(InfeasibleBudget) as again:
        monetlite.MONeTWrapper(layers, budget=refused.value.reached_bytes)(image)
    assert again.value.reached_bytes > refused.value.reached_bytes
    assert "are not measured" not in str(again.value)


@pytest.mark.skipif(os.name == "nt", reason="there, a process doesn't say whose it is")
def test_the_solver_ends_with_training_and_leaves_nothing(tmp_path):
    """Also where training ends without a word, as by `os._exit` or SIGKILL; and a fork of it ends nothing."""
    program = """
import os, sys, time
from monetlite.core.costs import load_profile
from monetlite.core.options import SolvingOptions
from monetlite.core.schedule import read_schedule
from monetlite.planning.solving_process import SolvingProcess
process = SolvingProcess(
    [load_profile("profile.json")], "60%", SolvingOptions(time_limit=600), None, read_schedule("start.yaml")
)
forked = os.fork()
if forked == 0:
    del process
    sys.exit(0)
os.waitpid(forked, 0)
print(process._process.pid, process._path, process.running, process._path.exists(), flush=True)
time.sleep(4)  # in which it begins to solve
os._exit(0)
"""
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Dropout(0.1)) for _ in range(30)]
    graph = monetlite.trace(nn.Sequential(*layers), torch.randn(512, 64))
    profile = monetlite.profile(graph, "rtx-3090")  # of more schedules than are looked through in seconds
    profile.save(tmp_path / "profile.json")
    monetlite.solve(profile, "100%", time_limit=0.2).save(tmp_path / "start.yaml")  # which is there at once
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path, timeout=120
    )
    pid, folder, *alive = run.stdout.split()
    assert alive == ["True", "True"]
    for _ in range(600):
        if not Path(folder).exists() and not Path(f"/proc/{pid}").exists():
            break
        time.sleep(0.1)
    assert not Path(folder).exists()
    assert not Path(f"/proc/{pid}").exists()
