"""Gradients of planned steps that are differentiated again: penalties, forces, products with the Hessian."""

import contextlib
import gc
import random
import warnings
import weakref

import pytest
import torch
from small_models import twin
from step_lists import free_profile, recompute_at_random, schedule_of, with_random_implementations
from thoroughness import often
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

import monetlite
from monetlite.core.errors import ModelError
from monetlite.profiling.memory_records import peak_growth_bytes
from monetlite.tracing import graph_builder

AGAIN = r"create_graph=True\), for which nothing can be planned"


def critic():
    """Draws a mask, and changes running statistics and a spectral norm's vectors, which its output depends on."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        nn.BatchNorm2d(16),
        nn.SiLU(),
        nn.Dropout(0.2),
        nn.Flatten(),
        spectral_norm(nn.Linear(16 * 64, 8)),
        nn.Tanh(),
        nn.Linear(8, 1),
    )


def penalty_step(model, number, context=contextlib.nullcontext):
    """A step of WGAN-GP's critic: two planned runs, and one whose gradient is differentiated."""
    torch.manual_seed(number)
    real, made, share = torch.randn(8, 3, 16, 16), torch.randn(8, 3, 16, 16), torch.rand(8, 1, 1, 1)
    between = (share * real + (1 - share) * made).requires_grad_()

    def judged(x):
        with context():
            return model(x)

    loss = judged(made).mean() - judged(real).mean()
    (slope,) = torch.autograd.grad(judged(between).sum(), between, create_graph=True)
    loss = loss + 10 * ((slope.flatten(1).norm(2, 1) - 1) ** 2).mean()
    model.zero_grad()
    loss.backward()
    return loss.detach()


def assert_trained_alike(plain, planned, step, steps=3):
    """Compare loss, gradients, buffers and the generator's state after each step.

    Gradients of several runs, and of one that was repeated, are added in another order than plain training's.
    """
    for number in range(steps):
        torch.manual_seed(number)
        expected, state = step(plain, number), torch.get_rng_state()
        torch.manual_seed(number)
        found = step(planned, number)
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(found, expected)
        for mine, theirs in zip(planned.parameters(), plain.parameters(), strict=True):
            assert mine.grad is not None
            differ = torch.linalg.norm(mine.grad - theirs.grad)
            assert differ <= 1e-6 * torch.linalg.norm(theirs.grad)
        for mine, theirs in zip(planned.buffers(), plain.buffers(), strict=True):
            assert torch.equal(mine, theirs)


def test_a_gradient_penalty_is_plain_trainings():
    plain = critic()
    planned = monetlite.within(twin(plain), budget="100%", device="rtx-4090")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_trained_alike(plain, planned, penalty_step)
    assert sum("create_graph=True" in str(item.message) for item in caught) == 1
    assert planned.training


@pytest.mark.thorough
def test_a_gradient_penalty_under_autocast():
    plain = critic()
    planned = monetlite.within(twin(plain), budget="110%", device="rtx-4090")

    def step(model, number):
        return penalty_step(model, number, lambda: torch.autocast("cpu", torch.bfloat16))

    with pytest.warns(UserWarning, match=AGAIN):
        assert_trained_alike(plain, planned, step)


@pytest.mark.thorough
def test_later_runs_on_such_inputs_run_once():
    model = critic()
    planned = monetlite.within(model, budget="100%", device="rtx-4090")
    with pytest.warns(UserWarning, match=AGAIN):
        penalty_step(planned, 0)
    x = torch.randn(8, 3, 16, 16, requires_grad=True)
    before = model[1].num_batches_tracked.item()
    (slope,) = torch.autograd.grad(planned(x).sum(), x, create_graph=True)
    assert slope.grad_fn is not None
    assert type(planned(x).grad_fn).__name__ != "CompiledFunctionBackward"
    assert type(planned(x.detach()).grad_fn).__name__ == "CompiledFunctionBackward"
    assert model[1].num_batches_tracked.item() == before + 3


class Energy(nn.Module):
    """Forces are gradients of an energy."""

    def __init__(self, inside):
        super().__init__()
        self.potential = nn.Sequential(nn.Linear(3, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 1))
        self.inside = inside

    def forward(self, positions):
        energy = self.potential(positions[:, None] - positions[None]).sum()
        if not self.inside:
            return energy
        return energy, -torch.autograd.grad(energy, positions, create_graph=True)[0]


def force_step(model, number):
    torch.manual_seed(number)
    positions, wanted = torch.randn(6, 3, requires_grad=True), torch.randn(6, 3)
    if model.inside:
        energy, forces = model(positions)
    else:
        energy = model(positions)
        forces = -torch.autograd.grad(energy, positions, create_graph=True)[0]
    loss = energy * 1e-3 + (forces - wanted).square().mean()
    model.zero_grad(set_to_none=False)
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("inside", [False, True])
def test_forces_are_plain_trainings(inside):
    plain = Energy(inside)
    for parameter in plain.parameters():
        parameter.grad = torch.zeros_like(parameter)
    planned = monetlite.within(twin(plain), budget=10**7)
    for parameter in planned.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with pytest.warns(UserWarning, match=AGAIN):
        assert_trained_alike(plain, planned, force_step)


def test_a_product_with_the_hessian():
    plain = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    planned = monetlite.within(twin(plain), budget="100%")
    x = torch.randn(5, 16)
    for rtol in (1e-6, 0):
        found = []
        for model in (plain, planned):
            parameters = list(model.parameters())
            gradients = torch.autograd.grad(model(x).square().mean(), parameters, create_graph=True)
            found.append(torch.autograd.grad(sum(item.square().sum() for item in gradients), parameters))
        for theirs, mine in zip(*found, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=rtol, atol=rtol)


def test_what_the_run_began_with_must_not_have_changed():
    model = monetlite.within(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), budget="100%")
    x = torch.randn(4, 8, requires_grad=True)
    output = model(x).sum()
    with torch.no_grad():
        model[0].weight.mul_(2)
    with pytest.raises(ModelError, match="changed in place; ask for them before"):
        torch.autograd.grad(output, x, create_graph=True)


@pytest.mark.parametrize("backward", [False, True])
def test_nothing_is_held_longer_than_in_plain_training(backward):
    """A run that is not differentiated goes with its output, without Python's collection of cycles."""
    model = monetlite.within(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), budget="100%")
    model(torch.randn(4, 8)).sum().backward()
    x = torch.randn(4, 8)
    held = weakref.ref(x)
    gc.disable()
    try:
        loss = model(x).sum()
        if backward:
            loss.backward()
        else:
            del loss
        del x
        assert held() is None
    finally:
        gc.enable()


def test_it_is_refused_where_a_run_can_not_be_repeated():
    """Without a gradient of an input, nothing is kept of a run that draws."""
    model = monetlite.within(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), budget="100%")
    loss = model(torch.randn(4, 8)).square().sum()
    with pytest.warns(UserWarning, match=r"create_graph=True\. They can't be differentiated again.*wrapper\.model"):
        gradient, _ = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable|double backward|does not require grad"):
        gradient.sum().backward()


def perceptron():
    return nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2))


def test_gradients_are_differentiated_after_a_pass_that_kept_the_graph():
    """As GradNorm has it: the loss's own backward pass first, then the norms of its parts' gradients."""

    def step(model, number):
        del number
        shares = torch.ones(2, requires_grad=True)
        losses = model(torch.randn(64, 32)).square().mean(0)
        model.zero_grad()
        (shares * losses).sum().backward(retain_graph=True)
        weight = model[2].weight
        slopes = [
            torch.autograd.grad(part, weight, retain_graph=True, create_graph=True)[0] for part in shares * losses
        ]
        norms = torch.stack([item.norm() for item in slopes])
        (found,) = torch.autograd.grad((norms - norms.mean().detach()).abs().sum(), shares)
        return found

    plain = perceptron()
    planned = monetlite.MONeTWrapper(twin(plain), budget="100%", time_limit=0.3, wait=True)
    with pytest.warns(UserWarning, match=AGAIN):
        assert_trained_alike(plain, planned, step)


def test_runs_of_another_kind_stay_planned():
    """A critic's runs on what a generator made, beside one on real images whose gradient is penalised (R1)."""
    plain = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Softplus())))
    x, factor = torch.randn(1024, 64), torch.ones(64, requires_grad=True)

    def peak_bytes(model):
        return peak_growth_bytes(lambda: model(x * factor).square().mean().backward())

    planned = monetlite.within(twin(plain), budget="70%", time_limit=0.3, wait=True)
    planned(x * factor).square().mean().backward()
    before_bytes = peak_bytes(planned)
    assert before_bytes < 0.8 * peak_bytes(plain)
    given = x.clone().requires_grad_()
    with pytest.warns(UserWarning, match=AGAIN):
        (slope,) = torch.autograd.grad(planned(given).sum(), given, create_graph=True)
    slope.square().sum().backward()
    assert peak_bytes(planned) <= before_bytes


@pytest.mark.parametrize("delivered_bytes", [2**12, 2**20])
@pytest.mark.parametrize("seed", often(range(20), 5, 12))
def test_backward_passes_over_one_graph_are_those_of_graphs_of_their_own(seed, delivered_bytes, monkeypatch):
    """One after another or in a batch, where plans draw again and write over tensors, saved ones among them.

    Gradients come in several parts, or all at once.
    """
    monkeypatch.setattr(graph_builder, "MIN_DELIVERY_BYTES", delivered_bytes)
    model = nn.Sequential(
        *(nn.Linear(16, 64), nn.Hardtanh(), nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.3)),
        *(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Softmax(-1), nn.Linear(64, 2)),
    )
    graph, rng = monetlite.trace(model, torch.randn(8, 16)), random.Random(seed)
    steps = with_random_implementations(graph, recompute_at_random(graph, rng, share=0.1), rng)
    planned = monetlite.MONeTWrapper(model, schedule_of(free_profile(graph), steps))
    parameters, x, given = list(model.parameters()), torch.randn(8, 16), torch.randn(3, 8, 2)

    def output():
        torch.manual_seed(0)
        return planned(x)

    own = [torch.autograd.grad(output(), parameters, gradient) for gradient in given]
    same = output()
    in_turn = [torch.autograd.grad(same, parameters, gradient, retain_graph=True) for gradient in given]
    batch = torch.autograd.grad(output(), parameters, given, is_grads_batched=True)
    for found in (in_turn, zip(*batch, strict=True)):
        for mine, theirs in zip(found, own, strict=True):
            assert all(map(torch.equal, mine, theirs))


def test_an_expanded_gradient_in_a_batch():
    """AOTAutograd can't lay it out under vmap."""
    plain, x = perceptron(), torch.randn(64, 32)
    planned = monetlite.MONeTWrapper(twin(plain), budget="100%", time_limit=0.3, wait=True)
    found, expected = (
        torch.autograd.grad(model(x).sum(0), list(model.parameters()), torch.eye(2), is_grads_batched=True)
        for model in (planned, plain)
    )
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("batch", [False, True])
def test_an_expanded_gradient_is_differentiated_again(batch):
    """At first, too: one that requires a gradient itself, and a batch, which AOTAutograd can't lay out."""
    plain, x = perceptron(), torch.randn(8, 32, requires_grad=True)
    planned = monetlite.within(twin(plain), budget="100%", time_limit=0.3)
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for model in (planned, plain):
            y = model(x).sum(0)
            if batch:
                (slope,) = torch.autograd.grad(y, x, torch.eye(2), is_grads_batched=True, create_graph=True)
            else:
                (slope,) = torch.autograd.grad(y.sum().square(), x, create_graph=True)
            found.append(torch.autograd.grad(slope.square().sum(), x)[0])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
