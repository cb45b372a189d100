"""Batch norm: in place, run again, and backward over its gradient or from its output."""

import math

import pytest
import torch
from contents import ANY, MODERATE, MOSTLY_FLOAT32, RARELY, cases, drawn, fill, plain
from hypothesis import given
from hypothesis import strategies as st
from kernels import Bench
from thoroughness import often
from torch import nn
from torch.nn import functional as F

from monetlite.operators.batch_norm import without_running_statistics
from monetlite.operators.normalization import MAX_RATIO, MAX_WEIGHT, MIN_WEIGHT, is_invertible

channels = st.sampled_from([1, 2, 3, 8, 17])
sizes = st.sampled_from([1, 2, 3, 7, 9])
shapes = st.one_of(
    st.tuples(st.integers(2, 9), channels),
    st.tuples(st.integers(1, 4), channels, st.integers(2, 9)),
    st.tuples(st.integers(1, 5), channels, st.integers(2, 9), sizes),
    st.tuples(st.integers(1, 3), channels, st.integers(2, 3), sizes, st.integers(1, 3)),
)


class Norm(nn.Module):
    """Batch norm whose weights may be frozen or made of a parameter, of the batch's or of running statistics."""

    def __init__(
        self,
        count,
        weights,
        biases,
        *,
        frozen=False,
        tracks=True,
        computed=False,
        of_batch=True,
        dtype=torch.float32,
    ):
        super().__init__()
        self.weight = None if weights is None else nn.Parameter(weights, requires_grad=not frozen)
        self.bias = None if biases is None else nn.Parameter(biases, requires_grad=not frozen)
        self.computed, self.of_batch = computed, of_batch or not tracks
        self.register_buffer("mean", torch.zeros(count, dtype=dtype) if tracks else None)
        self.register_buffer("variance", torch.ones(count, dtype=dtype) if tracks else None)

    def forward(self, x):
        weight = self.weight * 0.5 if self.computed and self.weight is not None else self.weight
        return F.batch_norm(x, self.mean, self.variance, weight, self.bias, training=self.of_batch)


@st.composite
def norms(draw, weights=("normal", "same", "shifted", None), biases=("normal", "zeros", "same", None)):
    kind = draw(st.sampled_from(weights))
    return {
        "weights": kind,
        "biases": None if kind is None else draw(st.sampled_from(biases)),
        "frozen": draw(RARELY),
        "tracks": not draw(RARELY),
        "computed": draw(RARELY),
        "of_batch": not draw(RARELY),
    }


def layer_for(case, options):
    dtype = torch.float64 if case.dtype is torch.float64 else torch.float32
    count = case.shape[1]
    weights, biases = (
        None if options[name] is None else fill((count,), dtype, options[name], case.seed + seed)
        for name, seed in (("weights", 3), ("biases", 4))
    )
    return Norm(count, dtype=dtype, **{**options, "weights": weights, "biases": biases})


@drawn(max_examples=30)
@given(cases(shapes, dtypes=MOSTLY_FLOAT32, kinds=MODERATE), norms())
def test_every_way_to_run_a_batch_norm_is_within_its_tolerance(case, options):
    case.check(layer_for(case, options))


@drawn(max_examples=14)
@given(cases(shapes, dtypes=MOSTLY_FLOAT32, kinds=ANY), norms(weights=("special", "zeros"), biases=ANY))
def test_what_promises_the_bits_of_a_batch_norm_makes_them_of_anything(case, options):
    case.check(layer_for(case, options), extreme=True)


def near_the_limit(count, ratio, size=1.0):
    """Weights of some size with biases of nearly as much as the guard permits, in both signs."""
    generator = torch.Generator().manual_seed(count)
    weight = size * (0.5 + torch.rand(count, generator=generator))
    return weight, weight * ratio * (1 - 0.01 * torch.rand(count, generator=generator)) * weight.sub(size).sign()


FROM_OUTPUT = {("batch_norm_backward", "from_output"), ("batch_norm_backward", "from_output_inplace")}


class SideBySide(nn.Module):
    """Two layers that read the same tensor."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x):
        return self.first(x).tanh() + self.second(x).sigmoid()


def test_each_of_two_norms_of_a_tensor_has_its_gradient_from_its_own_output():
    first, second = (Norm(24, *near_the_limit(24, 2.0, size)) for size in (1.0, 2.0))
    assert plain((4, 24, 7, 5)).check(SideBySide(first, second)).compared >= FROM_OUTPUT


@pytest.mark.parametrize("size", [1.0, 1.01 * MIN_WEIGHT * 2, MAX_WEIGHT / 2])
@pytest.mark.parametrize("before", often(["contiguous", "channels_last"], "channels_last"))
def test_up_to_the_guards_limit_a_gradient_from_the_output_is_within_its_tolerance(size, before):
    weight, bias = near_the_limit(24, MAX_RATIO, size)
    seen = plain((4, 24, 7, 5), kinds=MODERATE, before=before).check(Norm(24, weight, bias))
    assert seen.compared >= FROM_OUTPUT


def test_a_large_batch_from_the_output_is_within_its_tolerance():
    """Sums over a hundred thousand elements, in pieces of the size that is used."""
    weight, bias = near_the_limit(8, MAX_RATIO)
    assert plain((64, 8, 40, 40)).check(Norm(8, weight, bias)).compared >= FROM_OUTPUT


@pytest.mark.parametrize(
    ("weight", "bias"),
    [
        (0.0, 0.0),
        (-0.0, 1.0),
        (1.0, MAX_RATIO * 1.01),
        (-1.0, MAX_RATIO * 1.01),
        (1e-3, 1.0),
        (MIN_WEIGHT / 2, 0.0),
        (1e-40, 0.0),
        (MAX_WEIGHT * 2, 0.0),
        (math.nan, 0.0),
        (math.inf, 0.0),
        (1.0, math.nan),
        (1.0, -math.inf),
        (math.inf, math.inf),
    ],
)
def test_one_weight_beyond_the_limit_is_enough(weight, bias):
    weights, biases = near_the_limit(9, MAX_RATIO)
    assert is_invertible(weights, biases)
    weights[4], biases[4] = weight, bias
    assert not is_invertible(weights, biases)
    if not MIN_WEIGHT <= abs(weight) <= MAX_WEIGHT:
        assert not is_invertible(weights, None)


@pytest.mark.parametrize(("weight", "bias"), [(0.0, 0.0), (1e-3, 1.0), (math.nan, 0.0), (1.0, -math.inf)])
def test_one_weight_beyond_the_limit_is_enough_to_refuse(weight, bias):
    weights, biases = near_the_limit(9, MAX_RATIO)
    weights[4], biases[4] = weight, bias
    seen = plain((3, 9, 4, 4)).check(Norm(9, weights, biases))
    assert seen.refused == FROM_OUTPUT


def test_a_gradient_from_the_output_needs_weights_that_are_there_when_the_step_begins():
    weight, bias = near_the_limit(4, 1.0)
    layers = {computed: Norm(4, weight, bias, computed=computed) for computed in (False, True)}
    offered = {
        key: plain((3, 4, 5, 5)).capture(layer).offered("batch_norm_backward") for key, layer in layers.items()
    }
    assert "from_output" in offered[False]
    assert "from_output" not in offered[True]


@pytest.mark.parametrize(("shape", "offered"), [((9, 4), False), ((9, 4, 1, 1), False), ((9, 4, 1, 2), True)])
def test_channels_are_not_taken_apart_where_each_is_one_point_of_an_image(shape, offered):
    """Their sums are vectorised across channels, so they depend on how many there are."""
    names = plain(shape).capture(Norm(4, None, None)).offered("batch_norm_backward")
    assert ("inplace" in names) == offered
    assert "inplace_by_samples" in names


@pytest.mark.parametrize("before", ["transposed", "dense", "sliced", "expanded"])
def test_other_layouts_are_not_normalised_in_place(before):
    """torch has another kernel for them, whose variant with `out` goes wrong."""
    layer = Norm(4, None, None)
    assert "inplace" in plain((3, 4, 5, 6)).capture(layer).offered("batch_norm")
    assert plain((3, 4, 5, 6), before=before).capture(layer).offered("batch_norm") == []


def test_batch_norm_in_evaluation_mode_has_nothing_to_remember():
    x, weight, statistics = torch.randn(4, 6, 5, 5), torch.randn(6), torch.ones(6)
    target = "aten._native_batch_norm_legit_functional.default"
    call = Bench(target, x, weight, weight, statistics, statistics, False, 0.1, 1e-5).kernel.call
    assert without_running_statistics(call, (None,) * 5, "cpu") is None
    assert without_running_statistics(Bench("aten.tanh.default", x).kernel.call, (None,), "cpu") is None
