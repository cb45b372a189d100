"""Inputs that vary in size: one capture, programs for a few sizes, and plain training's results at each."""

import copy
import gc
import math
import random
import warnings
import weakref
from dataclasses import replace

import pytest
import torch
from small_models import assert_same, step, twin
from step_lists import free_profile, recompute_everything, schedule_of, with_random_implementations
from thoroughness import often
from torch import nn
from torch.nn import functional as F

import monetlite
from monetlite.core.errors import ModelError, TraceError
from monetlite.profiling.memory_records import peak_growth_bytes
from monetlite.runtime import varying_step
from monetlite.runtime.call_sizes import CallSizes
from monetlite.runtime.serving import input_signature
from monetlite.runtime.step_plans import StepPlans
from monetlite.tracing import sized_graphs
from monetlite.tracing.step_inputs import Arguments

PLANNING = {"budget": "80%", "device": "rtx-4090", "time_limit": 0.3}
AMPLE = {**PLANNING, "budget": "200%"}
LENGTHS = (37, 21, 50, 90, 17, 64, 33, 2)


@pytest.fixture
def captures(monkeypatch):
    """Notes each capture, by the sizes that its inputs had."""
    found, plan = [], StepPlans.plan

    def noted(self, joint):
        found.append(tuple(item.shape for item in self._example.args if isinstance(item, torch.Tensor)))
        return plan(self, joint)

    monkeypatch.setattr(StepPlans, "plan", noted)
    return found


class Attention(nn.Module):
    """Attention with dropout, whose scores are as many as the square of the length."""

    def __init__(self):
        super().__init__()
        self.norm, self.values = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x):
        inner = self.norm(x)
        scores = F.dropout((inner @ inner.transpose(1, 2)).softmax(-1), 0.1)
        return x + F.gelu(scores @ self.values(inner))


class Encoder(nn.Module):
    """(batch, length) tokens, of at most 96, to logits; dropout everywhere."""

    def __init__(self):
        super().__init__()
        self.embedding, self.position = nn.Embedding(50, 16), nn.Parameter(torch.randn(96, 16))
        self.layers, self.head = self.block(), nn.Linear(16, 50)

    def block(self):
        return Attention()

    def forward(self, tokens):
        embedded = self.embedding(tokens) + self.position[: tokens.shape[1]]
        return F.dropout(self.head(self.layers(embedded)), 0.2)


class OfPyTorch(Encoder):
    """The same with PyTorch's own block, which takes three times as long to capture."""

    def block(self):
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)


class Pixels(nn.Module):
    """Images of any size to a class."""

    def __init__(self):
        super().__init__()
        self.convolutions = nn.Sequential(
            *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3)),
        )
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.convolutions(x).mean((2, 3)))


class Recurrent(nn.Module):
    """Python counts the tokens: each length is another graph."""

    def __init__(self):
        super().__init__()
        self.embedding, self.cell, self.head = nn.Embedding(50, 8), nn.Linear(16, 8), nn.Linear(8, 50)

    def forward(self, tokens):
        state = torch.zeros(len(tokens), 8)
        for at in range(tokens.shape[1]):
            state = torch.tanh(self.cell(torch.cat([state, self.embedding(tokens[:, at])], 1)))
        return self.head(state)


def recomputing(graph):
    """A schedule that stores nothing, by implementations that promise the same bits."""
    exact = graph.restricted(lambda item: item.tolerance == 0)
    steps = with_random_implementations(exact, recompute_everything(exact), random.Random(0))
    return schedule_of(free_profile(exact), steps)


def tokens(batch, length):
    return torch.randint(0, 50, (batch, length))


def same_steps(model, plain, inputs):
    for number, x in enumerate(inputs):
        torch.manual_seed(number)
        expected = step(plain, (x,))
        state = torch.get_rng_state()
        torch.manual_seed(number)
        assert_same(step(model, (x,)), expected)
        assert torch.equal(torch.get_rng_state(), state), f"other random numbers at {tuple(x.shape)}"


@pytest.mark.parametrize("build", often([Encoder, OfPyTorch], Encoder))
def test_one_capture_serves_all_lengths(build, captures):
    """The schedule is that of the last step."""
    model = build()
    wrapper = monetlite.MONeTWrapper(twin(model), **PLANNING)
    same_steps(wrapper, model, [tokens(4, length) for length in LENGTHS])
    assert captures == [((4, 37),)]
    (captured,) = wrapper._training.plans.varying.steps
    # With room for more: a power of two, up to what the model holds.
    assert [version.limits for version in captured.versions] == [(64,), (96,)]
    for length, limit in ((37, 64), (90, 96), (20, 64), (70, 96)):
        wrapper(tokens(4, length))
        assert [spec.shape for spec in wrapper.schedule.inputs.values()] == [(4, limit)]


def test_the_first_plan_is_for_all_lengths_at_which_plain_training_fits():
    model = Encoder()
    wrapper = monetlite.MONeTWrapper(twin(model), **{**PLANNING, "budget": "1GB"})
    same_steps(wrapper, model, [tokens(4, length) for length in (21, 90, 40)])
    ((captured, varying),) = wrapper._training.plans.varying.steps.items()
    assert [version.limits for version in captured.versions] == [(96,)]
    peaks = {}

    def peak_bytes(graph):
        (found,) = (spec.shape[1] for spec in graph.inputs.values())
        peaks[found] = graph.resident.total + graph.resident.parameters + 1000 * found + 3 * found**2
        return peaks[found]

    fixed_bytes = (
        varying._graphs.graph_at((20,)).resident.total + varying._graphs.graph_at((20,)).resident.parameters
    )
    (limit,) = varying.plain_limits(
        (20,), int((fixed_bytes + 1000 * 60 + 3 * 60**2) / varying_step.PLAIN_SHARE), peak_bytes
    )
    assert 55 <= limit <= 62
    assert varying.plain_limits((20,), fixed_bytes + 100, peak_bytes) == (20,)


@pytest.mark.thorough
def test_even_lengths_vary_from_the_second_on(captures):
    model = Encoder()
    wrapper = monetlite.MONeTWrapper(twin(model), **PLANNING)
    same_steps(wrapper, model, [tokens(4, length) for length in (32, 32, 24, 80, 32, 9)])
    assert captures == [((4, 32),), ((4, 24),)]


@pytest.mark.thorough
def test_sizes_that_come_back_run_by_the_program_that_they_had(captures):
    """The first one's is of its own sizes; it is not captured again because other sizes have come."""
    model = Encoder()
    wrapper = monetlite.MONeTWrapper(twin(model), **PLANNING)
    same_steps(wrapper, model, [tokens(*sizes) for sizes in ((8, 40), (5, 24), (8, 40), (5, 16), (8, 40))])
    assert captures == [((8, 40),), ((5, 24),)]


@pytest.mark.thorough
def test_a_smaller_last_batch_is_captured_by_itself_and_batches_of_any_size_are_not(captures):
    model = Encoder()
    wrapper = monetlite.MONeTWrapper(twin(model), **PLANNING)
    same_steps(wrapper, model, [tokens(batch, 32) for batch in (6, 6, 3, 6, 3, 4, 5, 2, 8)])
    assert captures == [((6, 32),), ((3, 32),), ((4, 32),)]


@pytest.mark.thorough
def test_images_of_any_size(captures):
    model = Pixels()
    wrapper = monetlite.MONeTWrapper(twin(model), **PLANNING)
    sizes = ((24, 24), (16, 32), (20, 28), (40, 16), (17, 23))
    same_steps(wrapper, model, [torch.randn(3, 3, *size) for size in sizes])
    assert len(captures) <= 3, captures


@pytest.mark.parametrize("given", often([False, True], False))
def test_a_transformers_model(given, captures):
    """By plans for the sizes that come, or by a schedule that was solved for fixed sizes."""
    import transformers

    config = transformers.GPT2Config(
        n_layer=1, n_embd=16, n_head=2, n_positions=128, vocab_size=90, bos_token_id=1, eos_token_id=2
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    plain = copy.deepcopy(model)
    if given:
        x = tokens(3, 80)
        monetlite.within(model, recomputing(monetlite.trace(model, {"input_ids": x, "labels": x})))
    else:
        monetlite.within(model, **PLANNING)
    for number, length in enumerate((45, 23, 80, 17)):
        x = tokens(3, length)
        losses = []
        for of in (plain, model):
            of.zero_grad()
            torch.manual_seed(number)
            loss = of(input_ids=x, labels=x).loss
            loss.backward()
            losses.append((loss, torch.get_rng_state()))
        assert torch.equal(losses[0][0], losses[1][0])
        assert torch.equal(losses[0][1], losses[1][1])
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            # A capture adds the gradients of attention in another order.
            assert (ours.grad - theirs.grad).abs().max() <= 1e-6 * theirs.grad.abs().max()
    assert len(captures) == 1


def test_a_step_ends_by_the_program_that_it_began_by():
    """Forward passes of several lengths, and plans, come before the backward passes."""
    model = Encoder()
    wrapper, plain = monetlite.MONeTWrapper(twin(model), **PLANNING), twin(model)
    gradients = []
    for of in (wrapper, plain):
        torch.manual_seed(0)
        given = [tokens(4, length) for length in (21, 90, 40, 33)]
        outputs = [of(x).square().sum() for x in given]
        for output in reversed(outputs):
            output.backward()
        gradients.append([parameter.grad for parameter in of.parameters()])
    for ours, theirs in zip(*gradients, strict=True):
        assert torch.equal(ours, theirs)


def test_a_given_schedule_serves_all_lengths_up_to_its_own(captures):
    model = Encoder()
    wrapper = monetlite.MONeTWrapper(twin(model), recomputing(monetlite.trace(model, tokens(4, 64))))
    same_steps(wrapper, model, [tokens(4, length) for length in (33, 64, 20, 7)])
    assert captures == [((4, 33),)]
    with pytest.raises(ModelError, match=r"shape \(4, 65\), the schedule was solved for \(4, 64\)"):
        wrapper(tokens(4, 65))
    same_steps(wrapper, model, [tokens(4, 63)])


@pytest.mark.thorough
def test_the_graph_at_a_size_is_the_one_traced_there(monkeypatch):
    """Nothing is estimated: operators, sizes and what is measured are those of a trace at that size."""
    built, traced_at = [], varying_step.VaryingStep.traced_at

    def noted(self, limits, layout="as_traced"):
        found = traced_at(self, limits, layout)
        built.append((limits, found.graph))
        return found

    monkeypatch.setattr(varying_step.VaryingStep, "traced_at", noted)
    model = Encoder()
    wrapper = monetlite.MONeTWrapper(twin(model), **PLANNING)
    for length in (21, 90):
        wrapper(tokens(4, length))
    assert [limits for limits, _ in built] == [(32,), (96,)]
    for (length,), graph in built:
        expected = monetlite.trace(model, tokens(4, length))
        assert graph.fingerprint == expected.fingerprint
        assert graph.resident == expected.resident
        assert graph.inputs == expected.inputs
        for one, other in zip(graph.operators, expected.operators, strict=True):
            assert [item.name for item in one.implementations] == [item.name for item in other.implementations]
            calls = [[item.call and item.call.signature for item in of.implementations] for of in (one, other)]
            assert calls[0] == calls[1], one.name


def test_no_length_exceeds_the_budget():

    class WithLoss(Encoder):
        def forward(self, tokens):
            return {"loss": super().forward(tokens).square().mean()}

    model = WithLoss()
    wrapper = monetlite.MONeTWrapper(twin(model), budget="75%", time_limit=0.3)
    peaks = {}
    for length in (77, 50, 96, 64, 20, 96):
        x = tokens(32, length)

        def train(x=x):
            wrapper.zero_grad()
            wrapper(x)["loss"].backward()

        train()
        measured = peak_growth_bytes(train) + sum(item.nbytes for item in wrapper.parameters())
        assert measured <= 1.01 * wrapper.schedule.budget_bytes, length
        peaks[length] = measured
    assert peaks[96] > 2 * peaks[20]


@pytest.mark.thorough
def test_where_python_counts_each_length_is_captured(captures):
    model = Recurrent()
    wrapper = monetlite.MONeTWrapper(twin(model), **AMPLE)
    same_steps(wrapper, model, [tokens(4, length) for length in (8, 5, 8, 3)])
    assert captures == [((4, 8),), ((4, 5),), ((4, 3),)]


def test_an_input_that_varies_may_have_a_gradient(captures):
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    wrapper = monetlite.MONeTWrapper(twin(model), **AMPLE)
    for length in (17, 12, 9):
        given, gradients = torch.randn(3, length, 8), []
        for of in (wrapper, model):
            x = given.clone().requires_grad_()
            of(x).square().sum().backward()
            gradients.append(x.grad)
        assert torch.equal(*gradients)
    assert captures == [((3, 17, 8),), ((3, 12, 8),)]


@pytest.mark.thorough
def test_a_size_of_one_does_not_end_the_others(captures):
    model = Encoder()
    wrapper = monetlite.MONeTWrapper(twin(model), **AMPLE)
    same_steps(wrapper, model, [tokens(4, length) for length in (21, 1, 30, 1, 25)])
    assert captures == [((4, 21),), ((4, 1),)]


@pytest.mark.parametrize("other", ["a", None, torch.ones(4, dtype=torch.int64)])
def test_what_stands_where_a_tensor_varied_has_no_sizes_that_vary(other):
    sizes = CallSizes()
    sizes.note(Arguments((tokens(4, 37),), {}))
    assert sizes.varying(Arguments((tokens(4, 50),), {})) == {0: {1}}
    call = Arguments((other,), {})
    assert sizes.varying(call) == {}
    assert sizes.signature(call) == input_signature(*call)


@pytest.fixture
def planned_at_96():
    """A model, its wrapper, and its captured step, by a plan that loses time at smaller lengths."""
    model = Encoder()
    wrapper = monetlite.MONeTWrapper(twin(model), **PLANNING)
    same_steps(wrapper, model, [tokens(4, 91)])
    ((captured, varying),) = wrapper._training.plans.varying.steps.items()
    (version,) = captured.versions
    assert version.limits == (96,)
    version.schedule = replace(version.schedule, latency_ms=1.2 * version.schedule.plain_latency_ms)
    varying._planning_seconds = 1e-9
    return model, wrapper, captured


@pytest.mark.thorough
def test_small_inputs_get_a_plan_of_their_own_once_it_pays(planned_at_96):
    model, wrapper, captured = planned_at_96
    same_steps(wrapper, model, [tokens(4, length) for length in (20, 24, 30, 20)])
    assert 1 < len(captured.versions) <= 4
    smallest, *_, largest = captured.versions
    assert smallest.limits <= (30,)
    assert largest.limits == (96,)
    assert smallest.schedule.budget_bytes == largest.schedule.budget_bytes


@pytest.mark.thorough
@pytest.mark.parametrize("planned", [0, 1])
def test_a_step_that_cannot_be_planned_at_other_sizes_is_captured_at_each(planned, captures, monkeypatch):
    """At once, or when larger inputs come."""
    agreeing, left = sized_graphs.agreeing, [None] * planned

    def refuse(*graphs):
        if not left:
            raise TraceError("not at this size")
        left.pop()
        return agreeing(*graphs)

    monkeypatch.setattr(sized_graphs, "agreeing", refuse)
    model = Encoder()
    wrapper = monetlite.MONeTWrapper(twin(model), **PLANNING)
    same_steps(wrapper, model, [tokens(4, length) for length in (21, 60, 21)])
    again = ((4, 60), (4, 21)) if planned else ((4, 21), (4, 60))
    assert captures == [((4, 21),), *((shape,) for shape in again)]


def test_cudnns_plans_are_for_one_size():
    schedule = recomputing(monetlite.trace(Pixels(), torch.randn(2, 3, 16, 16)))
    assert varying_step.is_of_any_size(schedule)
    for choices in (
        replace(schedule.choices, implementations={"convolutions.0": "cudnn.plan"}),
        replace(schedule.choices, before={"head": (("convolutions.0", "cudnn.plan"),)}),
    ):
        assert not varying_step.is_of_any_size(replace(schedule, choices=choices))


def test_a_captured_step_keeps_no_inputs():
    """Of a call, only sizes are remembered: a batch would stay in memory for good."""
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50))
    wrapper = monetlite.MONeTWrapper(twin(model), **AMPLE)
    x = tokens(4, 21)
    wrapper(x).sum().backward()
    alive = weakref.ref(x)
    del x
    gc.collect()
    assert alive() is None


@pytest.mark.thorough
def test_a_plan_for_smaller_inputs_that_fails_ends_nothing(planned_at_96, monkeypatch, caplog):
    model, wrapper, captured = planned_at_96
    tried = []

    def refuse(self, limits, layout):
        tried.append(limits)
        raise TraceError("not at this size")

    monkeypatch.setattr(varying_step.VaryingStep, "traced_at", refuse)
    with caplog.at_level("INFO", logger="monetlite"):
        same_steps(wrapper, model, [tokens(4, length) for length in (20, 24, 30)])
    assert tried
    assert "no plan for smaller sizes was found: not at this size" in caplog.messages
    assert [version.limits for version in captured.versions] == [(96,)]


def test_numbers_that_differ_keep_no_size_from_varying():
    sizes, calls = (
        CallSizes(),
        [Arguments((torch.empty(4, length), number), {}) for length, number in ((9, 0.1), (7, 0.2))],
    )
    for call in calls:
        sizes.note(call)
    assert sizes.varying(calls[0]) == {0: frozenset({1})}
    assert sizes.signature(calls[0]) != sizes.signature(calls[1])
    assert sizes.signature(calls[0], any_number=(float,)) == sizes.signature(calls[1], any_number=(float,))


class Weighted(Encoder):
    def forward(self, tokens, number):
        return super().forward(tokens) * number / (number + 1)


class UsesCount(nn.Module):
    """Computes something of how many rows there are."""

    def __init__(self, use):
        super().__init__()
        self.layers, self.use = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)), use

    def forward(self, x):
        return self.use(self.layers(x), len(x)).square().sum()


USES = {
    "a tensor, as losses of detectors make it": lambda y, count: y / torch.as_tensor([count], dtype=torch.float),
    "divided and rounded up": lambda y, count: y[: math.ceil(count / 4)],
}


@pytest.mark.parametrize("use", often(USES, "divided and rounded up"))
def test_what_is_computed_of_a_size_keeps_none_from_varying(use, captures):
    model, counts = UsesCount(USES[use]), (9, 12, 7, 15, 20)
    same_steps(monetlite.MONeTWrapper(twin(model), **AMPLE), model, [torch.randn(count, 16) for count in counts])
    assert len(captures) == 3, "as many as for batches of any size without it"


@pytest.mark.thorough
def test_sizes_and_numbers_vary_in_one_program(captures):
    model = Weighted()
    planned = monetlite.within(twin(model), **AMPLE)
    for at, length in enumerate((37, 21, 50, 33, 64, 41)):
        inputs = tokens(4, length), 0.1 + at / 7
        assert_same(step(planned, inputs), step(model, inputs), within=1e-6)
    assert len(captures) == 2, "the first number was taken for a constant"


class Pair(nn.Module):
    """Two sequences, whose lengths have nothing to do with each other."""

    def __init__(self):
        super().__init__()
        self.embed, self.hidden, self.out = nn.Embedding(99, 16), nn.Linear(16, 32), nn.Linear(32, 8)
        self.other = nn.Linear(1, 8)

    def forward(self, words, numbers):
        read = self.out(self.hidden(self.embed(words)).relu()).mean(1)
        return (read * self.other(numbers[..., None]).tanh().mean(1)).sum()


def pair(words, numbers):
    return torch.randint(0, 99, (4, words)), torch.rand(4, numbers)


@pytest.mark.parametrize("swapped", often([False, True], False))
def test_sizes_that_are_equal_once_are_not_taken_for_one(captures, swapped):
    """A smaller size in between has the first plan serve again, which is of equal sizes."""
    model = Pair()
    planned = monetlite.MONeTWrapper(twin(model), **AMPLE)
    lengths = ((24, 24), (17, 17), (24, 24), (10, 400), (400, 10), (24, 24))
    for one, other in lengths:
        inputs = pair(*((other, one) if swapped else (one, other)))
        assert_same(step(planned, inputs), step(model, inputs))
        shapes = [spec.shape for spec in planned.schedule.inputs.values()]
        assert all(spec >= tensor.shape for spec, tensor in zip(shapes, inputs, strict=True)), shapes
    assert len(captures) <= 3


@pytest.mark.thorough
@pytest.mark.parametrize("by_schedule", [False, True])
def test_square_images_shrink_and_grow_again(by_schedule):
    model = Pixels()
    images = {size: (torch.randn(4, 3, size, size),) for size in (32, 24)}
    schedule = monetlite.optimize(twin(model), images[32], **AMPLE) if by_schedule else None
    options = {} if by_schedule else AMPLE
    planned = monetlite.MONeTWrapper(twin(model), *[schedule] * by_schedule, **options)
    for size in (32, 24, 32, 24):
        assert_same(step(planned, images[size]), step(model, images[size]))


@pytest.mark.thorough
def test_a_new_plan_for_sizes_takes_the_place_of_an_older_one():
    """Of two sizes, each may be the larger: more plans than are kept, of which none serves the sizes of another."""
    model = Pair()
    planned = monetlite.MONeTWrapper(twin(model), **AMPLE)
    for lengths in ((8, 20), (16, 1000), (32, 100), (64, 50), (128, 12), (256, 30), (256, 30), (8, 20)):
        inputs = pair(*lengths)
        assert_same(step(planned, inputs), step(model, inputs))


class Named(nn.Module):
    """Reads a kind of its samples, and not their name."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))

    def forward(self, batch):
        made = self.layers(batch["x"])
        return made * 2 if batch["kind"] == "hard" else made


@pytest.mark.thorough
def test_names_of_samples_are_no_part_of_what_is_captured(captures):
    model, batches = Named(), []
    for number, (kind, length) in enumerate(
        [("easy", 8), ("hard", 8), ("easy", 5), ("hard", 5), *[("easy", 7)] * 9]
    ):
        batches.append({"x": torch.randn(4, length, 8), "name": f"{number}.jpg", "kind": kind})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained = monetlite.MONeTWrapper(twin(model), **AMPLE)
        for batch in batches:
            assert_same(step(trained, (batch,)), step(model, (batch,)))
    assert len(captures) == 4, "each kind, at first and where lengths vary"
