"""Gradients reach autograd as they become ready, and everything people do with them still works."""

import itertools
import warnings

import pytest
import torch
from small_models import TwoInputsTwoOutputs, assert_same, step, twin
from step_lists import free_profile, recompute_everything, schedule_of
from thoroughness import often
from torch import nn

import monetlite
from monetlite.core.errors import ModelError, TraceError
from monetlite.core.graph import DELIVERY
from monetlite.core.simulate import simulate
from monetlite.core.steps import plain_steps
from monetlite.profiling.memory_records import peak_growth_bytes
from monetlite.runtime import gradient_delivery
from monetlite.tracing import graph_builder

WIDTH, LAYERS = 512, 4


def deep() -> nn.Module:
    """Weights of 1 MiB each, so that every one is delivered as soon as it is there."""
    layers = [module for _ in range(LAYERS) for module in (nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU())]
    return nn.Sequential(*layers)


def wrapped(model, inputs, steps=plain_steps):
    graph = monetlite.trace(model, inputs)
    return monetlite.MONeTWrapper(model, schedule_of(free_profile(graph), steps(graph)))


def losses(model, x):
    return model(x).square().mean()


@pytest.mark.parametrize("steps", [plain_steps, recompute_everything])
def test_each_gradient_is_there_before_the_next_is_computed(steps):
    model, x = deep(), torch.randn(4, WIDTH)
    trained = wrapped(model, x, steps)
    seen = []

    def hook(parameter):
        seen.append(sum(item.grad is not None for item in model.parameters()))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    losses(trained, x).backward()
    assert seen == list(range(1, LAYERS + 1))


@pytest.mark.parametrize("steps", often([plain_steps, recompute_everything], recompute_everything))
def test_an_optimizer_that_steps_in_the_backward_pass_never_holds_all_gradients(steps):
    model, x = deep(), torch.randn(4, WIDTH)
    other = twin(model)
    trained = wrapped(model, x, steps)
    for owner in (model, other):
        for parameter in owner.parameters():

            def update(parameter):
                with torch.no_grad():
                    parameter.sub_(parameter.grad, alpha=0.1)
                parameter.grad = None

            parameter.register_post_accumulate_grad_hook(update)
    peaks = {}
    for name, owner in (("plain", other), ("trained", trained)):
        losses(owner, x).backward()
        peaks[name] = peak_growth_bytes(lambda owner=owner: losses(owner, x).backward())
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert peaks["trained"] < 3 * WIDTH * WIDTH * 4, "the gradients of four layers would be four of these"


def test_gradients_asked_for_by_name():
    model, x = deep(), torch.randn(4, WIDTH, requires_grad=True)
    trained = wrapped(model, x)
    parameters = list(model.parameters())
    for wanted in ([parameters[-1]], [parameters[0], x], [x], parameters):
        expected = torch.autograd.grad(losses(model, x), wanted)
        found = torch.autograd.grad(losses(trained, x), wanted)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)
    assert all(parameter.grad is None for parameter in parameters)


@pytest.mark.parametrize(
    ("before", "steps"),
    often(
        itertools.product([0, 2], [plain_steps, recompute_everything]), (0, recompute_everything), (2, plain_steps)
    ),
)
def test_backward_twice_through_one_graph(before, steps):
    """Also after steps that went back once, for which AOTAutograd compiles the backward program."""
    model, x = deep(), torch.randn(4, WIDTH)
    other = twin(model)
    trained = wrapped(model, x, steps)
    for owner in (trained, other):
        for _ in range(before):
            losses(owner, x).backward()
        loss = losses(owner, x)
        loss.backward(retain_graph=True)
        loss.backward()
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def test_two_forward_passes_before_one_backward_pass():
    model, first, second = deep(), torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    other = twin(model)
    trained = wrapped(model, first, recompute_everything)
    for owner in (trained, other):
        (losses(owner, first) + 3 * losses(owner, second)).backward()
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-6, atol=0)


def test_outputs_of_which_one_is_not_used():
    model, inputs = TwoInputsTwoOutputs(), (torch.randint(0, 11, (3, 6)), torch.randn(3, 8, requires_grad=True))
    expected = step(twin(model), inputs)
    assert_same(step(wrapped(twin(model), inputs, recompute_everything), inputs), expected)


class Shares(nn.Module):
    """Changes a tensor that has a gradient, or returns a view of one beside its result."""

    def __init__(self, how) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.positions = nn.Parameter(torch.randn(1, 20, 8))
        self.how = how

    def forward(self, x):
        return self.how(self, x)

    def body(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x + self.positions[0, : len(x)]


def clamped(model, x):
    with torch.no_grad():
        model.layers[0].weight.clamp_(-0.1, 0.1)
    return model.body(x)


def changed_after_use(model, x):
    y = model.body(x * 2)
    x.mul_(y)
    return y


SHARING = {
    "input changed": lambda model, x: model.body(torch.relu_(x)),
    "input changed after its use": changed_after_use,
    "input changed outside of autograd": lambda model, x: (x.detach().mul_(2), model.body(x))[1],
    "weight changed": clamped,
    "view of the input": lambda model, x: (model.body(x), x.flatten()),
    "part of the input": lambda model, x: (model.body(x), x[1:], x[:2].t()),
    "part of a weight": lambda model, x: (model.body(x), model.layers[0].weight[:5]),
    "weight transposed": lambda model, x: (model.body(x), model.layers[2].weight.t()),
    "positions": lambda model, x: (model.body(x), model.positions[:, : len(x)]),
    "the input and a weight": lambda model, x: (x, model.body(x), model.layers[1].weight),
    "input changed and returned": lambda model, x: (model.body(x.mul_(2)), x.view(-1)),
}


LIKE_OTHERS = {"view of the input", "part of a weight", "weight transposed"}
"""Views that others stand for, of another part or another order."""


def two_steps(model, x):
    """What two steps leave behind: outputs, gradients, and what hooks saw."""
    seen = []
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, name=name: seen.append((name, gradient.clone())))
        parameter.register_post_accumulate_grad_hook(lambda item, name=name: seen.append((name, item.grad.clone())))
    kept = []
    for used in (False, True):
        leaf = x.clone().requires_grad_()
        given = leaf * 1.5
        given.register_hook(lambda gradient: seen.append(("given", gradient.clone())))
        outputs = model(given)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        weighed = sum((number + 1) * output.square().mean() for number, output in enumerate(outputs))
        (weighed + given.sin().sum() if used else weighed).backward()
        kept += [*outputs, given, leaf.grad]
    kept += [parameter.grad for parameter in model.parameters()]
    return kept, dict(seen), len(seen)


@pytest.fixture
def every_gradient_delivered(monkeypatch):
    monkeypatch.setattr(graph_builder, "MIN_DELIVERY_BYTES", 0)


@pytest.mark.usefixtures("every_gradient_delivered")
@pytest.mark.parametrize("how", often(SHARING, *(SHARING.keys() - LIKE_OTHERS)))
def test_tensors_that_the_step_changes_or_returns_views_of(how):
    model, x = Shares(SHARING[how]), torch.randn(4, 8)
    found = two_steps(wrapped(twin(model), x.clone().requires_grad_() * 1.0, recompute_everything), x)
    expected = two_steps(twin(model), x)
    for mine, theirs in zip(found[0], expected[0], strict=True):
        assert torch.equal(mine, theirs)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert torch.equal(found[1][name], gradient), name
    assert found[2] == expected[2]


@pytest.mark.usefixtures("every_gradient_delivered")
def test_an_argument_that_is_changed_and_shares_its_storage_with_another():
    """AOTAutograd then calls the program with other tensors than the step is called with."""

    class Shifted(Shares):
        def forward(self, x, whole, part):
            y = self.body(x)
            whole.add_(1)
            return y * part.sum()

    model, x = Shifted(None), torch.randn(4, 8, requires_grad=True)
    gradients = []
    for owner in (model, twin(model)):
        whole = torch.zeros(6)
        inputs = (x, whole, whole[:3])
        trained = owner if owner is model else wrapped(owner, inputs)
        trained(*inputs).square().sum().backward()
        gradients.append([x.grad, whole, *(parameter.grad for parameter in owner.parameters())])
        x.grad = None
    for mine, theirs in zip(*gradients, strict=True):
        assert torch.equal(mine, theirs)


class AddsPositions(nn.Module):
    """Adds parameters of which one is seen through a view: their gradients are one tensor and a view of it."""

    def __init__(self):
        super().__init__()
        self.rows, self.more, self.head = (
            nn.Parameter(torch.randn(6, 8)),
            nn.Parameter(torch.randn(1, 6, 8)),
            deep(),
        )

    def forward(self, x):
        return (x + (self.rows.unsqueeze(0) + self.more)).flatten(1).matmul(self.head[0].weight[:48, :9])


@pytest.mark.parametrize("steps", [plain_steps, recompute_everything])
def test_gradients_share_no_memory(steps):
    """They may be changed in place: by clipping, or when those of another step are added."""
    model, x = AddsPositions(), torch.randn(3, 6, 8)
    plain, trained = twin(model), wrapped(model, x, steps)
    for one in (plain, trained):
        for _ in range(2):
            losses(one, x).backward()
        nn.utils.clip_grad_norm_([one.rows, one.more], 0.01)
    assert torch.equal(plain.rows.grad, model.rows.grad)
    assert torch.equal(plain.more.grad, model.more.grad)


class Observe(torch.autograd.Function):
    """Notes how large gradients are, as delayed scaling does."""

    @staticmethod
    def forward(ctx, x, largest):
        ctx.largest = largest
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.largest.add_(gradient.abs().max())
        return gradient / (1 + ctx.largest), None


class Observed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x):
        return self.last(Observe.apply(self.first(x).relu(), self.largest)).tanh()


def test_a_backward_pass_that_changes_a_buffer_is_not_captured():
    model, x = Observed(), torch.randn(4, 8)
    plain, trained = twin(model), monetlite.MONeTWrapper(model, budget="1GB", time_limit=0.3)
    with pytest.raises(TraceError, match=r"changes a tensor of shape \(\) in its backward pass"):
        monetlite.trace(model, x)
    for _ in range(2):
        losses(plain, x).backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            losses(trained, x).backward()
    assert torch.equal(plain.largest, model.largest)
    assert torch.equal(plain.first.weight.grad, model.first.weight.grad)


@pytest.mark.usefixtures("every_gradient_delivered")
def test_one_delivery_where_a_view_of_a_weight_is_returned():
    def deliveries(how):
        graph = monetlite.trace(Shares(how), torch.randn(4, 8))
        return sum(operator.family == DELIVERY for operator in graph.operators)

    assert deliveries(SHARING["part of a weight"]) == 1
    assert deliveries(lambda model, x: (model.body(x), x.flatten())) > 1, "the input has no gradient"


@pytest.mark.usefixtures("every_gradient_delivered")
def test_a_gradient_that_is_not_the_programs_is_an_error(monkeypatch):
    """Should torch ever send one through the chain."""
    through = gradient_delivery._through_chain

    def add_outside(arguments, order):
        passed = through(arguments, order)
        outside.append(sum(item.sum() for item in passed if item.requires_grad))
        return passed

    outside = []
    monkeypatch.setattr(gradient_delivery, "_through_chain", add_outside)
    model, x = deep(), torch.randn(4, WIDTH)
    loss = losses(wrapped(model, x), x) + outside[0]
    with pytest.raises(ModelError, match="a gradient that is not the compiled step's"):
        loss.backward()


def test_gradients_that_are_differentiated_again_pass_through_the_chain():
    model, x = deep(), torch.randn(4, WIDTH, requires_grad=True)
    found = []
    for owner in (twin(model), wrapped(model, x)):
        (gradient,) = torch.autograd.grad(losses(owner, x), x, create_graph=True)
        found.append(torch.autograd.grad(gradient.square().sum(), list(owner.parameters())))
    for expected, again in zip(*found, strict=True):
        torch.testing.assert_close(again, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


def test_what_the_chain_delivers_can_not_be_differentiated_where_no_run_can_be_repeated():
    model, x = nn.Sequential(deep(), nn.Dropout(0.5)), torch.randn(4, WIDTH)
    with pytest.warns(UserWarning, match=r"create_graph=True\. They can't be differentiated again"):
        gradients = torch.autograd.grad(losses(wrapped(model, x), x), list(model.parameters()), create_graph=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable|double backward|does not require grad"):
        gradients[0].sum().backward()


def test_an_error_in_the_backward_pass_leaves_the_wrapper_as_it_was():
    model, x = deep(), torch.randn(4, WIDTH)
    trained = wrapped(model, x)

    def stop(_):
        raise ValueError("stop here")

    handle = list(model.parameters())[3].register_hook(stop)
    with pytest.raises(ValueError, match="stop here"):
        losses(trained, x).backward()
    handle.remove()
    model.zero_grad()
    expected = torch.autograd.grad(losses(model, x), list(model.parameters()))
    losses(trained, x).backward()
    for mine, theirs in zip(model.parameters(), expected, strict=True):
        assert torch.equal(mine.grad, theirs)


def test_accumulation_is_predicted():
    """Gradients that are there already are counted once, and a step's own only until they are added to them."""
    model, x = deep(), torch.randn(32, WIDTH)
    graph = monetlite.trace(model, x)
    profile = monetlite.profile(graph, "rtx-4090", accumulate=True)
    size = WIDTH * WIDTH * 4
    assert profile.graph.resident.gradients == LAYERS * size
    once = simulate(monetlite.profile(graph, "rtx-4090"), plain_steps(graph)).peak_bytes
    assert once < simulate(profile, plain_steps(graph)).peak_bytes < once + LAYERS * size
    profile = free_profile(profile.graph)
    schedule = schedule_of(profile, recompute_everything(graph))
    trained = monetlite.MONeTWrapper(model, schedule)

    def train():
        output = trained(x)
        output.square().mean().backward()
        return output

    train()
    measured = graph.resident.total + LAYERS * size + peak_growth_bytes(train)
    assert abs(measured - simulate(profile, schedule).peak_bytes) < 0.02 * measured


def test_deliveries_are_as_many_as_pay():
    graph = monetlite.trace(deep(), torch.randn(4, WIDTH))
    assert sum(operator.family == DELIVERY for operator in graph.operators) == LAYERS
    small = nn.Sequential(*[nn.Linear(8, 8) for _ in range(20)])
    graph = monetlite.trace(small, torch.randn(4, 8))
    assert sum(operator.family == DELIVERY for operator in graph.operators) == 1


def test_what_a_step_saves_are_plain_tensors():
    """A fake tensor of the capture among them would be read through fake-tensor mode, a millisecond each step."""
    model, x = deep(), torch.randn(4, WIDTH)
    trained = wrapped(model, x, recompute_everything)
    saved = []
    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda tensor: tensor):
            losses(trained, x)
    assert saved
    assert {type(tensor) for tensor in saved} <= {torch.Tensor, nn.Parameter}


class InFloat32(nn.Module):
    """Products that autocast leaves alone, each delivered as soon as it is there."""

    def __init__(self):
        super().__init__()
        self.layers = deep()

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return self.layers(x.float())


@pytest.mark.parametrize("steps", often([plain_steps, recompute_everything], recompute_everything))
def test_autocast_around_the_backward_pass_converts_nothing_in_re_runs(steps):
    model, x = InFloat32(), torch.randn(4, WIDTH)
    plain = twin(model)
    with torch.autocast("cpu", torch.bfloat16):
        losses(wrapped(model, x, steps), x).backward()
        loss = losses(plain, x)
    loss.backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_anomaly_detection_finds_no_nan_in_what_stands_for_gradients():
    """With deterministic algorithms, torch fills new memory with NaN."""
    model, x = deep(), torch.randn(4, WIDTH)
    trained = wrapped(model, x)
    torch.use_deterministic_algorithms(True)
    try:
        losses(trained, x).backward()
        with torch.autograd.detect_anomaly(check_nan=True):
            losses(trained, x).backward()
    finally:
        torch.use_deterministic_algorithms(False)


def test_what_stands_for_gradients_is_filled_in_no_step():
    """Each filling would be a launch on a GPU, of which a small step has too many."""
    trained, x = wrapped(deep(), torch.randn(4, WIDTH)), torch.randn(4, WIDTH)
    losses(trained, x).backward()
    loss = losses(trained, x)
    with torch.autograd.profiler.profile() as profiler:
        loss.backward()
    called = [event.name for event in profiler.function_events]
    assert called.count("aten::mm") == 2 * LAYERS - 1
    assert "aten::zero_" not in called
