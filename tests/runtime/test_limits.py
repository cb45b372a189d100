"""What can't be served is refused with an error; nothing is silently different."""

import pytest
import torch
from step_lists import free_profile, recompute_everything, schedule_of
from torch import nn
from torch.autograd import forward_ad

import monetlite
from monetlite.core.errors import ModelError, TraceError
from monetlite.tracing import capture


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 2))


def wrap(network, x):
    graph = monetlite.trace(network, x)
    return monetlite.MONeTWrapper(network, schedule_of(free_profile(graph), recompute_everything(graph)))


def test_forward_hooks_see_what_plain_training_has():
    seen = {}
    x = torch.randn(3, 6)
    for name in ("plain", "wrapped"):
        network = model()
        kept = seen[name] = []
        for layer in network:
            layer.register_forward_hook(lambda _, __, output, kept=kept: kept.append(output.detach()))
        (wrap(network, x) if name == "wrapped" else network)(x).sum().backward()
    found, expected = seen["wrapped"][-5:], seen["plain"]
    assert len(expected) == 5
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_what_a_model_asserts_of_its_tensors_is_checked():
    class Checked(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x).tanh()
                # What `assert` becomes in a capture; pytest rewrites those of its own modules.
                torch._assert_async(torch.isfinite(x).all(), "not finite")
            return x

    network, x = Checked(), torch.randn(3, 6)
    wrapper = wrap(network, x)
    wrapper(x).sum().backward()
    with pytest.raises(RuntimeError, match="not finite"):
        wrapper(x * torch.nan)
    schedule = monetlite.optimize(network, x, budget="100%", device="rtx-4090", time_limit=1)
    with pytest.raises(RuntimeError, match="not finite"):
        monetlite.MONeTWrapper(network, schedule)(x * torch.nan)


def test_a_forward_hook_that_changes_the_output():
    x = torch.randn(3, 6)
    gradients = []
    for wrapped in (False, True):
        network = model()
        network[2].register_forward_hook(lambda _, __, output: output * 2)
        (wrap(network, x) if wrapped else network)(x).sum().backward()
        gradients.append([parameter.grad for parameter in network.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


def test_backward_hooks_of_modules():
    """They are called with plain training's gradients, or refused."""
    x = torch.randn(3, 6)
    expected = []
    plain = model()
    plain[2].register_full_backward_hook(lambda _, into, out: expected.append((into[0], out[0])))
    plain(x).sum().backward()
    found = []
    network = model()
    network[2].register_full_backward_hook(lambda _, into, out: found.append((into[0], out[0])))
    try:
        wrapped = wrap(network, x)
        found.clear()
        wrapped(x).sum().backward()
    except monetlite.MonetliteError:
        return
    for one, other in zip(found, expected, strict=True):
        assert all(map(torch.equal, one, other))


def test_functional_call():
    """With other parameters than its own, a wrapper is either plain training or an error."""
    network, x = model(), torch.randn(3, 6)
    wrapped = wrap(network, x)
    other = {name: (item.detach() * 2).requires_grad_() for name, item in network.named_parameters()}
    expected = torch.autograd.grad(torch.func.functional_call(network, other, (x,)).sum(), list(other.values()))
    found = torch.autograd.grad(torch.func.functional_call(wrapped, other, (x,)).sum(), list(other.values()))
    for one, two in zip(found, expected, strict=True):
        assert torch.equal(one, two)


def test_forward_mode_is_refused():
    wrapped = monetlite.MONeTWrapper(nn.Linear(4, 2), budget="1GB")
    with forward_ad.dual_level(), pytest.raises(ModelError, match="forward-mode AD"):
        wrapped(forward_ad.make_dual(torch.ones(2, 4), torch.ones(2, 4)))


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap, torch.func.jacrev])
def test_function_transforms_are_refused(transform):
    network, x = model(), torch.randn(3, 6)
    wrapped = wrap(network, x)
    with pytest.raises(monetlite.MonetliteError, match=r"torch\.func"):
        transform(lambda item: wrapped(item).sum())(x)


class Annealed(nn.Module):
    """Numbers that change from step to step: a counter, an attribute, an argument."""

    def __init__(self, counts=False):
        super().__init__()
        self.layer, self.dropout, self.counts, self.steps = nn.Linear(6, 6), nn.Dropout(0.1), counts, 0

    def forward(self, x, scale=1.0):
        if self.counts:
            self.steps += 1
            x = x * self.steps
        return self.dropout(self.layer(x)).tanh() * scale


@pytest.mark.thorough
@torch._dynamo.config.patch(recompile_limit=3)
def test_numbers_may_change_more_often_than_torchs_own_limit_of_recompilations():
    """Also where inputs are of a layout seen before, and Dynamo finds the change by itself."""
    network, x = Annealed(counts=True), torch.randn(3, 6)
    wrapper = wrap(network, x)
    for number in range(5):
        torch.manual_seed(1)
        found = wrapper(x)
        torch.manual_seed(1)
        assert torch.equal(found, network.dropout(network.layer(x * (number + 1))).tanh())
        assert network.steps == number + 1
    assert torch._dynamo.config.recompile_limit == 3


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda network, number: (), r"model\.steps"),
        (lambda network, number: setattr(network.dropout, "p", 0.1 + number / 10), r"\bp\b"),
        (lambda network, number: (0.5 + number,), r"args\[1\]"),
    ],
    ids=["counter", "attribute", "argument"],
)
def test_numbers_that_change_at_every_step(monkeypatch, change, named):
    monkeypatch.setattr(capture, "MAX_PROGRAMS", 2)
    network, x = Annealed(counts="steps" in named), torch.randn(3, 6)
    wrapper = wrap(network, (x, 1.0))
    for number in range(2):
        wrapper(x, *(change(network, number) or ())).sum().backward()
    told = rf"for 2 different steps .*the last one is for .*{named}.*register_buffer"
    with pytest.warns(UserWarning, match=told):
        wrapper(x, *(change(network, 2) or ())).sum().backward()
    for number in (3, 4):  # training goes on
        given = change(network, number) or ()
        assert torch.isfinite(wrapper(x, *given)).all()


class Collects(nn.Module):
    """Keeps something of each step in a list."""

    def __init__(self):
        super().__init__()
        self.layer, self.kept = nn.Linear(6, 6), []

    def forward(self, x):
        found = self.layer(x)
        self.kept.append(found.detach().mean())
        return found


def test_a_list_that_grows_at_every_step(monkeypatch):
    monkeypatch.setattr(capture, "MAX_PROGRAMS", 2)
    network, x = Collects(), torch.randn(3, 6)
    wrapper = wrap(network, x)
    network.kept.clear()
    for _ in range(2):
        wrapper(x).sum().backward()
    told = r"the last one is for len\(model\.kept\).*Clear it before each step.*torch\.compiler\.disable"
    with pytest.warns(UserWarning, match=told):
        wrapper(x).sum().backward()
    assert len(network.kept) == 3


class AssignsData(nn.Module):
    """An update by momentum of weights that the step has read before."""

    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(64, 64), nn.Linear(64, 64)
        self.key.requires_grad_(False)

    def forward(self, x):
        keys = self.key(x).detach().mT
        for q, k in zip(self.query.parameters(), self.key.parameters(), strict=True):
            k.data = k.data * 0.9 + q.data * 0.1
        return self.query(x) @ keys


def test_data_that_is_assigned_is_named_and_what_to_do():
    model, x = AssignsData(), torch.randn(256, 64)
    planned = monetlite.within(model, budget="50%", device="rtx-3090", time_limit=1)
    for _ in range(2):
        planned(x).sum().backward()
    with pytest.raises(TraceError, match=r"assigns to \.data .*k\.data\.mul_\(m\)"):
        planned(x)
    with pytest.raises(TraceError, match=r"can't be captured in one graph: the forward pass assigns to \.data"):
        monetlite.optimize(model, (x,), budget="50%", device="rtx-3090")
