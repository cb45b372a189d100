"""Recorded steps and checkpoint plans: predictions against what PyTorch takes, plans against all plans."""

import contextlib
import copy
import itertools
import random

import pytest
import torch
import transformers
from layered_models import Transformer, convolutions, transformer
from small_models import tiny_transformer
from thoroughness import often
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from monetlite.checking.trainee import Trainee, default_loss
from monetlite.core.choices import Choices
from monetlite.core.errors import InfeasibleBudget, ModelError, TraceError
from monetlite.core.graph import ALL_OUTPUTS, LOSS_ONLY
from monetlite.core.options import PricingOptions
from monetlite.core.schedule import Schedule, Status
from monetlite.exporting.checkpoint_search import CheckpointSearch, FoundPlan
from monetlite.exporting.checkpointed_step import PricedStep, checkpointed, savable
from monetlite.exporting.eager_step import _Recorder, record_step
from monetlite.exporting.exported_plan import ExportedPlan, price_step
from monetlite.exporting.plan_file import Target, plan_text
from monetlite.exporting.weightless_run import Contents


def schedule(name: str = "a model") -> Schedule:
    """A schedule to name in a file."""
    return Schedule(
        name=name, fingerprint="", structure="", operators=0, inputs={}, choices=Choices(), budget_bytes=1,
        peak_bytes=1, latency_ms=1.0, lower_bound_ms=1.0, status=Status.FEASIBLE, plain_peak_bytes=1,
        plain_latency_ms=1.0, device="cpu", kind="measured", solver="", seconds=0.0,
    )  # fmt: skip


def plan_module(priced: PricedStep, plan, target: Target = Target.CHECKPOINT) -> dict:
    """The names that a plan's file defines."""
    timeline = checkpointed(priced, plan).timeline
    found = FoundPlan(plan=plan, peak_bytes=timeline.peak_bytes, latency_ms=timeline.latency_ms)
    exported = ExportedPlan(step=priced.step, found=found, plain=found, every=found, budget_bytes=1)
    names: dict = {}
    exec(compile(plan_text(exported, schedule(), target), "plan.py", "exec"), names)
    return names


def random_plan(priced: PricedStep, seed: int):
    draw = random.Random(seed)
    return {
        number: frozenset(at for at in savable(priced.step, number, of) if draw.random() < 0.4)
        for number, of in priced.recompute.items()
        if draw.random() < 0.8
    }


class UpAndDown(nn.Module):
    """Rows of modules that are registered in another order than they are called in, and one that is not called."""

    def __init__(self):
        super().__init__()
        self.unused = nn.ModuleList([self.block(64) for _ in range(2)])
        self.up = nn.ModuleList([self.block(64) for _ in range(3)])
        self.down = nn.ModuleList([self.block(256) for _ in range(3)])

    @staticmethod
    def block(width):
        return nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, 64), nn.Tanh())

    def forward(self, x):
        for block in (*self.down, *self.up):
            x = x + block(x)
        return x.square().mean()


class Wrapped(nn.Module):
    """A language model with a loss of its own, and no configuration."""

    def __init__(self):
        super().__init__()
        sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_hidden_layers": 3}
        config = transformers.LlamaConfig(vocab_size=50, max_position_embeddings=64, **sizes)
        self.model = transformers.LlamaForCausalLM(config)

    def forward(self, tokens):
        return self.model(input_ids=tokens).logits.float().logsumexp(-1).mean()


BUILT = {
    "transformer": transformer,
    "with dropout": lambda: transformer(0.2),
    "convolutions": convolutions,
    "gpt2": lambda: tiny_transformer("gpt2", layers=2),
    "llama": lambda: tiny_transformer("llama", layers=2),
    "up and down": lambda: (UpAndDown(), (torch.randn(2048, 64),)),
    "a model that holds one": lambda: (Wrapped(), (torch.randint(0, 50, (4, 32)),)),
}


@pytest.fixture(
    scope="module",
    params=often(BUILT, "convolutions", "a model that holds one"),
)
def recorded(request):
    model, inputs = BUILT[request.param]()
    if hasattr(model, "config"):
        model.config.use_cache = False  # whose copies are laid out in another way
    step = record_step(model, inputs, default_loss)
    return model, inputs, price_step(step, PricingOptions())


def trainee(model: nn.Module, inputs) -> Trainee:
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    return Trainee(model, args, kwargs, default_loss, "cpu")


def test_predicted_peaks_are_what_pytorch_takes(recorded):
    model, inputs, priced = recorded
    plans = [{}, dict.fromkeys(priced.recompute, frozenset()), *(random_plan(priced, seed) for seed in range(3))]
    for plan in plans:
        copied = plan_module(priced, plan)["apply"](copy.deepcopy(model))
        taken = trainee(copied, inputs)
        taken.step()
        predicted = checkpointed(priced, plan).timeline.peak_bytes
        assert predicted == pytest.approx(taken.memory().peak_bytes, rel=0.01)


def test_gradients_and_random_numbers_are_those_of_plain_training(recorded):
    model, inputs, priced = recorded
    plain = trainee(copy.deepcopy(model), inputs).snapshot(1)
    for seed in range(2):
        wrapped = plan_module(priced, random_plan(priced, seed))["apply"](copy.deepcopy(model))
        found = trainee(wrapped, inputs).snapshot(1)
        assert torch.equal(found.loss, plain.loss)
        assert torch.equal(found.random_state, plain.random_state)
        assert found.gradients.keys() == plain.gradients.keys()
        assert all(torch.equal(found.gradients[name], plain.gradients[name]) for name in plain.gradients)


@pytest.mark.thorough
def test_outputs_that_are_held_are_counted():
    model, inputs = BUILT["gpt2"]()
    peaks = {}
    for outputs in (LOSS_ONLY, ALL_OUTPUTS):
        priced = price_step(record_step(model, inputs, default_loss, outputs=outputs), PricingOptions())
        everything = dict.fromkeys(priced.recompute, frozenset())
        plan = plan_module(priced, everything)["apply"](copy.deepcopy(model))
        taken = trainee(plan, inputs)
        with Held(plan) if outputs == ALL_OUTPUTS else contextlib.nullcontext():
            taken.step()
            peaks[outputs] = checkpointed(priced, everything).timeline.peak_bytes
            assert peaks[outputs] == pytest.approx(taken.memory().peak_bytes, rel=0.01)
    assert peaks[ALL_OUTPUTS] > 1.02 * peaks[LOSS_ONLY]


class Held:
    """A caller that holds a model's last output."""

    def __init__(self, model):
        self.model, self.output = model, None

    def __enter__(self):
        def hold(module, args, output):
            self.output = output

        def let_go(module, args):
            self.output = None

        self.hooks = [self.model.register_forward_hook(hold), self.model.register_forward_pre_hook(let_go)]

    def __exit__(self, *error):
        self.output = None
        for hook in self.hooks:
            hook.remove()


def test_a_recording_changes_nothing():
    model, inputs = transformer(0.2)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    record_step(model, inputs, default_loss)
    assert all(torch.equal(before[name], item) for name, item in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_model_on_the_meta_device_is_recorded_as_the_real_one():
    model, inputs = transformer()
    with torch.device("meta"):
        meta = Transformer().train()
    real, other = (record_step(item, inputs, default_loss, device="cpu") for item in (model, meta))
    assert [call.name for call in real.calls] == [call.name for call in other.calls]
    assert real.sizes == other.sizes


def test_random_results_and_those_changed_in_place_are_not_saved():
    model, inputs = transformer(0.2)
    step = record_step(model, inputs, default_loss)
    priced = price_step(step, PricingOptions())
    drawn = {at for at, call in enumerate(step.calls) if call.draws}
    assert drawn
    for number, of in priced.recompute.items():
        assert drawn.isdisjoint(savable(step, number, of))
    model, inputs = convolutions()
    step = record_step(model, inputs, default_loss)
    for number, of in price_step(step, PricingOptions()).recompute.items():
        changed = {value for call in step.calls for value in call.changes}
        assert all(changed.isdisjoint(step.calls[at].writes) for at in savable(step, number, of))


class Narrow(nn.Module):
    """Few results to save, so that all plans can be looked at."""

    def __init__(self, layers: int, *, normalized: bool = False) -> None:
        super().__init__()
        parts = [
            nn.Sequential(
                *([nn.BatchNorm1d(16)] if normalized else []),
                nn.Linear(16, 48 + 16 * at),
                nn.Tanh(),
                *([nn.Tanh()] if normalized and at else []),
                nn.Linear(48 + 16 * at, 16),
            )
            for at in range(layers)
        ]
        self.layers = nn.ModuleList(parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("model", [Narrow(3), Narrow(2, normalized=True)], ids=["plain", "changing a buffer first"])
def test_plans_are_the_best_of_all_plans(model):
    inputs = (torch.randn(256, 16),)
    search = CheckpointSearch(price_step(record_step(model, inputs, default_loss), PricingOptions()))
    options = []
    for number, of in search.recompute.items():
        places = savable(search.step, number, of)
        subsets = (
            frozenset(some) for size in range(len(places) + 1) for some in itertools.combinations(places, size)
        )
        options.append([None, *subsets])
    every = []
    for chosen in itertools.product(*options):
        pairs = zip(search.recompute, chosen, strict=True)
        every.append(search.found({number: saved for number, saved in pairs if saved is not None}))
    peaks = sorted({item.peak_bytes for item in every})
    assert search.smallest().peak_bytes <= 1.002 * peaks[0]
    for budget_bytes in peaks[:: max(1, len(peaks) // 12)]:
        best = min(item.latency_ms for item in every if item.peak_bytes <= budget_bytes)
        found = search.solve(budget_bytes)
        assert found.peak_bytes <= budget_bytes
        assert found.latency_ms == pytest.approx(best, rel=0.01)
    with pytest.raises(InfeasibleBudget, match="smallest peak is"):
        search.solve(peaks[0] // 2)


def test_a_cache_of_keys_and_values_is_switched_off():
    model, inputs = BUILT["gpt2"]()
    assert model.config.use_cache
    step = record_step(model, inputs, default_loss)
    priced = price_step(step, PricingOptions())
    wrapped = plan_module(priced, dict.fromkeys(priced.recompute, frozenset()))["apply"](model)
    assert not model.config.use_cache
    taken = trainee(wrapped, inputs)
    taken.step()
    assert checkpointed(priced, dict.fromkeys(priced.recompute, frozenset())).timeline.peak_bytes == pytest.approx(
        taken.memory().peak_bytes, rel=0.01
    )


@pytest.mark.thorough
def test_plans_get_faster_with_the_budget(recorded):
    search = CheckpointSearch(recorded[2])
    low, high = search.smallest().peak_bytes, search.found({}).peak_bytes
    times = [search.solve(low + (high - low) * part // 6).latency_ms for part in range(7)]
    assert times == sorted(times, reverse=True)
    assert times[-1] == search.found({}).latency_ms


def test_an_optimizer_is_counted():
    model, inputs = transformer()
    step = record_step(model, inputs, default_loss)
    peaks = []
    for optimizer in (None, "adamw"):
        priced = price_step(step, PricingOptions(optimizer=optimizer))
        peaks.append(checkpointed(priced, {}).timeline.peak_bytes)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert peaks[1] - peaks[0] == pytest.approx(2 * weights, rel=0.01)


class Looks(nn.Module):
    """A model that takes a branch on what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        return x if x.sum() > 0 else -x


def test_code_that_looks_at_results_is_refused():
    with pytest.raises(TraceError, match="_local_scalar_dense"):
        record_step(Looks().train(), (torch.randn(2, 4),), default_loss)
    with pytest.raises(ModelError, match="evaluation mode"):
        record_step(Looks().eval(), (torch.randn(2, 4),), default_loss)


def test_a_layer_that_is_called_twice_or_changes_what_it_is_given_is_not_wrapped():
    class Twice(Narrow):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[1](self.layers[0](self.layers[0](x)))

    step = record_step(Twice(2).train(), (torch.randn(8, 16),), default_loss)
    assert [block.path for block in step.blocks if not block.called_again] == ["layers.1"]

    class Changes(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.mul_(2))

    model = Narrow(2)
    model.layers[1] = Changes(nn.Linear(16, 16), nn.Tanh())
    step = record_step(model.train(), (torch.randn(8, 16),), default_loss)
    assert [step.blocks[number].path for number in price_step(step, PricingOptions()).recompute] == ["layers.0"]


class Scaled(nn.Module):
    """Divides by a number that it keeps, in a buffer or as an attribute, and sets it anew."""

    def __init__(self, kept: str) -> None:
        super().__init__()
        self.first, self.second, self.kept = nn.Linear(16, 16), nn.Linear(16, 16), kept
        self.register_buffer("scale", torch.ones(()))
        self.count, self.last, self.lasts = 1.0, torch.ones(()), (torch.ones(()), None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x).tanh()
        size = y.detach().abs().mean() + 1
        if self.kept == "buffer":
            y = y / self.scale.clone()
            with torch.no_grad():
                self.scale.mul_(0.5).add_(size)
        elif self.kept == "counted":
            with torch.no_grad():
                self.scale.add_(1.0)  # which nobody reads
        elif self.kept == "counter":
            self.count += 1  # which it doesn't read, but nobody can tell
        elif self.kept == "number":
            y, self.count = y / self.count, self.count + 1
        elif self.kept == "tensor":
            y, self.last = y / self.last, size
        elif self.kept == "tensors":
            y, self.lasts = y / self.lasts[0], (size, None)
        elif self.kept == "to look at":
            self.last = y.detach()
        return x + self.second(y).tanh()


@pytest.mark.parametrize(
    "kept",
    ["nothing", "counted", "to look at", "buffer", "counter", "number", "tensor", "tensors", "spectral norm"],
)
def test_a_layer_that_reads_what_it_sets_is_not_wrapped(kept):
    """It would read another number when it runs again."""
    torch.manual_seed(0)
    model = Narrow(3)
    model.layers[0] = Scaled(kept)
    if kept == "spectral norm":
        spectral_norm(model.layers[0].second)
    x = torch.randn(8, 16)
    priced = price_step(record_step(model.train(), (x,), default_loss), PricingOptions())
    wrapped = [priced.step.blocks[number].path for number in priced.recompute]
    repeats = kept in ("nothing", "counted", "to look at")
    assert wrapped == ["layers.0"] * repeats + ["layers.1", "layers.2"]
    plan = plan_module(priced, dict.fromkeys(priced.recompute, frozenset()))
    own, plain = plan["apply"](copy.deepcopy(model)), model
    for _ in range(2):
        for trained in (own, plain):
            default_loss(trained(x)).backward()
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(own.parameters(), plain.parameters(), strict=True))


def test_a_small_tensor_that_autograd_keeps_stays_on_its_device():
    recorder, tensor = _Recorder(Contents(), "meta"), torch.ones(3, device="meta")
    recorder._follow(tensor, 0, None)
    assert recorder._pack(tensor).tensor.device == tensor.device
