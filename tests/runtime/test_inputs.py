"""Inputs of several sizes: schedules for each, one for all that are smaller, or solved when they come."""

import contextlib
import copy
import functools
import itertools
import pickle
import warnings
from dataclasses import replace

import pytest
import torch
from small_models import assert_same, step, twin
from step_lists import free_profile, recompute_everything, schedule_of
from thoroughness import often
from torch import nn
from torch.nn import functional as F

import monetlite
from monetlite.core.errors import ModelError, ScheduleMismatch
from monetlite.core.steps import plain_steps
from monetlite.runtime import scheduled_training

SOLVING = {"device": "rtx-4090", "time_limit": 0.3}
AMPLE = {"budget": "200%", **SOLVING}
"""A budget that plain training keeps to: proven at once."""


class Sequences(nn.Module):
    """(batch, length) tokens to logits."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 50)

    def forward(self, tokens, *, scale: float = 1.0):
        return self.head(self.layer(self.embedding(tokens))) * scale


class Attends(nn.Module):
    """(batch, length) tokens to logits, by attention that a single token has no need of."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)

    def forward(self, tokens):
        x = F.dropout(self.embedding(tokens), 0.1)
        return self.head(x if tokens.shape[1] == 1 else (x @ x.mT).softmax(-1) @ x)


class Counting(nn.Module):
    """Python counts the tokens, so that each length is a graph of its own."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 8), nn.Linear(8, 50)

    def forward(self, tokens):
        return sum(F.dropout(self.head(self.embedding(tokens[:, at])), 0.1) for at in range(tokens.shape[1]))


class Words(nn.Module):
    """(batch, length) tokens to logits, each token by itself."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 8), nn.Linear(8, 50)

    def forward(self, tokens, *, scale: float = 1.0):
        return F.dropout(self.head(self.embedding(tokens).tanh()), 0.1) * scale


def tokens(batch, length):
    return torch.randint(0, 50, (batch, length))


def schedule_for(model, inputs):
    graph = monetlite.trace(model, inputs)
    return schedule_of(free_profile(graph), recompute_everything(graph))


@pytest.mark.thorough
def test_shorter_sequences_and_smaller_batches_are_served():
    model = Sequences()
    wrapper = monetlite.MONeTWrapper(twin(model), schedule_for(model, tokens(4, 32)))
    for batch, length in ((4, 32), (3, 17)):
        x = (tokens(batch, length),)
        assert_same(step(wrapper, x), step(model, x))


@pytest.mark.parametrize("build", often([Attends, Sequences], Attends))
def test_inputs_of_one_that_run_other_operators(build):
    """Torch computes attention over a single token in its own way, too; the last batch may be of that kind."""
    model = build()
    schedule = schedule_for(model, tokens(4, 32))
    wrapper = monetlite.MONeTWrapper(twin(model), schedule)
    x = (tokens(1, 1),)
    assert monetlite.trace(model, x).structure != schedule.structure
    with pytest.warns(UserWarning, match="run as in plain training"):
        found = step(wrapper, x)
    assert_same(found, step(model, x))
    tight = monetlite.MONeTWrapper(twin(model), replace(schedule, budget_bytes=1000))
    with pytest.raises(ScheduleMismatch, match=f"solved for {build.__name__}"):
        tight(*x)


def test_the_smallest_of_several_schedules_that_serves_is_used():
    model = Words()
    schedules = [schedule_for(model, tokens(4, length)) for length in (64, 16, 32)]
    wrapper = monetlite.MONeTWrapper(twin(model), schedules)
    for length, expected in ((16, 16), (10, 16), (17, 32), (64, 64)):
        x = (tokens(4, length),)
        assert_same(step(wrapper, x), step(model, x))
        assert next(iter(wrapper.schedule.inputs.values())).shape == (4, expected)
    with pytest.raises(ModelError, match=r"shape \(4, 65\), the schedule was solved for \(4, 64\)"):
        wrapper(tokens(4, 65))


def test_a_budget_solves_when_the_first_step_is_taken():
    model = Words()
    wrapper = monetlite.MONeTWrapper(twin(model), budget="90%", **SOLVING)
    assert wrapper.schedule is None
    assert "90%" in repr(wrapper)
    for length in (32, 16, 40):
        x = (tokens(4, length),)
        assert_same(step(wrapper, x), step(model, x))
    assert [next(iter(item.inputs.values())).shape for item in wrapper._training.schedules.known] == [
        (4, 32),
        (4, 64),
    ]
    assert wrapper.schedule.peak_bytes <= wrapper.schedule.budget_bytes


def test_an_input_that_requires_a_gradient_is_another_step():
    network, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4)
    wrapper = monetlite.MONeTWrapper(network, schedule_for(network, x))
    with pytest.raises(ModelError, match=r"input 0 requires a gradient, .* does not require"):
        wrapper(x.clone().requires_grad_())


def test_keyword_arguments_that_are_not_tensors():
    model = Words()
    wrapper = monetlite.MONeTWrapper(twin(model), **AMPLE)
    x = tokens(2, 8)
    for scale in (1.0, 0.5):
        torch.manual_seed(3)
        found = wrapper(x, scale=scale)
        torch.manual_seed(3)
        assert torch.equal(found, model(x, scale=scale))


class Named(nn.Module):
    """Inputs of several dtypes and sizes that can be passed in any order."""

    def __init__(self):
        super().__init__()
        self.layer, self.other = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, a, b, *, c=None, **rest):
        y = torch.tanh(self.layer(a)) * b.float()
        y = y if c is None else y + self.other(c).mean(0)
        for name in sorted(rest):
            y = y * rest[name]
        return y


A, B, C = torch.randn(4, 6), torch.randint(0, 2, (4, 6)), torch.randn(9, 6)


SOLVED = {"args": (A, B), "kwargs": {"a": A, "b": B}, "crossed": {"b": B, "a": A}}


@pytest.mark.parametrize(
    ("way", "as_before"),
    often(itertools.product(SOLVED, [False, True]), *[("args", False), ("crossed", False), ("crossed", True)]),
)
def test_arguments_are_told_by_their_names(way, as_before):
    model, solved = Named(), SOLVED[way]
    schedule = schedule_for(model, solved)
    if as_before and isinstance(solved, dict):  # as files had them: as they were passed
        inputs = monetlite.trace(model, (solved["a"], solved["b"])).inputs
        names = dict(zip("ab", inputs.values(), strict=True))
        schedule = replace(schedule, inputs={f"input{i}": names[name] for i, name in enumerate(solved)})
        calls = [lambda net: net(**solved)]
    else:
        calls = [
            lambda net: net(A, B),
            lambda net: net(b=B, a=A),
            lambda net: net(A, b=B),
            lambda net: net(a=A, b=B),
        ]
    wrapper = monetlite.MONeTWrapper(twin(model), schedule)
    for call in calls:
        assert torch.equal(call(wrapper), model(A, B))


def test_sizes_are_those_of_the_names():
    model = Named()
    wrapper = monetlite.MONeTWrapper(model, schedule_for(model, {"c": C, "b": B, "a": A}))
    wrapper(A[:3], c=C[:8], b=B[:3]).sum().backward()
    with pytest.raises(ModelError, match=r"input 2 has shape \(10, 6\), the schedule was solved for \(9, 6\)"):
        wrapper(c=torch.randn(10, 6), a=A, b=B)


def test_what_a_forward_pass_collects_is_told_by_its_names():
    model = Named()
    rest = {"z": torch.randn(6), "y": torch.randn(4, 6, dtype=torch.float64)}
    wrapper = monetlite.MONeTWrapper(model, schedule_for(model, {"a": A, "b": B, **rest}))
    for names in ("zy", "yz"):
        wrapper(b=B, **{name: rest[name] for name in names}, a=A)


def test_names_of_a_forward_pass_that_is_not_the_classes_own():
    partial = Named()
    partial.forward = functools.partial(partial.forward, c=C)
    for model in (partial, torch.compile(Named(), backend="eager")):
        wrapper = monetlite.MONeTWrapper(model, schedule_for(model, {"a": A, "b": B}))
        wrapper(b=B, a=A).sum().backward()


@pytest.mark.thorough
def test_inputs_that_grow_are_solved_for_again_and_again(monkeypatch):
    monkeypatch.setattr(scheduled_training, "MANY_SOLVED", 2)
    model = Counting()
    wrapper = monetlite.MONeTWrapper(twin(model), **AMPLE)
    for length in (2, 3):
        wrapper(tokens(2, length))
    for length in (4, 5, 2):
        x = (tokens(2, length),)
        with pytest.warns(UserWarning, match="begin with the largest") if length == 4 else contextlib.nullcontext():
            found = step(wrapper, x)
        assert_same(found, step(model, x))


@pytest.mark.thorough
def test_more_shapes_than_programs_are_kept_for(monkeypatch):
    monkeypatch.setattr(scheduled_training, "MAX_PROGRAMS", 2)
    model = Counting()
    wrapper = monetlite.MONeTWrapper(twin(model), **AMPLE)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for length in (5, 4, 3, 5):
            x = (tokens(3, length),)
            assert_same(step(wrapper, x), step(model, x))
    assert sum("more than 2 shapes" in str(item.message) for item in told) == 1


def look(_module, _args):
    """Change nothing, as a hook."""


def test_copies_keep_what_was_solved_and_how_to_solve():
    model = Words()
    wrapper = monetlite.MONeTWrapper(model, **AMPLE)
    wrapper(tokens(2, 8))
    wrapper.register_forward_pre_hook(look)
    for clone in (copy.deepcopy(wrapper), pickle.loads(pickle.dumps(wrapper))):
        assert [*clone._forward_pre_hooks.values()] == [look]
        assert clone.schedule == wrapper.schedule
        assert clone._training.schedules.known == wrapper._training.schedules.known
        clone(tokens(2, 12))
        assert len(clone._training.schedules.known) == 2
    assert len(wrapper._training.schedules.known) == 1


def test_a_model_that_changes_is_solved_for_again():
    model = Words()
    wrapper = monetlite.MONeTWrapper(twin(model), **AMPLE)
    x = (tokens(2, 8),)
    for frozen in (False, True, False):
        for owner in (wrapper.model, model):
            owner.embedding.weight.requires_grad_(not frozen)
        assert_same(step(wrapper, x), step(model, x))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({}, "give a schedule, or a budget"),
        ({"budget": "1GB", "colour": "red"}, "no option 'colour'"),
        ({"schedule": [], "time_limit": 3}, "give a schedule"),
    ],
)
def test_what_a_wrapper_needs(arguments, problem):
    with pytest.raises(ModelError, match=problem):
        monetlite.MONeTWrapper(Words(), **arguments)


def test_a_start_of_another_model_is_refused():
    profile = monetlite.profile(monetlite.trace(Words(), tokens(2, 8), device="rtx-4090"), "rtx-4090")
    other = schedule_for(nn.Linear(4, 4), torch.randn(2, 4))
    with pytest.raises(ScheduleMismatch, match="for another graph"):
        monetlite.solve(profile, "90%", starts=[other], time_limit=1)


def test_the_signature_is_the_models_own():
    import inspect

    model = Words()
    wrapper = monetlite.MONeTWrapper(model, budget="90%")
    assert inspect.signature(wrapper.forward) == inspect.signature(model.forward)


class Tagged(torch.Tensor):
    """A tensor of a class of its own, as MONAI's data loaders give."""


def test_tensors_of_a_class_of_their_own_train_and_keep_it():
    plain = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    wrapper = monetlite.MONeTWrapper(twin(plain), **AMPLE)
    for number in range(3):
        inputs = (torch.randn(8, 16).as_subclass(Tagged),)
        found, expected = step(wrapper, inputs, number), step(plain, inputs, number)
        assert_same(found, expected)
        assert isinstance(wrapper(*inputs), Tagged)


class Propagates(nn.Module):
    """A layer of a graph network, whose edges are a sparse buffer or an input."""

    def __init__(self, edges=None):
        super().__init__()
        self.layer = nn.Linear(16, 4)
        self.register_buffer("edges", edges)

    def forward(self, x, edges=None):
        return torch.sparse.mm(self.edges if edges is None else edges, self.layer(x).relu())


@pytest.mark.parametrize(
    ("layout", "as_buffer"), [("to_sparse", False), ("to_sparse", True), ("to_sparse_csr", False)]
)
def test_sparse_tensors_among_inputs_and_buffers(layout, as_buffer):
    edges = getattr((torch.rand(32, 32) < 0.1).float(), layout)()
    plain = Propagates(edges if as_buffer else None)
    wrapper = monetlite.MONeTWrapper(twin(plain), budget=10**7, **SOLVING)
    for number in range(3):
        given = () if as_buffer else (edges,)
        x = torch.randn(32, 16)
        for model in (plain, wrapper):
            model.zero_grad()
        torch.manual_seed(number)
        outputs = [model(x, *given) for model in (plain, wrapper)]
        for output in outputs:
            output.square().mean().backward()
        assert torch.equal(*outputs)
        for ours, theirs in zip(wrapper.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr", "to_sparse_csc"])
def test_a_sparse_buffer_that_no_forward_pass_reads(layout):
    """As Whisper has one."""
    plain, planned = (nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4)) for _ in range(2))
    planned.load_state_dict(plain.state_dict())
    planned.register_buffer("heads", getattr(torch.eye(8), layout)(), persistent=False)
    wrapper = monetlite.MONeTWrapper(planned, budget="100%", whole=True, **SOLVING)
    x, found = torch.randn(8, 16), []
    for model in (plain, wrapper):
        model(x).square().mean().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *found))


class FillsACache(nn.Module):
    """Fills a dictionary in its first step, so that the next one is captured again."""

    def __init__(self):
        super().__init__()
        self.layer, self.cache = nn.Linear(8, 8), {}

    def forward(self, x):
        if "mask" not in self.cache:
            self.cache["mask"] = torch.ones(8)
        return self.layer(x) * self.cache["mask"]


def test_a_model_that_is_captured_again_is_so_once(monkeypatch):
    captured, backend = [], scheduled_training.delivering_backend
    monkeypatch.setattr(
        scheduled_training, "delivering_backend", lambda *given: [captured.append(1), backend(*given)][1]
    )
    plain = FillsACache()
    wrapper = monetlite.MONeTWrapper(twin(plain), **AMPLE)
    for number in range(4):
        x = torch.randn(4, 8)
        assert_same(step(wrapper, (x,), number), step(plain, (x,), number))
    assert len(captured) == 2


class FoldsRows(nn.Module):
    """Code that depends on the number of rows, so that each is captured by itself."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.GELU())))

    def forward(self, x):
        x = self.layers(x)
        return sum(x[row :: len(x) // 32] for row in range(len(x) // 32))


@pytest.mark.thorough
def test_the_schedule_is_that_of_the_step_that_ran_last():
    model = monetlite.within(FoldsRows(), budget=10**7, **SOLVING)
    for rows in (64, 64, 512, 32, 512, 64):
        model(torch.randn(rows, 32)).square().mean().backward()
        (taken,) = monetlite.schedule_of(model).inputs.values()
        assert taken.shape[0] >= rows


class Averaged(nn.Module):
    """Images to averages of their pixels."""

    def __init__(self):
        super().__init__()
        channels = [3, *[16] * 3]
        pairs = itertools.pairwise(channels)
        self.layers = nn.Sequential(
            *[item for one, other in pairs for item in (nn.Conv2d(one, other, 3), nn.BatchNorm2d(other), nn.ReLU())]
        )

    def forward(self, images):
        return self.layers(images).mean((2, 3))


def test_images_in_another_order_are_planned_for_themselves():
    """Where the last activation's gradient comes of other strides, it can't be written over what comes in."""
    model, images = Averaged(), torch.randn(8, 3, 32, 32)
    profile = free_profile(monetlite.trace(model, (images,)))
    last = profile.graph.by_name["layers.8.backward"]
    over = [item.name for item in profile.graph.operators[last].implementations].index("inplace")
    steps = [(index, over if index == last else choice) for index, choice in plain_steps(profile.graph)]
    given = replace(schedule_of(profile, steps), device="cpu")
    wrapper = monetlite.MONeTWrapper(twin(model), given, budget="200%", device="cpu", time_limit=0.3)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the schedule of")
        for call in 2 * (images, images.to(memory_format=torch.channels_last)):
            assert_same(step(wrapper, (call,)), step(model, (call,)))
    assert len(wrapper._training.schedules.known) == 2
