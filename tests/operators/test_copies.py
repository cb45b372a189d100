"""Copies that a captured graph can do without, and those that it can't."""

import pytest
import torch
from small_models import assert_same, step, twin
from step_lists import free_profile, recompute_everything, schedule_of
from thoroughness import often
from torch import nn

import monetlite
from monetlite.core.steps import plain_steps


class Layer(nn.Module):
    """A linear layer, what a function makes of it, and a buffer."""

    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(6, 6), function
        self.register_buffer("seen", torch.zeros(4, 6))

    def forward(self, x):
        return self.function(self, torch.relu(self.layer(x)))


def scheduled(model, x):
    """The model wrapped with a schedule that stores all, and with one that recomputes all it can."""
    graph = monetlite.trace(model, x)
    for steps in (plain_steps(graph), recompute_everything(graph)):
        yield monetlite.MONeTWrapper(twin(model), schedule_of(free_profile(graph), steps))


def remember(model, h):
    model.seen = h.clone().detach()
    return h * 2, h


COPIES = {
    "a view of a copy": lambda _, h: (h, h.clone().view(-1)),
    "a part of a copy": lambda _, h: (h, h.clone()[0]),
    "one of the parts of a copy": lambda _, h: (h, h.clone().chunk(2)[1]),
    "a detached copy": lambda _, h: (h, h.clone().detach()),
    "a copy of a view": lambda _, h: (h, h.view(-1).clone().view(4, 6)),
}


def train(model, x, change):
    outputs = model(x)
    with torch.no_grad():
        change(model, outputs).mul_(-1)
    outputs[0].square().sum().backward()
    return [*outputs, model.seen, *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("kind", often(COPIES, *list(COPIES)[:2]))
def test_a_returned_copy_can_be_changed_in_place(kind):
    model, x = Layer(COPIES[kind]), torch.randn(4, 6)
    expected = train(twin(model), x, lambda _, outputs: outputs[1])
    for wrapper in scheduled(model, x):
        found = train(wrapper, x, lambda _, outputs: outputs[1])
        assert all(map(torch.equal, found, expected))


def test_a_copy_in_a_buffer_can_be_changed_in_place():
    model, x = Layer(remember), torch.randn(4, 6)
    expected = train(twin(model), x, lambda changed, _: changed.seen)
    for wrapper in scheduled(model, x):
        assert all(map(torch.equal, train(wrapper, x, lambda changed, _: changed.seen), expected))


def phases(_, h):
    """Complex numbers among the arguments, whose conjugates the gradients take."""
    turned = torch.fft.fft(h) * 1j + (1 + 2j)
    return (torch.exp(1j * h) * turned * torch.polar(h.abs() + 1, h)).abs()


CONJUGATES = {
    "numbers": phases,
    "copied": lambda _, h: torch.view_as_real(torch.view_as_complex(h.view(4, 3, 2)).conj().clone()).tanh(),
    "multiplied": lambda _, h: (torch.view_as_complex(h.view(4, 3, 2)).conj() * h.view(4, 3, 2)[..., 0]).abs(),
    "resolved": lambda _, h: torch.view_as_real(torch.view_as_complex(h.view(4, 3, 2)).conj().resolve_conj()),
}


@pytest.mark.parametrize("kind", often(CONJUGATES, "numbers", "resolved"))
def test_a_copy_of_a_conjugate_is_made(kind):
    model, inputs = Layer(CONJUGATES[kind]), (torch.randn(4, 6),)
    for wrapper in scheduled(model, inputs):
        assert_same(step(wrapper, inputs), step(twin(model), inputs))


def test_what_autograd_copies_for_an_in_place_module_is_not_copied():
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU6(inplace=True), nn.Linear(6, 6))
    graph = monetlite.trace(model, torch.randn(4, 6))
    assert not any(operator.family == "clone" for operator in graph.operators)
