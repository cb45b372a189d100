"""Head and loss in tiles: the loss and gradients of autograd, wherever the form is found, and nowhere else."""

import copy

import pytest
import torch
from contents import drawn
from hypothesis import example, given
from hypothesis import strategies as st
from thoroughness import often
from torch import nn
from torch.nn import functional as F

import monetlite
from monetlite.core.errors import ModelError
from monetlite.core.graph import TILED_LOSS
from monetlite.core.simulate import simulate
from monetlite.core.steps import plain_steps
from monetlite.operators.tiled_loss import BY_CLASS, BY_FEATURE, MEAN, NONE, SUM, linear_cross_entropy

IGNORED = -100
STEPS = [(), (("mul", 3.0),), (("div", 2.0), ("tanh", None), ("mul", 2.0)), (("to", "float64"),)]


def stepped(logits, steps):
    """The steps between logits and loss, as a model writes them."""
    for name, value in steps:
        if name == "to":
            logits = logits.to(getattr(torch, value))
        else:
            logits = {"mul": lambda x, y: x * y, "div": lambda x, y: x / y, "tanh": lambda x, _: x.tanh()}[name](
                logits, value
            )
    return logits


@drawn(max_examples=60)
@given(
    rows=st.integers(0, 40),
    classes=st.integers(1, 30),
    tiles=st.integers(1, 8),
    reduction=st.sampled_from([NONE, MEAN, SUM]),
    smoothed=st.booleans(),
    steps=st.sampled_from(STEPS),
    scaled=st.booleans(),
    order=st.sampled_from([None, BY_CLASS, BY_FEATURE]),
    biased=st.booleans(),
    weighted=st.booleans(),
    wants_rows=st.booleans(),
    adapted=st.booleans(),
    seed=st.integers(0, 99),
)
@example(
    **{"rows": 0, "classes": 3, "tiles": 2, "reduction": SUM, "smoothed": False, "steps": (), "scaled": False},
    **{"order": BY_CLASS, "biased": True, "weighted": True, "wants_rows": True, "adapted": True, "seed": 0},
)
def test_loss_and_gradients_are_those_of_autograd(
    rows, classes, tiles, reduction, smoothed, steps, scaled, order, biased, weighted, wants_rows, adapted, seed
):
    generator = torch.Generator().manual_seed(seed)

    def made(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    hidden, matrix, bias = made(rows, 5), made(5, classes), made(classes) if biased else None
    weight = made(classes).detach().abs() if weighted else None
    target = torch.randint(0, classes, (rows,), generator=generator)
    target[torch.rand(rows, generator=generator) < 0.3] = IGNORED
    logits = hidden @ matrix + (bias if biased else 0)
    adapter = [made(rows, 2), made(2, classes)] if adapted else []
    if adapted:
        logits = logits + adapter[0] @ adapter[1] * 0.7
    name = {NONE: "none", MEAN: "mean", SUM: "sum"}[reduction]
    expected = F.cross_entropy(stepped(logits, steps), target, weight, reduction=name)
    sums = stepped(logits, steps).log_softmax(1).sum(1)
    slope = torch.randn(expected.shape, generator=generator, dtype=torch.float64) if scaled or smoothed else None
    spread = torch.randn(rows, generator=generator, dtype=torch.float64) if smoothed else None
    wanted = (wants_rows, order, biased)
    leaves = (hidden, matrix, bias, *adapter)
    inputs = [None if leaf is None else leaf.detach().clone() for leaf in leaves]
    products = [(*inputs[:2], 1.0, *wanted[:2]), *([(*inputs[3:], 0.7, *wanted[:2])] if adapted else [])]
    of_loss = (target, weight, reduction, IGNORED, steps)
    loss, *gradients = linear_cross_entropy(products, inputs[2], *of_loss, biased, tiles, slope, spread)
    wanted += wanted[:2] if adapted else ()
    if smoothed:
        torch.testing.assert_close(gradients.pop(), sums.detach())
    torch.testing.assert_close(loss, expected.detach(), equal_nan=True)
    if slope is None:
        slope = torch.ones(expected.shape, dtype=torch.float64)
    expected = (expected * slope).sum() + ((sums * spread).sum() if smoothed else 0)
    if expected.isfinite():
        theirs = torch.autograd.grad(expected, [leaf for leaf in leaves if leaf is not None])
        for leaf, own, gradient, asked in zip(leaves, inputs, gradients, wanted, strict=True):
            assert (gradient is None) == (not asked)
            if gradient is not None:
                place = next(at for at, item in enumerate(i for i in leaves if i is not None) if item is leaf)
                turned = order == BY_CLASS and any(leaf is item for item in (matrix, *adapter[1:]))
                like = theirs[place].T if turned else theirs[place]
                torch.testing.assert_close(gradient.reshape(like.shape), like)
            if own is not None:
                assert torch.equal(own, leaf.detach())  # operands are left as they were


SHIFTED = {
    "last": (None, -1, None),
    "first": (2, None, None),
    "middle": (1, -2, None),
    "even": (None, None, 2),
    "some": (None, 20, None),
    "twice": (None, -1, None),
}
"""Logits that are left out after the head."""
SMOOTHED = {"smoothed": "mean", "smoothed_sum": "sum", "smoothed_rows": "none"}
"""Reductions of losses with label smoothing."""
ADAPTED = ("adapted", "adapted_trained", "adapted_wide", "adapted_bias", "adapted_twice")
"""Heads with a LoRA: the head frozen, trained, and frozen in 16 bits; with a bias, and multiplied by the logits."""


class Head(nn.Module):
    """A hidden layer, and a head with its loss, in one of the forms that people write."""

    def __init__(self, form="", classes=101, dtype=torch.float32):
        super().__init__()
        self.body = nn.Embedding(classes, 8, dtype=dtype)
        self.norm = nn.LayerNorm(8, dtype=dtype)
        self.head = nn.Linear(8, classes, bias=form == "bias", dtype=dtype)
        if form == "tied":
            self.head.weight = self.body.weight
        self.head.requires_grad_(form not in ("frozen", "adapted", "adapted_wide"))
        if form in ADAPTED:
            wide = torch.float32 if form == "adapted_wide" else dtype
            self.down, self.up = (
                nn.Linear(*sizes, bias=form == "adapted_bias", dtype=wide) for sizes in ((8, 2), (2, classes))
            )
        self.form = form

    def forward(self, tokens):
        hidden = self.norm(self.body(tokens))
        logits = self.head(hidden)
        labels = tokens.roll(-1, 1)
        if self.form in ADAPTED:  # as PEFT has it
            factor = 0.5 if self.form != "adapted_twice" else 0.5 * logits.mean()
            logits = (logits + self.up(self.down(hidden.to(self.up.weight.dtype))) * factor).to(logits.dtype)
        if self.form == "adapted_wide":
            logits = logits.float()
        if self.form == "capped":
            logits = 30 * torch.tanh(logits / 30)
        if self.form in ("float", "half_float"):
            logits = logits.float()
        if self.form == "hooked":
            logits.register_hook(lambda gradient: gradient * 2)
        if self.form == "summed":
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
            return {"loss": loss, "sums": logits.flatten(0, 1).sum(0, keepdim=True)}
        if self.form == "product":
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
            return {"loss": loss, "back": logits.flatten(0, 1) @ self.head.weight}
        if self.form == "read":
            return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + logits.mean()}
        if self.form in SMOOTHED:
            reduction = SMOOTHED[self.form]
            logits, labels = logits.flatten(0, 1), labels.flatten()
            loss = F.cross_entropy(logits, labels, ignore_index=3, label_smoothing=0.1, reduction=reduction)
            return {"loss": loss if reduction == "mean" else loss.sum() / 7}
        if self.form in ("shifted_smoothed", "shifted_rows"):
            logits, labels = logits[:, :-1].double().flatten(0, 1), tokens[:, 1:].flatten()
            if self.form == "shifted_smoothed":
                return {"loss": F.cross_entropy(logits, labels, label_smoothing=0.1)}
            return {"loss": F.cross_entropy(logits, labels, reduction="none").mean()}
        if self.form in ("masked", "weighted", "drawn", "squared"):
            losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
            if self.form == "drawn":
                return {"loss": (losses * torch.rand_like(losses)).mean()}
            if self.form == "squared":
                return {"loss": losses.square().mean()}
            if self.form == "masked":
                mask = (labels != 3).flatten().to(losses.dtype)
                return {"loss": (losses * mask).sum() / mask.sum()}
            weights = torch.arange(tokens.shape[1], device=tokens.device) / tokens.shape[1]
            return {"loss": (losses.view(tokens.shape) * weights).mean(1).sum()}
        if self.form in ("sum", "float", "half_float"):
            count = (labels != 3).sum()
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=3)
            return {"loss": loss * 0.5 / count, "logits": logits}
        if self.form in SHIFTED:
            first, last, step = SHIFTED[self.form]
            logits, labels = logits[:, first:last:step], tokens[:, first:last:step]
            if self.form == "twice":
                logits, labels = logits[1:].contiguous(), labels[1:]
            logits, labels = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
            return {"loss": F.cross_entropy(logits, labels, ignore_index=3)}
        if self.form == "time_major":  # tokens of (length, batch)
            return {"loss": F.cross_entropy(logits[:-1].flatten(0, 1), tokens[1:].flatten())}
        if self.form == "both":  # logits that two losses take, each without some of them
            losses = [
                F.cross_entropy(some.flatten(0, 1), tokens[:, 1:].flatten())
                for some in (logits[:, :-1], logits[:, 1:])
            ]
            return {"loss": sum(losses)}
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=3)
        return {"loss": loss, "logits": logits}


class Sum(nn.Module):
    """Logits that are a sum of two products, of which none is a LoRA of the other."""

    def __init__(self, form, classes=101):
        super().__init__()
        self.body, self.other = nn.Embedding(classes, 8), nn.Embedding(classes, 8)
        self.head, self.added = nn.Linear(8, classes, bias=False), nn.Linear(8, classes, bias=False)
        self.head.requires_grad_(form not in ("rows", "matrix", "made", "whole bias"))
        self.square = nn.Linear(classes, classes, bias=False)
        self.row = nn.Parameter(torch.randn(1, 8))
        self.form = form

    def forward(self, tokens):
        rows = self.body(tokens).flatten(0, 1)
        match self.form:
            case "rows":  # read by both
                logits = self.head(rows) + self.added(rows) * 0.5
            case "matrix":
                logits = self.head(rows.detach()) + self.head(self.other(tokens).flatten(0, 1)) * 0.5
            case "one row":
                logits = self.head(self.row) + self.added(rows)
            case "made":  # of the other
                logits = self.head(rows.detach())
                logits = logits + self.square(logits)
            case "whole bias":
                logits = torch.addmm(self.head(rows.detach()), rows, self.added.weight.T)
            case "two numbers":
                logits = self.head(rows) * 2 + self.added(rows) * 0.5
        return {"loss": F.cross_entropy(logits, tokens.roll(-1, 1).flatten())}


def fused(graph):
    return [op for op in graph.operators if op.family.endswith("linear_cross_entropy")]


@pytest.mark.parametrize(
    "form",
    often(
        [
            *["", "bias", "tied", "frozen", "capped", "float", "sum", "last", "first", "middle", "time_major"],
            *["masked", "weighted", *SMOOTHED, "adapted", "adapted_trained", "adapted_wide"],
        ],
        *["bias", "tied", "capped", "last", "time_major", "weighted", "smoothed"],
    ),
)
def test_a_step_in_tiles_has_plain_trainings_gradients(form):
    torch.manual_seed(0)
    dtype = torch.bfloat16 if form in ("float", "adapted_wide") else torch.float32
    model, tokens = Head(form, dtype=dtype).train(), torch.randint(0, 101, (4, 64))
    plain = copy.deepcopy(model)
    schedule = monetlite.optimize(
        model, tokens, "100%", device="rtx-4090", layout=TILED_LOSS, tolerance=1e-5, time_limit=0.3
    )
    assert fused(monetlite.trace(model, tokens, layout=TILED_LOSS))
    trained = monetlite.MONeTWrapper(model, schedule)
    for scale in (1.0, 1 / 3):
        for each in (trained, plain):
            each.zero_grad()
            (each(tokens)["loss"] * scale).backward()
        # A loss that is divided afterwards is not rounded once more, unless the caller scales it again.
        allowed = (0.004 if scale == 1 else 0.02) if dtype == torch.bfloat16 else 1e-5
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            if theirs.grad is not None:
                largest = theirs.grad.abs().max().item()
                torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=allowed * largest)


@pytest.mark.parametrize("form", ["rows", "matrix"])
def test_products_that_share_an_operand_have_gradients_of_their_own(form):
    torch.manual_seed(0)
    model, tokens = Sum(form).train(), torch.randint(0, 101, (4, 64))
    plain = copy.deepcopy(model)
    schedule = monetlite.optimize(
        model, tokens, "100%", device="rtx-4090", layout=TILED_LOSS, tolerance=1e-5, time_limit=0.3
    )
    for each in (monetlite.MONeTWrapper(model, schedule), plain):
        each(tokens)["loss"].backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        if theirs.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("form", ["one row", "made", "whole bias", "two numbers"])
def test_sums_that_are_no_adapter_are_left_whole(form):
    model, tokens = Sum(form).train(), torch.randint(0, 101, (4, 64))
    assert not fused(monetlite.trace(model, tokens, layout=TILED_LOSS))


@drawn(max_examples=30)
@given(
    rows=st.integers(1, 300),
    classes=st.integers(2, 300),
    tiles=st.integers(1, 8),
    reduction=st.sampled_from([NONE, MEAN, SUM]),
    smoothed=st.booleans(),
    size=st.sampled_from([0.01, 1.0, 300.0]),
    slope=st.sampled_from([1e-9, 1.0, 1e6]),
    same=st.booleans(),
    weighted=st.booleans(),
    seed=st.integers(0, 99),
)
@example(
    **{"rows": 300, "classes": 300, "tiles": 1, "reduction": SUM, "smoothed": False},
    **{"size": 300.0, "slope": 1.0, "same": True, "weighted": True, "seed": 0},
)
def test_gradients_in_float16_neither_vanish_nor_overflow(
    rows, classes, tiles, reduction, smoothed, size, slope, same, weighted, seed
):
    """Whatever the loss is multiplied by, and however many hidden states and targets are alike."""
    generator = torch.Generator().manual_seed(seed)
    hidden = size * torch.randn(1 if same else rows, 4, generator=generator).expand(rows, -1)
    matrix = torch.randn(4, classes, generator=generator) / size
    hidden, matrix = hidden.half(), matrix.half()
    target = torch.randint(0, 1 if same else classes, (rows,), generator=generator)
    slopes = torch.full((rows,) if reduction == NONE else (), slope)
    spread = torch.full((rows,), -slope / classes) if smoothed else None
    weight = 1000 * torch.rand(classes, generator=generator) if weighted else None
    products = [(hidden, matrix, 1.0, True, BY_FEATURE)]
    args = (None, target, weight, reduction, IGNORED, (("to", "float32"),), True, tiles)
    _, *gradients = linear_cross_entropy(products, *args, slopes, spread)
    assert [item.dtype for item in gradients[:3]] == [torch.float16] * 3
    leaves = [item.double().requires_grad_() for item in (hidden, matrix, torch.zeros(1, classes))]
    logits = torch.addmm(leaves[2], *leaves[:2])
    name = {NONE: "none", MEAN: "mean", SUM: "sum"}[reduction]
    wide = None if weight is None else weight.double()
    loss = (F.cross_entropy(logits, target, wide, reduction=name) * slopes).sum()
    if smoothed:
        loss = loss + (logits.log_softmax(1).sum(1) * spread).sum()
    for ours, theirs in zip(gradients, torch.autograd.grad(loss, leaves), strict=False):
        assert ours.isfinite().all()
        apart = ours.double() * gradients[-1].double() - theirs
        assert apart.norm() <= 0.02 * theirs.norm() + 1e-3 * slope  # of logits that float16 has rounded


def test_a_scaled_loss_in_float16_has_plain_trainings_gradients():
    """As `torch.amp.GradScaler` scales it, more than float16 could hold."""
    torch.manual_seed(0)
    model, tokens = Head("half_float", dtype=torch.float16).train(), torch.randint(0, 101, (4, 64))
    plain = copy.deepcopy(model)
    schedule = monetlite.optimize(
        model, tokens, "100%", device="rtx-4090", layout=TILED_LOSS, tolerance=1e-5, time_limit=0.3
    )
    assert fused(monetlite.trace(model, tokens, layout=TILED_LOSS))
    trained = monetlite.MONeTWrapper(model, schedule)
    for scale in (1.0, 2.0**12, 2.0**17):
        for each in (trained, plain):
            each.zero_grad()
            (each(tokens)["loss"] * scale).backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            largest = theirs.grad.abs().max().item()
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=0.01 * largest)


def test_tiles_take_less_memory():
    model, tokens = Head(classes=5003).train(), torch.randint(0, 5003, (4, 64))
    peaks = {}
    for layout in ("as_traced", TILED_LOSS):
        graph = monetlite.trace(model, tokens, layout=layout)
        profile = monetlite.profile(graph, "rtx-4090")
        steps = [
            (
                index,
                len(graph.operators[index].implementations) - 1 if graph.operators[index] in fused(graph) else 0,
            )
            for index, _ in plain_steps(graph)
        ]
        peaks[layout] = simulate(profile, steps).peak_bytes - graph.resident.total
    logits_bytes = 4 * 64 * 5003 * 4
    assert peaks["as_traced"] > 2 * logits_bytes
    assert peaks[TILED_LOSS] < 0.6 * logits_bytes


OTHER_FORMS = (
    *["read", "drawn", "squared", "shifted_smoothed", "shifted_rows"],
    *["half", "hooked", "summed", "product", "even", "some", "twice", "both", "adapted_bias", "adapted_twice"],
)


@pytest.mark.parametrize("form", often(OTHER_FORMS, "half", *OTHER_FORMS[::3]))
def test_a_loss_of_another_form_is_left_as_it_is(form):
    """A loss in float16 is one of them: sums and numbers of targets are not accurate in plain training."""
    dtype = torch.float16 if form == "half" else torch.float32
    model, tokens = Head(form, dtype=dtype).train(), torch.randint(0, 101, (4, 64))
    plain, tiled = (monetlite.trace(model, tokens, layout=layout) for layout in ("as_traced", TILED_LOSS))
    assert plain.fingerprint == tiled.fingerprint


def test_logits_that_are_asked_for_are_left_whole():
    model, tokens = Head().train(), torch.randint(0, 101, (4, 64))
    assert fused(monetlite.trace(model, tokens, layout=TILED_LOSS))
    assert not fused(monetlite.trace(model, tokens, layout=TILED_LOSS, outputs="all"))


def test_the_solver_takes_tiles_where_the_logits_do_not_fit():
    model, tokens = Head(classes=5003).train(), torch.randint(0, 5003, (4, 64))
    exact = monetlite.optimize(model, tokens, "100%", device="rtx-4090", time_limit=2)
    budget = (exact.peak_bytes + monetlite.trace(model, tokens).resident.total) // 2
    found = monetlite.optimize(model, tokens, budget, device="rtx-4090", tolerance=1e-5, time_limit=4)
    assert (found.layout, found.peak_bytes <= budget) == (TILED_LOSS, True)
    with pytest.raises(ModelError, match="tiled_loss"):
        monetlite.optimize(model, tokens, budget, layout=TILED_LOSS)


@pytest.mark.parametrize("form", often(["", "last", "masked", "smoothed"], "smoothed"))
def test_lengths_that_vary_run_in_tiles(form):
    torch.manual_seed(0)
    model = Head(form, classes=5003).train()
    plain = copy.deepcopy(model)
    resident_bytes = monetlite.trace(model, torch.zeros(4, 96, dtype=torch.long)).resident.total
    budget = resident_bytes * 2 + 4 * 96 * 5003 * 4  # gradients and a single copy of the logits
    trained = monetlite.within(model, budget=budget, tolerance=1e-5, time_limit=2)
    for length in (64, 91, 33):
        tokens = torch.randint(0, 5003, (4, length))
        for each in (trained, plain):
            each.zero_grad()
            each(tokens)["loss"].backward()
        assert monetlite.schedule_of(trained).layout == TILED_LOSS
        for ours, theirs in zip(trained.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)
