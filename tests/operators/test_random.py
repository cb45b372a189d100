"""Random operators: those of every kind are drawn again as they were drawn first, and none goes missing."""

import pytest
import torch
from small_models import assert_same, step, twin
from step_lists import free_profile, recompute_everything, schedule_of
from thoroughness import often
from torch import fx, nn
from torch.nn import functional as F

import monetlite
from monetlite.core.steps import plain_steps
from monetlite.operators.random import replay, rng_state
from monetlite.runtime.inductor import with_draws

DRAWS = {
    "rand": lambda x: x * torch.rand(x.shape),
    "rand on a device": lambda x: x * torch.rand(x.shape, device=x.device, dtype=x.dtype),
    "randn": lambda x: x + torch.randn(6),
    "randint": lambda x: x * torch.randint(0, 3, (4, 6)),
    "randperm": lambda x: x[torch.randperm(4)],
    "normal": lambda x: x * torch.normal(0.0, 1.0, (4, 6)),
}


class Drawing(nn.Module):
    """Draws between two layers, twice."""

    def __init__(self, draw):
        super().__init__()
        self.draw, self.first, self.last = draw, nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.last(torch.sin(self.draw(self.draw(self.first(x)).tanh())))


def steps_of(model, inputs):
    """A step of plain training, and of schedules that keep and that recompute all they can."""
    graph = monetlite.trace(model, inputs)
    yield step(twin(model), inputs)
    for steps in (plain_steps(graph), recompute_everything(graph)):
        yield step(monetlite.MONeTWrapper(twin(model), schedule_of(free_profile(graph), steps)), inputs)


def test_numbers_made_from_nothing_are_drawn_again():
    def draw(x):
        for kind in DRAWS:
            x = DRAWS[kind](x).sin()
        return x

    expected, *found = steps_of(Drawing(draw), (torch.randn(4, 6),))
    for after in found:
        assert_same(after, expected)


def test_a_schedule_file_that_draws_again(tmp_path):
    model, inputs = Drawing(DRAWS["rand on a device"]), (torch.randn(4, 6),)
    graph = monetlite.trace(model, inputs)
    schedule_of(free_profile(graph), recompute_everything(graph)).save(tmp_path / "rand.yaml")
    wrapper = monetlite.MONeTWrapper(twin(model), monetlite.load_schedule(tmp_path / "rand.yaml"))
    assert_same(step(wrapper, inputs), step(model, inputs))


def test_draws_for_inductor_may_have_a_device_of_their_own():
    graph = fx.Graph()
    state = graph.call_function(rng_state, ("cpu",))
    keywords = {"device": torch.device("cpu"), "pin_memory": False}
    first = graph.call_function(torch.ops.aten.rand.default, ([5],), keywords)
    again = graph.call_function(replay, (state, "cpu", "aten.rand.default", [5]), keywords)
    graph.output((first, again))
    torch.manual_seed(2)
    expected = torch.rand(5)
    torch.manual_seed(2)
    for found in with_draws(fx.GraphModule(nn.Module(), graph))():
        assert torch.equal(found, expected)


class Draws(nn.Module):
    """What a function draws, before or after a dropout that matters."""

    def __init__(self, draw, last=False):
        super().__init__()
        self.draw, self.last, self.layer, self.dropout = draw, last, nn.Linear(6, 6), nn.Dropout(0.5)

    def forward(self, x):
        if not self.last:
            self.draw(self.layer(x))
        y = self.dropout(self.layer(x)).tanh()
        if self.last:
            self.draw(y)
        return y


UNREAD = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "rand": lambda x: torch.rand(3),
    "in place": lambda x: torch.empty(3).uniform_(),
    "a noise's layer": lambda x: F.rrelu(x, training=True),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5),
}


@pytest.mark.parametrize("last", [False, True])
def test_numbers_that_nobody_reads_move_the_generator_on(last):
    def draw(x):
        for kind in UNREAD:
            UNREAD[kind](x)

    expected, *found = steps_of(Draws(draw, last), (torch.randn(4, 6),))
    for after in found:
        assert_same(after, expected)


def test_what_nobody_reads_takes_memory_too():
    graph = monetlite.trace(Draws(UNREAD["dropout"]), torch.randn(4, 6))
    dead = next(op for op in graph.operators if op.family == "dropout")
    assert [graph.values[value].size_bytes for value in dead.writes] == [4 * 6 * 4]


def test_dropping_all_draws_nothing():
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(1.0), nn.Linear(6, 6), nn.Dropout(0.5))
    expected, *found = steps_of(model, (torch.randn(4, 6),))
    for after in found:
        assert_same(after, expected)


def test_captures_leave_dropout_as_it_is():
    before = dict(torch.ops.aten.dropout.default.py_kernels)
    monetlite.trace(nn.Sequential(nn.Linear(6, 6), nn.Dropout(1.0)), torch.randn(4, 6))
    assert torch.ops.aten.dropout.default.py_kernels == before


class Noisy(torch.autograd.Function):
    """Draws in both passes, and in the backward pass numbers for nothing too."""

    @staticmethod
    def forward(context, x):
        context.save_for_backward(x)
        return x * torch.rand_like(x)

    @staticmethod
    def backward(context, gradient):
        (x,) = context.saved_tensors
        torch.rand(3)
        return gradient * torch.rand_like(x)


def noisy(x):
    return Noisy.apply(x)


def test_what_a_backward_pass_draws_is_drawn_in_it():
    """Others draw in between: the second forward pass before the first backward pass, and the loss."""

    def train(model):
        torch.manual_seed(4)
        first, second = model(x), model(x + 1)
        F.dropout(first).sum().backward()
        second.sum().backward()
        return [parameter.grad for parameter in model.parameters()] + [torch.get_rng_state()]

    x, model = torch.randn(4, 6), Drawing(noisy)
    graph = monetlite.trace(model, x)
    expected = train(twin(model))
    for steps in (plain_steps(graph), recompute_everything(graph)):
        found = train(monetlite.MONeTWrapper(twin(model), schedule_of(free_profile(graph), steps)))
        assert all(map(torch.equal, found, expected))


@torch.library.custom_op("drawing::mask", mutates_args=())
def mask(x: torch.Tensor, dropout_p: float) -> torch.Tensor:
    return F.dropout(torch.ones_like(x), dropout_p)


@torch.library.custom_op("drawing::noise", mutates_args=("x",), tags=(torch.Tag.nondeterministic_seeded,))
def noise(x: torch.Tensor, name: float) -> None:
    x.mul_(torch.rand_like(x) * name)


mask.register_fake(lambda x, _: torch.empty_like(x))
noise.register_fake(lambda *_: None)


def masked(x):
    return x * torch.ops.drawing.mask(x.detach(), 0.5)


def noised(x):
    factors = torch.ones_like(x)
    torch.ops.drawing.noise(factors, 2.0)
    return x * factors


@pytest.mark.parametrize("draw", often([masked, noised], noised))
def test_operators_of_other_libraries_are_drawn_again(draw):
    expected, *found = steps_of(Drawing(draw), (torch.randn(4, 6),))
    for after in found:
        assert_same(after, expected)


def test_operators_of_other_libraries_that_drop_nothing_are_run_again_without_a_state():
    graph = monetlite.trace(Drawing(lambda x: x * torch.ops.drawing.mask(x.detach(), 0.0)), torch.randn(4, 6))
    assert {"drawing", "mask"} & {item.family for item in graph.operators}
    assert "rng_state" not in {item.family for item in graph.operators}


def test_operators_that_draw_into_what_they_are_given_are_refused_by_inductor():
    model, inputs = Drawing(noised), (torch.randn(4, 6),)
    graph = monetlite.trace(model, inputs)
    wrapper = monetlite.MONeTWrapper(model, schedule_of(free_profile(graph), plain_steps(graph)), compile=True)
    with pytest.raises(monetlite.MonetliteError, match="draws random numbers at"):
        wrapper(*inputs)
