"""The optimizer's step in the backward pass: plain training's weights, and gradients that never add up."""

import copy
import io
import warnings
from dataclasses import replace

import pytest
import torch
from small_models import SmallCNN, twin
from step_lists import free_profile, live_before, recompute_everything, schedule_of
from thoroughness import often
from torch import nn
from torch.nn.utils import parametrizations

import monetlite
from monetlite.core.errors import ModelError
from monetlite.core.graph import DELIVERY
from monetlite.core.simulate import simulate
from monetlite.core.steps import plain_steps
from monetlite.profiling.memory_records import peak_growth_bytes
from monetlite.profiling.step_additions import with_step_in_backward
from monetlite.runtime.backward_updates import BackwardUpdates, refuse_without_updates

COUNTED = {"optimizer": "adamw", "step_in_backward": True}


def gpt2():
    import transformers

    config = transformers.GPT2Config(
        n_layer=2, n_embd=192, n_head=4, vocab_size=2000, n_positions=64, bos_token_id=0, eos_token_id=0
    )
    ids = torch.randint(0, 2000, (4, 64))
    return transformers.GPT2LMHeadModel(config).train(), {"input_ids": ids, "labels": ids}


def cnn():
    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = SmallCNN(160)

        def forward(self, x, labels):
            return {"loss": nn.functional.cross_entropy(self.network(x), labels)}

    return Classifier(), {"x": torch.randn(4, 3, 32, 32), "labels": torch.randint(0, 5, (4,))}


def mlp(width=256, layers=4):
    made = [module for _ in range(layers) for module in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*made), torch.randn(4, width)


def adamw(model, **settings):
    return torch.optim.AdamW(model.parameters(), **{"lr": 1e-3, "foreach": False, **settings})


def train(model, optimizer, inputs, steps=1, scheduler=None):
    for _ in range(steps):
        optimizer.zero_grad()
        if isinstance(inputs, dict):
            model(**inputs)["loss"].backward()
        else:
            model(inputs).square().mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def planned(model, inputs, steps=plain_steps):
    """A model by steps that count AdamW's in the backward pass, and the profile."""
    graph = monetlite.trace(model, inputs).available("cpu").restricted(lambda item: item.tolerance == 0)
    profile = with_step_in_backward(free_profile(graph), "adamw")
    return monetlite.MONeTWrapper(model, replace(schedule_of(profile, steps(graph)), **COUNTED)), profile


def same_weights(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def measured_peak(model, optimizer, inputs):
    tensors = [*model.parameters(), *model.buffers(), *(inputs.values() if isinstance(inputs, dict) else [inputs])]
    state = [item for of in optimizer.state.values() for item in of.values() if isinstance(item, torch.Tensor)]
    own = {item.untyped_storage().data_ptr(): item.untyped_storage().nbytes() for item in (*tensors, *state)}
    return sum(own.values()) + peak_growth_bytes(lambda: train(model, optimizer, inputs))


@pytest.mark.parametrize("build", often([gpt2, cnn], cnn))
def test_five_steps_are_torchs_bit_for_bit_within_the_predicted_peak(build):
    torch.manual_seed(0)
    model, inputs = build()
    plain = twin(model)
    own = adamw(plain)
    mine = monetlite.step_in_backward(adamw(model))
    model = monetlite.within(model, budget="80%", time_limit=10, **COUNTED)
    for trained, optimizer in ((plain, own), (model, mine)):
        torch.manual_seed(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train(trained, optimizer, inputs, 5)
    assert same_weights(plain, model)
    assert all(item.grad is None for item in model.parameters())
    schedule = monetlite.schedule_of(model)
    assert schedule.step_in_backward
    assert measured_peak(model, mine, inputs) == pytest.approx(schedule.peak_bytes, rel=0.01)


@pytest.mark.parametrize("build", often([gpt2, cnn, mlp], cnn, mlp))
def test_live_gradients_are_the_largest_delivery_and_a_sixteenth(build):
    graph = monetlite.trace(*build())
    gradients = {index for index, value in enumerate(graph.values) if value.kind == "param_grad"}
    profile = with_step_in_backward(free_profile(graph), "adamw")
    sizes = {index: profile.graph.values[index].size_bytes for index in gradients}
    deliveries = [
        sum(sizes[value] for value in operator.implementations[0].reads)
        for operator in graph.operators
        if operator.family == DELIVERY
    ]
    live = live_before(profile.graph, simulate(profile, plain_steps(profile.graph)))
    most = max(sum(sizes[value] for value in before & gradients) for before in live)
    assert most <= max(deliveries) + sum(sizes.values()) / 16
    assert len(deliveries) > 1


@pytest.mark.parametrize("steps", often([plain_steps, recompute_everything], recompute_everything))
@pytest.mark.parametrize(
    "kind", often(["tied", "frozen", "unused", "normed", "joined"], "tied", "frozen", "unused")
)
def test_every_kind_of_parameter(kind, steps):
    """Tied, frozen and unused ones; weights made of two parameters; gradients that autograd copies."""

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, _ = mlp()
            self.extra = nn.Parameter(torch.randn(256, 256) / 16)
            if kind == "tied":
                self.layers[4].weight = self.layers[0].weight
            if kind == "frozen":
                self.layers[2].requires_grad_(False)
            if kind == "normed":
                for layer in self.layers[::2]:
                    parametrizations.weight_norm(layer)

        def forward(self, x):
            x = self.layers(x)
            if kind == "joined":
                x = x @ (self.extra + self.layers[0].weight).sin() + (self.extra + self.layers[2].weight)[:4]
            return x

    torch.manual_seed(0)
    model, x = Odd(), torch.randn(4, 256)
    plain = twin(model)
    own, mine = adamw(plain), monetlite.step_in_backward(adamw(model))
    wrapper, profile = planned(model, x, steps)
    train(plain, own, x, 3)
    train(wrapper, mine, x, 3)
    assert same_weights(plain, model)
    if kind != "unused":
        model.extra.requires_grad_(kind == "joined")
    measured = measured_peak(wrapper, mine, x)
    predicted = simulate(profile, wrapper.schedule).peak_bytes
    unused = 3 * model.extra.nbytes if kind != "joined" else 0  # its state isn't there: it has no gradient
    assert 0 <= predicted - measured + unused < 0.02 * predicted + unused


def test_schedulers_groups_and_state_go_on_as_ever():
    torch.manual_seed(0)
    model, x = mlp(64)
    results = []
    for in_backward in (False, True):
        trained = twin(model)
        groups = [
            {"params": trained[0].parameters(), "lr": 1e-2, "weight_decay": 0.3},
            {"params": [item for layer in trained[1:] for item in layer.parameters()]},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-3, foreach=False)
        early = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        if in_backward:
            assert monetlite.step_in_backward(optimizer) is optimizer
        late = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train(trained, optimizer, x, 2, early)
            train(trained, optimizer, x, 2, late)
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(saved)
        train(trained, optimizer, x, 2, late)
        results.append((trained, optimizer.state_dict()))
    (plain, expected), (trained, found) = results
    assert same_weights(plain, trained)
    assert expected["param_groups"] == found["param_groups"]
    for number, state in expected["state"].items():
        assert all(torch.equal(item, found["state"][number][name]) for name, item in state.items())


@pytest.mark.parametrize(
    "kind",
    ["SGD", "Adam", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD", "Adafactor"],
)
def test_optimizers_of_torch(kind):
    torch.manual_seed(0)
    model, x = mlp(16)
    plain = twin(model)
    own, mine = (getattr(torch.optim, kind)(item.parameters(), lr=1e-2) for item in (plain, model))
    train(plain, own, x, 3)
    train(model, monetlite.step_in_backward(mine), x, 3)
    assert same_weights(plain, model)


def two_backward_passes(model, optimizer, x):
    model(x).sum().backward()
    model(x).sum().backward()


def clipped(model, optimizer, x):
    model(x).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def scaled(model, optimizer, x):
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(x).sum()).backward()
    scaler.step(optimizer)


def read(model, optimizer, x):
    model(x).sum().backward()
    assert model[0].weight.grad.norm() > 0


def with_closure(model, optimizer, x):
    optimizer.step(lambda: model(x).sum().backward())


@pytest.mark.parametrize("misuse", [two_backward_passes, clipped, scaled, read, with_closure])
def test_what_needs_all_gradients_at_once_is_refused(misuse):
    model, x = mlp(16)
    optimizer = monetlite.step_in_backward(adamw(model))
    with pytest.raises(ModelError, match=r"gradient that is gone|closure"):
        misuse(model, optimizer, x)
    optimizer.zero_grad()
    optimizer.step()
    train(model, optimizer, x)


@pytest.mark.parametrize("rate", [0.01, torch.tensor(0.01)], ids=["number", "tensor"])
def test_a_setting_that_is_changed_after_the_backward_pass_is_refused(rate):
    model, x = mlp(16)
    optimizer = monetlite.step_in_backward(torch.optim.AdamW(model.parameters(), lr=rate, foreach=False))
    train(model, optimizer, x)
    for group in optimizer.param_groups:  # between two steps, as schedulers do
        group["lr"] *= 0.5
    model(x).sum().backward()
    optimizer.param_groups[0]["lr"] *= 0.5
    with pytest.raises(ModelError, match="lr was changed between the backward pass"):
        optimizer.step()
    train(model, optimizer, x)


def test_optimizers_that_look_at_several_parameters_are_refused(monkeypatch):
    model, x = mlp(16)

    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                group["steps"] = group.get("steps", 0) + 1
            return super().step(closure)

    for optimizer in (torch.optim.LBFGS(model.parameters()), Counting(model.parameters())):
        with pytest.raises(ModelError, match="may look at several parameters at once"):
            monetlite.step_in_backward(optimizer)
    monkeypatch.setattr(Counting, "__module__", "torch.optim.counting")
    updates = BackwardUpdates(Counting(model.parameters()))
    with pytest.raises(ModelError, match="changes steps of all parameters together"):
        model(x).sum().backward()
    updates.remove()
    model(x).sum().backward()
    assert model[0].weight.grad is not None
    with pytest.raises(ModelError, match="has a gradient already"):
        monetlite.step_in_backward(adamw(model))
    model.zero_grad()
    monetlite.step_in_backward(adamw(model))
    with pytest.raises(ModelError, match="is updated in the backward pass already"):
        monetlite.step_in_backward(adamw(model))


def test_several_processes_are_refused(monkeypatch):
    model, x = mlp(16)
    optimizer = monetlite.step_in_backward(adamw(model))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(ModelError, match="several processes train together"):
        train(model, optimizer, x)
    with pytest.raises(ModelError, match="several processes train together"):
        monetlite.step_in_backward(adamw(mlp(16)[0]))


def test_a_plan_is_refused_where_gradients_would_stay():
    model, x = mlp(16)
    wrapper, _ = planned(model, x)
    with pytest.raises(ModelError, match=r"0.weight would keep its gradient.*step_in_backward\(optimizer\)"):
        wrapper(x)
    graph = monetlite.trace(model, x.clone().requires_grad_())
    with pytest.raises(ModelError, match="an input requires a gradient"):
        monetlite.profile(graph, "rtx-4090", **COUNTED)
    with torch.autocast("cpu", torch.float16):
        graph = monetlite.trace(model, x)
    with pytest.raises(ModelError, match="autocast to float16 needs GradScaler"):
        monetlite.profile(graph, "rtx-4090", **COUNTED)


def test_verification_steps_in_the_backward_pass():
    model, inputs = mlp()
    weights = [item.detach().clone() for item in model.parameters()]
    schedule = monetlite.optimize(model, inputs, "100%", time_limit=1, **COUNTED)
    report = monetlite.verify(model, schedule, inputs)
    assert report.exact
    assert report.largest_difference == 0
    assert report.peak_bytes == pytest.approx(schedule.peak_bytes, rel=0.001)
    assert all(torch.equal(before, now) for before, now in zip(weights, model.parameters(), strict=True))


def test_a_parameter_that_thaws_is_updated_in_the_backward_pass_too():
    model, x = mlp(16)
    plain = twin(model)
    model[0].requires_grad_(False)
    mine = monetlite.step_in_backward(adamw(model))
    model[0].requires_grad_(True)
    train(model, mine, x, 3)
    train(plain, adamw(plain), x, 3)
    assert same_weights(plain, model)
    for item in model.parameters():
        item.grad = None
    model(x).sum().backward()
    with pytest.raises(ModelError, match="gradient that is gone"):
        model[0].weight.grad.norm()


def test_a_model_that_is_saved_and_loaded_is_a_new_one():
    model, _ = mlp(16)
    monetlite.step_in_backward(adamw(model))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    with pytest.raises(ModelError, match="no optimizer updates it"):
        refuse_without_updates(loaded)
    monetlite.step_in_backward(adamw(loaded))


@pytest.mark.parametrize("between", ["a step left out", "an attack"])
def test_a_second_gradient_before_the_step_is_refused(between):
    """Plain training throws the first one away; here it has updated the weights."""
    model, x = mlp()
    optimizer = monetlite.step_in_backward(adamw(model))
    trained = monetlite.within(model, budget="100%", time_limit=0.3, **COUNTED)
    if between == "an attack":
        trained.eval()
    trained(x).square().mean().backward()
    optimizer.zero_grad()
    trained.train()
    with pytest.raises(ModelError, match=r"a second gradient before optimizer.step\(\)"):
        trained(x).square().mean().backward()
    optimizer.zero_grad()
    optimizer.step()
    trained(x).square().mean().backward()
    optimizer.step()
