"""Random operators: those of every kind are drawn again as they were drawn first, and none goes missing."""

import pytest
import torch
from small_models import assert_same, step, twin
from step_lists import free_profile, recompute_everything, schedule_of
from torch import fx, nn

import monetlite
from monetlite.operators.random import replay, rng_state
from monetlite.runtime.drawing import with_draws
from monetlite.schedule import plain_steps

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


@pytest.mark.parametrize("kind", DRAWS)
def test_numbers_made_from_nothing_are_drawn_again(kind):
    expected, *found = steps_of(Drawing(DRAWS[kind]), (torch.randn(4, 6),))
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
