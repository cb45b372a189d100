"""What people's models do that a captured step has to keep up with, or to refuse: found by trying many of them."""

import copy

import pytest
import torch
from small_models import assert_same, step, twin
from step_lists import free_profile, schedule_of
from thoroughness import often
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import monetlite
from monetlite.checking.trainee import default_loss
from monetlite.core.errors import BudgetError, ModelError, ScheduleMismatch
from monetlite.core.steps import plain_steps
from monetlite.profiling import meters


@pytest.fixture(autouse=True)
def quick_measurements(monkeypatch):
    monkeypatch.setattr(meters, "MIN_RUNS", 1)
    monkeypatch.setattr(meters, "MAX_RUNS", 1)


def wrapped(model, inputs):
    graph = monetlite.trace(model, inputs, outputs="all")
    return monetlite.MONeTWrapper(twin(model), schedule_of(free_profile(graph), plain_steps(graph)))


HOOKS = "register_forward_hook", "register_forward_pre_hook"


@pytest.mark.parametrize("kind", often(HOOKS, "register_forward_hook"))
def test_a_hook_that_comes_after_the_first_step_is_noticed(kind):
    model, inputs = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), (torch.randn(5, 8),)
    wrapper = wrapped(model, inputs)
    assert_same(step(wrapper, inputs), step(model, inputs))
    tripled = {
        "register_forward_hook": lambda _module, _inputs, output: output * 3,
        "register_forward_pre_hook": lambda _module, given: (given[0] * 3,),
    }[kind]
    for module in (wrapper, model):
        getattr(module[2], kind)(tripled)
    with pytest.raises(ScheduleMismatch, match=r"10 operators.*this model has 12"):
        step(wrapper, inputs)
    solving = monetlite.MONeTWrapper(twin(model), budget="300%", time_limit=0.5)
    assert_same(step(solving, inputs), step(model, inputs))


@pytest.mark.parametrize("norm", often(["running", "batch", "frozen"], "running", "frozen"))
def test_batch_norm_of_a_transposed_tensor(norm):
    """Its result is in order on a CPU, so that what views it can't go by the input's strides."""

    class Sequences(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
            self.norm = nn.BatchNorm1d(8, track_running_stats=norm != "batch")

        def forward(self, x):
            return self.last(self.norm(self.first(x).transpose(1, 2)).transpose(1, 2))

    model, inputs = Sequences(), (torch.randn(4, 5, 6, requires_grad=True),)
    if norm == "frozen":
        model.norm.eval()
    wrapper = wrapped(model, inputs)
    for _ in range(2):
        assert_same(step(wrapper, inputs), step(model, inputs))


@pytest.mark.parametrize("norm", [nn.LayerNorm(32), nn.GroupNorm(4, 32)], ids=["layer", "group"])
def test_normalisations_of_16_bits_are_measured(norm):
    """Their statistics are of 32, beside weights of 32."""
    model, x = nn.Sequential(nn.Linear(16, 32), norm, nn.Linear(32, 8)), torch.randn(64, 16)
    with torch.autocast("cpu", torch.bfloat16):
        wrapper = monetlite.MONeTWrapper(copy.deepcopy(model), budget="100%", time_limit=0.5)
        for module in (wrapper, model):
            module(x).float().square().mean().backward()
    for ours, plain in zip(wrapper.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours.grad, plain.grad)


OF_PROBABILITIES = {
    "binary cross-entropy": lambda y: F.binary_cross_entropy(torch.sigmoid(y), torch.full_like(y, 0.5)),
    "bernoulli": lambda y: y * torch.bernoulli(torch.full_like(y[:, :1], 0.5)),
    "multinomial": lambda y: y * torch.multinomial(torch.softmax(y, 1), 1).float(),
    "poisson": lambda y: y + torch.poisson(y.detach().exp()),
    "normal": lambda y: y + torch.normal(y.detach(), y.detach().abs()),
    "log-determinant": lambda y: torch.logdet(y.t() @ y + torch.eye(y.shape[1])),
}


@pytest.mark.parametrize("function", OF_PROBABILITIES.values(), ids=OF_PROBABILITIES)
def test_operators_that_take_probabilities_and_the_like_are_measured(function):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x):
            return function(self.layer(x))

    graph = monetlite.trace(Net(), torch.randn(8, 6))
    profile = monetlite.profile(graph, "cpu")
    assert all(cost.latency_ms >= 0 for costs in profile.costs for cost in costs)


@pytest.mark.thorough
def test_hidden_states_of_a_transformers_model():
    """Collected by hooks that transformers puts on at the first call, under a lock."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        output_hidden_states=True,
    )
    model = transformers.BertForMaskedLM(config).train()
    tokens = torch.randint(0, 50, (2, 8))
    inputs = {"input_ids": tokens, "labels": tokens}
    fresh = twin(model)
    wrapper = monetlite.MONeTWrapper(model, budget="100%", device="rtx-4090", time_limit=0.3, outputs="all")
    assert_same(step(wrapper, inputs), step(fresh, inputs))
    assert len(wrapper(**inputs).hidden_states) == 2


def test_lazy_modules_are_refused_before_they_draw():
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU())
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with pytest.raises(ModelError, match=r"0\.weight is not initialized yet: run the model once"):
        monetlite.trace(model, torch.randn(2, 3).zero_())
    torch.set_rng_state(before)
    with pytest.raises(ModelError, match="not initialized"):
        monetlite.MONeTWrapper(model, budget="100%", time_limit=0.5)(torch.zeros(2, 3))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_that_cannot_be_copied_is_verified_with_an_error_that_says_so():
    model, x = nn.utils.weight_norm(nn.Linear(4, 4)), torch.randn(3, 4)
    model(x)
    graph = monetlite.trace(model, x)
    schedule = schedule_of(free_profile(graph), plain_steps(graph))
    with pytest.raises(ModelError, match=r"can't be copied.*parametrizations"):
        monetlite.verify(model, schedule, x)


def test_a_step_of_large_outputs_takes_what_is_predicted():
    """Verified by a loss that takes nothing beside their gradient."""
    model, x = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4000)), torch.randn(256, 16)
    schedule = monetlite.optimize(model, x, "100%", time_limit=0.5)
    report = monetlite.verify(model, schedule, x, repeats=1)
    assert report.peak_bytes <= schedule.budget_bytes
    assert report.largest_difference == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_default_loss_is_the_mean_square(dtype):
    output = torch.randn(7, 5, dtype=dtype, requires_grad=True)
    found = default_loss((output, torch.ones(3)))
    expected = output.detach().float().requires_grad_()
    expected.square().mean().backward()
    found.backward()
    torch.testing.assert_close(found.detach(), expected.detach().square().mean(), rtol=1e-6, atol=0)
    torch.testing.assert_close(output.grad, expected.grad.to(dtype))
    with pytest.raises(ModelError, match="nothing to train"):
        default_loss({"logits": torch.ones(3)})


def test_what_wrap_and_verify_take(tmp_path):
    model, x = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2)), torch.randn(16, 6)
    graph = monetlite.trace(model, x)
    schedule_of(free_profile(graph), plain_steps(graph)).save(tmp_path / "s.yaml")
    assert monetlite.verify(model, str(tmp_path / "s.yaml"), x, repeats=1).largest_difference == 0
    with pytest.raises(ModelError, match="take at least 1"):
        monetlite.verify(model, tmp_path / "s.yaml", x, repeats=0)
    with pytest.raises(ModelError, match=r"give a budget by its name: budget='6GB'"):
        monetlite.MONeTWrapper(model, "6GB")
    with pytest.raises(BudgetError):
        monetlite.MONeTWrapper(model, budget="much")
    assert list(monetlite.sweep(free_profile(graph), "100%", time_limit=0.5)) == ["100%"]
    with pytest.raises(ModelError, match="time_limit"):
        monetlite.solve(free_profile(graph), "100%", time_limit=float("nan"))


@pytest.mark.parametrize("before", [0, 2])
def test_an_exception_of_the_model_reaches_the_loop(before):
    """Also where it comes in a step that would be captured anew: a loop may catch it, and go on."""

    class Skip(Exception):
        pass

    class Skips(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))
            self.skip = False

        def forward(self, batch):
            found = nn.functional.dropout(self.body(batch["x"]))
            if self.skip:
                raise Skip("on purpose")
            return found

    trained, x = monetlite.within(Skips(), budget="100%", time_limit=0.5), torch.randn(16, 6)
    for _ in range(before):
        trained({"x": x}).sum().backward()
    with pytest.raises(KeyError, match="x"):
        trained({"y": x})
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes"):
        trained({"x": x[:, 1:]})
    trained.skip = True
    states = []
    for owner in (trained, copy.deepcopy(trained)):  # a copy has no plan
        torch.manual_seed(3)
        with pytest.raises(Skip, match="on purpose"):
            owner({"x": x})
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    trained.skip = False
    trained({"x": x}).sum().backward()


def test_a_gradient_that_lies_otherwise_than_it_was_captured():
    """The gradient of softplus, of operands in two layouts, has the one in a capture and the other when it runs."""

    class Split(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(16, 8)

        def forward(self, x):
            first, second = self.body(x).view(*x.shape[:2], 2, 4).split([2, 2], dim=3)
            first, second = first.reshape(*x.shape[:2], 4).sigmoid(), F.softplus(second.reshape(*x.shape[:2], 4))
            return sum(item.transpose(1, 2).contiguous().cumsum(-1).pow(2).mean() for item in (first, second))

    model, x = Split(), torch.randn(2, 12, 16)
    trained = monetlite.within(twin(model), budget="110%", device="cpu", time_limit=0.5)
    assert_same(step(trained, (x,)), step(model, (x,)))


class Asks(nn.Module):
    """Leaves a step out where it is compiled, and calls a function of torch that asks, too."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        hidden = self.layer(x)
        if not torch.compiler.is_compiling():
            hidden = hidden / hidden.detach().norm()
        return checkpoint(torch.sin, hidden, use_reentrant=False)


def test_a_model_that_asks_whether_it_is_compiled_is_told_what_plain_training_is():
    model, inputs = Asks(), (torch.randn(5, 8),)
    assert_same(step(wrapped(model, inputs), inputs), step(model, inputs))


class Adapted(nn.Module):
    """A frozen embedding, whose output a hook asks a gradient of, before checkpointed layers, as peft has it."""

    def __init__(self, ask):
        super().__init__()
        self.embedding, self.last = nn.Embedding(11, 8).requires_grad_(False), nn.Linear(8, 11)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)) for _ in range(2))
        self.embedding.register_forward_hook(lambda _module, _inputs, output: ask(output))

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False).relu()
        return self.last(hidden)


def by_attribute(tensor):
    tensor.requires_grad = True


@pytest.mark.parametrize("ask", often([lambda tensor: tensor.requires_grad_(True), by_attribute], by_attribute))
def test_a_gradient_that_is_asked_for_within_the_model_takes_no_piece(ask):
    model, inputs = Adapted(ask), (torch.randint(0, 11, (3, 5)),)
    assert_same(step(wrapped(model, inputs), inputs), step(model, inputs))


def test_a_gradient_of_what_a_model_returns_can_be_asked_for_in_it():
    class Places(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))

        def forward(self, x):
            places = (x * 2).requires_grad_()
            return self.layers(places).sum(), places

    plain, x, found = Places(), torch.randn(5, 3), []
    for model in (plain, monetlite.within(twin(plain), budget="200%")):
        energy, places = model(x)
        found.append(torch.autograd.grad(energy, places)[0])
    assert torch.equal(*found)
