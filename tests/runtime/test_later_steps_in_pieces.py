"""Later steps of models in pieces: what is captured, planned and recorded of them."""

import contextlib
import copy
import gc
import itertools
import re
import warnings
import weakref

import numpy as np
import pytest
import torch
from models_in_pieces import QUICK, DropsLayers, ReadsAMean, mlp, note_unplanned, trained
from small_models import Reads, assert_same, step, twin
from thoroughness import often
from torch import nn
from torch._dynamo import graph_break

import monetlite
from monetlite.checking.trainee import Trainee, default_loss
from monetlite.core.errors import InfeasibleBudget
from monetlite.profiling.memory_records import is_profiling
from monetlite.runtime import breaks, model_in_pieces
from monetlite.runtime.pieces import PiecewiseTraining
from monetlite.runtime.pieces_planning import PiecesPlanning


class ScalesByAMean(nn.Module):
    """A number of the data that pieces compute with, and one that a branch asks for."""

    def __init__(self):
        super().__init__()
        self.first, self.second = mlp(), mlp()

    def forward(self, x):
        x = self.first(x) + x
        mean = x.abs().mean().item()
        graph_break()
        return self.second(x / (1 + mean)) + (x * mean if mean < 1e9 else x)


def spans(count):
    """Some numbers below another one, by numpy's generator."""
    more = np.random.rand(1).item()  # as transformers' models of speech draw
    return np.random.choice(np.arange(count), count // 5 + int(more), replace=False)


class MasksSpans(ReadsAMean):
    def forward(self, x):
        x = self.first(x)
        kept = torch.ones(16)
        kept[torch.from_numpy(spans(16))] = 0.0
        return self.second(x * kept)


@pytest.mark.filterwarnings("ignore:.*can't be captured whole")
@pytest.mark.parametrize("build", often([ReadsAMean, ScalesByAMean, MasksSpans], ScalesByAMean))
def test_numbers_that_differ_in_each_step_are_not_compiled_in_each(build, monkeypatch):
    compiled, backend = [], PiecewiseTraining.backend
    monkeypatch.setattr(PiecewiseTraining, "backend", lambda *given: (compiled.append(1), backend(*given))[1])
    plain = build()
    model = monetlite.within(twin(plain), budget="66%", **QUICK)
    for seed in range(7):
        if seed == 3:
            compiled.clear()
        args, steps = (torch.randn(64, 16),), []
        for of in (model, plain):
            np.random.seed(seed)
            steps.append(step(of, args, seed))
        assert_same(*steps)
    assert not compiled
    schedule = monetlite.schedule_of(model)
    assert schedule.peak_bytes <= schedule.budget_bytes
    assert {name.partition(".")[0] for name in schedule.choices.before} >= {"piece1", "piece2"}


class Catches(nn.Module):
    """A break after which TorchDynamo can only capture what the function calls."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        x = self.first(x)
        try:
            if x.sum() > 1e9:
                raise ValueError
        except ValueError:
            x = x.clamp(max=1.0)
        return self.second(x)


def borders(counts):
    """Where parts begin. TorchDynamo compiles the loop anew at each call: a method is on its stack at a break."""
    found, places = [0], []
    for count, parts in counts.tolist():
        numbers = torch.arange(count * parts)
        places.append(numbers[numbers >= 0])
        halves = torch.full((2,), count * parts // 2).cumsum(0) + found[-1]
        found.extend(halves.tolist())
    return found


class SplitsInParts(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 16)
        self.register_buffer("counts", torch.tensor([[4, 2], [2, 2]]))

    def forward(self, x):
        begins = borders(self.counts)
        x = self.first(x)
        graph_break()
        return self.second(x) * begins[-1]


class SkipsByNumpy(DropsLayers):
    """Layers that a number of numpy's drops, as VITS does: the comparison is kept in a variable."""

    def forward(self, x):
        for layer in self.layers:
            drawn = np.random.uniform(0, 1)
            skip = self.training and drawn < 0.3
            if not skip:
                x = layer(x)
        return self.head(x)


@pytest.mark.parametrize(
    ("build", "compiled"),
    often(
        itertools.product([DropsLayers, Catches, SplitsInParts, SkipsByNumpy], [False, True]),
        *[(DropsLayers, False), (Catches, True)],
    ),
)
def test_later_steps_look_at_nothing_anew(build, compiled):
    """A number that only a branch reads needs a program for each side; functions that were left out stay so."""
    model, options = build(), {"budget": "120%", **QUICK}
    if compiled:
        model.compile(backend="monetlite", options=options)
    else:
        monetlite.within(model, **options)
    looked = []
    for seed in range(30):
        torch.manual_seed(seed)
        np.random.seed(seed)
        model(torch.randn(8, 16)).sum().backward()
        looked.append(torch._dynamo.utils.counters["frames"]["total"])
    assert looked[-1] - looked[14] <= 4, "more than the sides of branches that come for the first time"


def test_torch_is_changed_for_captures_only_where_something_is_captured(monkeypatch):
    settings, captures = model_in_pieces.capture_settings, []

    def noted(*limit):
        captures.append(1)
        return settings(*limit)

    monkeypatch.setattr(model_in_pieces, "capture_settings", noted)
    model = monetlite.within(Reads(), budget="120%", **QUICK)
    for _ in range(6):
        model(torch.randn(64, 64)).sum().backward()
    assert captures
    captures.clear()
    model(torch.randn(64, 64)).sum().backward()
    assert not captures


class Counts(Reads):
    """Clamps to a fraction of a number that counts steps, which an operator has to know."""

    seen = 0

    def forward(self, x):
        self.seen += 1
        return super().forward(x).clamp(max=1 / self.seen)


def test_the_optimizer_of_a_model_in_pieces_is_counted():
    plain, x = Reads(), torch.randn(64, 64)
    model = monetlite.within(twin(plain), budget="120%", optimizer="adamw", **QUICK)
    for seed in range(4):
        assert_same(step(model, (x,), seed), step(plain, (x,), seed))
    assert monetlite.schedule_of(model).optimizer == "adamw"
    weights = sum(parameter.nbytes for parameter in plain.parameters())
    assert monetlite.schedule_of(model).peak_bytes > 4 * weights, "weights, gradients and two moments"


class ReadsRegions(nn.Module):
    """A feature map that several later pieces read, as heads of a detector do."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(16, 4)

    def forward(self, x):
        features, loss = self.body(x).relu(), 0.0
        for number in range(3):
            scale = 2.0 if features[0, 0, number, number].item() > 1e9 else 1.0
            loss = loss + self.head(features.mean((2, 3)) * scale).square().sum()
        return loss


def test_gradients_of_a_tensor_that_several_pieces_read_are_added_as_they_come():
    model, args = ReadsRegions(), (torch.randn(1, 3, 96, 96),)
    plain_bytes = Trainee(copy.deepcopy(model), args, {}, default_loss, "cpu").memory().peak_bytes
    wrapper = monetlite.MONeTWrapper(model, budget=int(1.1 * plain_bytes), **QUICK)
    trainee = Trainee(wrapper, args, {}, default_loss, "cpu")
    for _ in range(4):
        trained(wrapper, *args)
    measured = trainee.memory().peak_bytes
    assert abs(wrapper.schedule.peak_bytes / measured - 1) < 0.05
    assert measured <= 1.01 * wrapper.schedule.budget_bytes


class TwoTasks(nn.Module):
    """Steps of two kinds, each with a head of its own behind a break."""

    def __init__(self):
        super().__init__()
        self.body, self.heads = mlp(), nn.ModuleList([mlp(), nn.Sequential(mlp(), mlp())])

    def forward(self, x, task):
        hidden = self.body(x)
        graph_break()
        return self.heads[task](hidden).square().mean()


def test_each_kind_of_steps_is_planned(monkeypatch):
    unplanned = note_unplanned(monkeypatch)
    plain, x = TwoTasks(), torch.randn(64, 16)
    model = monetlite.within(twin(plain), budget="100%", **QUICK)
    for seed in range(14):
        assert_same(step(model, (x, seed % 2), seed), step(plain, (x, seed % 2), seed))
    assert any(unplanned), "the second kind comes unplanned at first"
    assert unplanned[-6:] == [0] * 6
    assert not is_profiling(), "nothing is left to be recorded"


class FillsPlaces(nn.Module):
    """Writes where a mask says, of which TorchDynamo's backends can't make a graph. Its layers can be captured."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(2))

    def forward(self, x, mask):
        hidden = x.clone()
        hidden[mask] = self.first(x[:2])
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return hidden


@pytest.mark.thorough
def test_what_is_called_beside_a_mask_s_places_is_planned():
    plain, inputs = FillsPlaces(), (torch.randn(8, 16), torch.arange(8) > 5)
    model = monetlite.within(twin(plain), budget="110%", **QUICK)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for seed in range(4):
            assert_same(step(model, inputs, seed), step(plain, inputs, seed))
    (text,) = [str(item.message) for item in said if "trains in" in str(item.message)]
    assert re.search(r"in 2 pieces(?s:.*)\n  how many places a mask selects", text)


@pytest.mark.thorough
def test_captures_that_go_on_are_told_of_once(monkeypatch):
    monkeypatch.setattr(breaks, "MANY_CAPTURING", 2)
    model = monetlite.within(Counts(), budget="200%", **QUICK)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(6):
            model(torch.randn(64, 64)).sum().backward()
    (text,) = [str(item.message) for item in said if "captured again" in str(item.message)]
    assert re.search(
        r"in 2 steps since it was planned, the last time at .*test_later_steps_in_pieces\.py:\d+, for other sizes",
        text,
    )


class ChangesAndLetsGo(nn.Module):
    """A piece reads a small tensor, which is changed in place behind it, and gone when the forward pass ends."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), mlp(128)

    def forward(self, x):
        hidden = self.first(x)
        graph_break()
        wide = nn.functional.gelu(hidden.repeat(1, 8) * 2)
        graph_break()
        let_go([hidden])
        del hidden
        return self.second(wide)


@torch.compiler.disable
def let_go(tensors):
    tensors.pop().zero_()


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.*can't be captured whole")
def test_changes_of_tensors_that_are_gone_are_seen():
    """A plan that kept the small tensor in place of the wide one would need less, and end in an error of torch."""
    plain, args = ChangesAndLetsGo(), (torch.randn(256, 16),)
    for budget in ("1.1MB", "950kB"):
        model = monetlite.within(twin(plain), budget=budget, wait=True, **QUICK)
        with pytest.raises(InfeasibleBudget) if budget == "950kB" else contextlib.nullcontext():
            for seed in range(5):
                assert_same(step(model, args, seed), step(plain, args, seed))


@pytest.mark.filterwarnings("ignore:.*can't be captured whole")
def test_no_step_s_tensors_are_kept():
    model = monetlite.within(ReadsAMean(), budget="120%", **QUICK)
    for _ in range(4):
        x = torch.randn(64, 16)
        held = weakref.ref(x)
        model(x).sum().backward()
        del x
        gc.collect()
        assert held() is None


@pytest.mark.filterwarnings("ignore:.*can't be captured whole")
def test_models_that_train_in_turn_are_both_planned():
    models, x = [Reads(), Reads()], torch.randn(64, 64)
    for model in models:
        monetlite.within(model, budget="120%", **QUICK)
    for seed in range(4):
        for model in models:
            step(model, (x,), seed)
    assert all(map(monetlite.schedule_of, models))


class LogsAtTimes(Reads):
    """Reads a number in every third step only."""

    def __init__(self):
        super().__init__()
        self.steps, self.log = 0, []

    def forward(self, x):
        self.steps += 1
        y = self.first(x).relu()
        if self.steps % 3 == 0:
            self.log.append(y.abs().mean().item())
        return self.last(y)


class LogsAlways(LogsAtTimes):
    def forward(self, x):
        y = self.first(x).relu()
        self.log.append(y.abs().mean().item())
        return self.last(y)


@pytest.mark.parametrize(("build", "wait"), often([(LogsAtTimes, False), (LogsAlways, True)], (LogsAtTimes, False)))
def test_numbers_that_are_read_in_some_steps_end_pieces(build, wait):
    plain = build()
    wrapper = monetlite.MONeTWrapper(twin(plain), budget=10**7, wait=wait, **QUICK)
    for number in range(7):
        x = torch.randn(8, 64)
        assert_same(step(wrapper, (x,), number), step(plain, (x,), number))
    assert wrapper.model.log == plain.log
    assert len(plain.log) >= 2


class LooksUp(nn.Module):
    """Reads numbers by indices that are read of another tensor."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x, table):
        y = self.first(x)
        for at in y.sum(1).argsort()[:2].tolist():
            y = y * (1 + int(table[at]))
        return self.second(y)


@pytest.mark.thorough
def test_numbers_that_are_looked_up_by_numbers_end_pieces():
    plain = LooksUp()
    wrapper = monetlite.MONeTWrapper(twin(plain), budget="120%", **QUICK)
    for number in range(5):
        inputs = torch.randn(8, 16), torch.randint(0, 4, (8,))
        assert_same(step(wrapper, inputs, number), step(plain, inputs, number))


class ReadsAHalf(nn.Module):
    """A piece that takes a view, with an offset, of an output whose size varies."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 64), nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 8))

    def forward(self, x, keep):
        half = self.up(x[keep]).chunk(2, -1)[1]
        graph_break()
        return self.down(half.sigmoid())


@pytest.mark.thorough
def test_views_of_outputs_that_vary_are_captured_once_for_all_sizes(monkeypatch):
    captured, planned_piece = [], PiecewiseTraining._planned_piece
    monkeypatch.setattr(
        PiecewiseTraining, "_planned_piece", lambda *given: [captured.append(1), planned_piece(*given)][1]
    )
    plain = ReadsAHalf()
    wrapper = monetlite.MONeTWrapper(twin(plain), budget="200%", **QUICK)
    for number in range(6):
        inputs = torch.randn(64, 8), torch.rand(64) < 0.5
        assert_same(step(wrapper, inputs, number), step(plain, inputs, number))
    assert len(captured) <= 6


class Forked(nn.Module):
    """Two outputs of a body with a break in it."""

    def __init__(self):
        super().__init__()
        self.body, self.heads = mlp(), nn.ModuleList(mlp() for _ in range(2))

    def forward(self, x):
        x = self.body(x)
        x = x * (2.0 if x.mean().item() > 1e9 else 0.5)
        return [head(x) for head in self.heads]


@pytest.mark.parametrize("again", ["second pass", "batch"])
def test_what_later_passes_keep_is_no_reason_to_plan_again(again, monkeypatch):
    """The plan, which no other one could better, stays; training does not end for want of one."""
    settled, settle = [], PiecesPlanning.settle
    monkeypatch.setattr(PiecesPlanning, "settle", lambda *of: settled.append(of) or settle(*of))
    plain, x = Forked(), torch.randn(1024, 16)
    planned = monetlite.within(twin(plain), budget="80%", time_limit=0.5, wait=True)

    def gradients(model, number):
        torch.manual_seed(number)
        one, two = (output.square().mean() for output in model(x))
        parameters = list(model.parameters())
        if again == "batch":
            return torch.autograd.grad((one, two), parameters, (torch.ones(3),) * 2, is_grads_batched=True)
        first = torch.autograd.grad(one + two, parameters, retain_graph=True)
        return [*first, *torch.autograd.grad(one + two, parameters)]

    for number in range(8):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            found = gradients(planned, number)
        for mine, theirs in zip(found, gradients(plain, number), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    assert not settled
