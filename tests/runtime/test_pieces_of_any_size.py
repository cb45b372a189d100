"""Models in pieces whose sizes differ from step to step: captured once, planned for the largest that came."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F  # as everybody does
from models_in_pieces import QUICK, note_unplanned
from small_models import assert_same, step, twin
from thoroughness import often
from torch import nn
from torch._dynamo import graph_break

import monetlite
from monetlite.checking.trainee import Trainee, default_loss
from monetlite.core.errors import TraceError
from monetlite.profiling.memory_records import peak_growth_bytes
from monetlite.runtime.pieces import PiecewiseTraining
from monetlite.tracing.sized_graphs import SizedGraphs
from monetlite.tracing.step_inputs import resident_bytes

pytestmark = pytest.mark.filterwarnings("ignore:.*can't be captured whole")


@pytest.fixture
def captures(monkeypatch):
    """Notes the lines of what is captured."""
    found, backend = [], PiecewiseTraining.backend

    def noted(self, graph, inputs):
        found.append(len(graph.graph.nodes))
        return backend(self, graph, inputs)

    monkeypatch.setattr(PiecewiseTraining, "backend", noted)
    return found


class Recurrent(nn.Module):
    """An LSTM by PyTorch's own kernels, between an embedding and a head."""

    def __init__(self, width=16):
        super().__init__()
        self.embed, self.drop = nn.Embedding(11, width), nn.Dropout(0.2)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, 11))

    def forward(self, tokens):
        hidden, _ = self.lstm(self.drop(self.embed(tokens)))
        return F.cross_entropy(self.head(F.gelu(hidden) * 2).flatten(0, 1), tokens.flatten())


class Experts(nn.Module):
    """Each row goes to the expert that a value of it chooses: how many each gets is known on the host only."""

    def __init__(self):
        super().__init__()
        self.route, self.last = nn.Linear(16, 3), nn.Linear(16, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)
        )

    def forward(self, x):
        weights = self.route(x).softmax(-1)
        chosen, out = weights.argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = torch.where(chosen == number)[0]
            out = out.index_add(0, rows, expert(x[rows]) * weights[rows, number, None])
        return self.last(x + out).square().mean()


class Halves(nn.Module):
    """Hands numbers that it computes of sizes from piece to piece, and multiplies by others."""

    def __init__(self):
        super().__init__()
        self.first, self.places = nn.Linear(16, 32), nn.Parameter(torch.randn(40, 32))
        self.last = nn.Sequential(nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))

    def forward(self, x):
        batch, length, _ = x.shape
        half, less = length // 2 + 1, int(length * 0.4)
        hidden = torch.tanh(self.first(x))
        graph_break()
        hidden = F.silu(hidden[:, :half] + self.places[:half])
        hidden = torch.cat([hidden, hidden[:, :less]], dim=1)
        graph_break()
        hidden = self.last(hidden.reshape(batch * (half + less), 32)) * length**0.5
        return hidden.square().sum() / (batch * length)


class Rounds(nn.Module):
    """Begins with a piece in which nothing is differentiated, and pads rows to a length that varies."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x):
        places = (x.detach() * 3).floor().long()
        unique, inverse = torch.unique(places[:, :2], dim=0, return_inverse=True)
        hidden = F.gelu(self.first(x))
        graph_break()
        padded = F.pad(hidden, (0, 0, 0, 70 - len(hidden)))[: -len(hidden) // 2]
        return self.last(F.silu(padded)).square().mean() + inverse.float().mean() / len(unique)


class Wide(nn.Module):
    """Gradients of its weights are delivered in parts; that of its input grows with the batch."""

    def __init__(self):
        super().__init__()
        sizes = [(16, 512), (512, 512), (512, 512), (512, 4)]
        self.layers = nn.ModuleList(nn.Linear(*of) for of in sizes)

    def forward(self, x):
        x = x * 2
        graph_break()
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x.square().mean()


def tokens(batch, length):
    return (torch.randint(0, 11, (batch, length)),)


def rows(*shape):
    return (torch.randn(*shape, 16).requires_grad_(),)


MODELS = {
    "recurrent": (Recurrent, [tokens(*sizes) for sizes in ((6, 12), (4, 9), (6, 30), (5, 7), (6, 21), (4, 30))]),
    "experts": (Experts, [rows(60) for _ in range(7)]),
    "rounds": (Rounds, [rows(count) for count in (20, 30, 10, 40, 25, 33, 12)]),
    "wide": (Wide, [rows(count) for count in (200, 400, 800, 1600, 300, 600)]),
    "halves": (Halves, [rows(*sizes) for sizes in ((4, 9), (3, 12), (3, 7), (5, 30), (4, 11), (2, 6))]),
}


@pytest.mark.parametrize("name", often(MODELS, "halves"))
def test_steps_of_any_size_are_plain_training_s(name):
    """Losses, gradients, those of inputs included, and the generator's state."""
    build, calls = MODELS[name]
    plain = build()
    model = monetlite.within(twin(plain), budget="130%", **QUICK)
    for seed, args in enumerate(calls):
        assert_same(step(model, args, seed), step(plain, args, seed))
    schedule = monetlite.schedule_of(model)
    assert schedule.peak_bytes <= schedule.budget_bytes


@pytest.mark.parametrize("name", often(MODELS, "rounds"))
def test_a_size_that_has_varied_is_not_captured_again(name, captures):
    build, calls = MODELS[name]
    model, counts = monetlite.within(build(), budget="130%", **QUICK), []
    for args in calls:
        model(*args).backward()
        counts.append(len(captures))
    assert counts[1] > counts[0], "the second size is a symbol"
    assert counts[3:] == [counts[3]] * len(counts[3:])


@pytest.mark.thorough
@pytest.mark.parametrize("dynamic", [None, False])
def test_pieces_of_torch_compile_are_not_captured_again(dynamic, captures):
    """Neither TorchDynamo's own way of making sizes symbols nor its absence counts."""
    build, calls = MODELS["experts"]
    plain, counts = build(), []
    options = {"budget": "130%", **QUICK}
    model = twin(plain)
    model.compile(backend="monetlite", dynamic=dynamic, options=options)
    for seed, args in enumerate(calls):
        assert_same(step(model, args, seed), step(plain, args, seed))
        counts.append(len(captures))
    assert counts[3:] == [counts[3]] * len(counts[3:])
    assert torch._dynamo.config.automatic_dynamic_shapes, "left as it was"


@pytest.mark.thorough
@pytest.mark.parametrize("compiled", [False, True])
def test_pieces_that_can_t_be_planned_for_several_sizes_are_captured_at_each(compiled, captures, monkeypatch):
    def refuse(self, sizes, layout=""):
        raise TraceError("other operators at other sizes")

    monkeypatch.setattr(SizedGraphs, "traced_at", refuse)
    build, calls = MODELS["recurrent"]
    plain, counts, options = build(), [], {"budget": "130%", **QUICK}
    model = twin(plain)
    if compiled:
        model.compile(backend="monetlite", dynamic=False, options=options)
    else:
        monetlite.within(model, **options)
    for seed, args in enumerate(calls[:4]):
        assert_same(step(model, args, seed), step(plain, args, seed))
        counts.append(len(captures))
    assert all(now > before for before, now in itertools.pairwise(counts))


class Counts(nn.Module):
    """Multiplies by a number of the step, which is the size of no tensor."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 64), nn.Linear(64, 4)

    def forward(self, x, number):
        hidden = F.gelu(self.first(x))
        graph_break()
        return (self.last(hidden * (number % 7)) * number).square().mean()


GROWING = {
    "a counter": (Counts, [(torch.randn(32, 16), number) for number in range(2, 32)], 0),
    "lengths": (Recurrent, [tokens(4, length) for length in range(8, 38)], 9),
}


@pytest.mark.parametrize("name", often(GROWING, "a counter"))
def test_what_grows_from_step_to_step_is_planned(name, monkeypatch):
    unplanned = note_unplanned(monkeypatch)
    build, calls, most = GROWING[name]
    model = monetlite.within(build(), budget="120%", **QUICK)
    for args in calls:
        model(*args).backward()
    assert len(list(filter(None, unplanned))) <= most


def test_no_size_exceeds_the_budget():
    """Steps of known sizes keep to the plan; one with larger inputs than any stores as little as it can."""
    torch.manual_seed(0)
    model = Recurrent(64)
    longest = tokens(16, 60)
    plain_bytes = Trainee(copy.deepcopy(model), longest, {}, default_loss, "cpu").memory().peak_bytes
    wrapper = monetlite.MONeTWrapper(model, budget=int(0.9 * plain_bytes), time_limit=0.3)

    def train(args):
        wrapper.zero_grad()
        wrapper(*args).backward()

    for length in (50, 40, 50, 50, 60, 60, 60, 60):
        train(tokens(16, length))
    for length in (60, 33, 47, 60, 20):
        args = tokens(16, length)
        peak_bytes = resident_bytes(model, args).total + peak_growth_bytes(lambda args=args: train(args))
        assert peak_bytes <= 1.01 * wrapper.schedule.budget_bytes, length
    assert wrapper.schedule.inputs["input0"].shape == (16, 60)
