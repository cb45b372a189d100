"""Layer norm: backward over its gradient, or from its output."""

import math

import pytest
from contents import ANY, MODERATE, MOSTLY_FLOAT32, RARELY, cases, drawn, fill, plain
from hypothesis import given
from hypothesis import strategies as st
from test_batch_norm import SideBySide, near_the_limit
from torch import nn
from torch.nn import functional as F

from monetlite.operators.normalization import MAX_RATIO

lengths = st.sampled_from([1, 2, 3, 7, 8, 17, 33])
shapes = st.one_of(
    st.tuples(st.integers(0, 9), lengths),
    st.tuples(st.integers(1, 3), st.integers(1, 9), lengths),
    st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 3), lengths),
)
FROM_OUTPUT = {("layer_norm_backward", "from_output"), ("layer_norm_backward", "from_output_inplace")}


class Norm(nn.Module):
    """Layer norm over the last dimensions, with weights that may be frozen or made of a parameter."""

    def __init__(self, weight, bias, shape=None, *, frozen=False, computed=False):
        super().__init__()
        self.shape = weight.shape if shape is None else shape
        self.weight = None if weight is None else nn.Parameter(weight, requires_grad=not frozen)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=not frozen)
        self.computed = computed

    def forward(self, x):
        weight = self.weight * 0.5 if self.computed and self.weight is not None else self.weight
        return F.layer_norm(x, self.shape, weight, self.bias)


@st.composite
def norms(draw, weights=("normal", "same", "shifted", None), biases=("normal", "zeros", "same", None)):
    return {
        "weights": draw(st.sampled_from(weights)),
        "biases": draw(st.sampled_from(biases)),
        "dimensions": draw(st.integers(1, 2)),
        "frozen": draw(RARELY),
        "computed": draw(RARELY),
    }


def layer_for(case, options):
    dtype = case.dtype
    shape = case.shape[-min(options["dimensions"], len(case.shape) - 1) :]
    weight, bias = (
        None if options[name] is None else fill(shape, dtype, options[name], case.seed + seed)
        for name, seed in (("weights", 3), ("biases", 4))
    )
    return Norm(weight, bias, shape, frozen=options["frozen"], computed=options["computed"])


@drawn(max_examples=30)
@given(cases(shapes, dtypes=MOSTLY_FLOAT32, kinds=MODERATE), norms())
def test_every_way_to_run_a_layer_norm_is_within_its_tolerance(case, options):
    case.check(layer_for(case, options))


@drawn(max_examples=14)
@given(cases(shapes, dtypes=MOSTLY_FLOAT32, kinds=ANY), norms(weights=("special", "normal"), biases=ANY))
def test_what_promises_the_bits_of_a_layer_norm_makes_them_of_anything(case, options):
    case.check(layer_for(case, options), extreme=True)


@pytest.mark.parametrize("in_pieces", [False, True])
def test_up_to_the_guards_limit_a_gradient_from_the_output_is_within_its_tolerance(in_pieces):
    weight, bias = near_the_limit(40, MAX_RATIO)
    seen = plain((7, 9, 40), kinds=MODERATE, in_pieces=in_pieces).check(Norm(weight, bias))
    assert seen.compared >= FROM_OUTPUT


@pytest.mark.parametrize("trained", [(), ("weight",), ("bias",)])
def test_gradients_are_of_those_parameters_that_are_trained(trained):
    """Norms without a bias, and frozen ones that a LoRA trains a part of."""
    layer = Norm(*near_the_limit(40, 2.0))
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name in trained)
    seen = plain((7, 9, 40)).check(layer)
    assert seen.compared >= FROM_OUTPUT | {("layer_norm_backward", "inplace")}


def test_each_of_two_norms_of_a_tensor_has_its_gradient_from_its_own_output():
    first, second = (Norm(*near_the_limit(40, 2.0, size)) for size in (1.0, 2.0))
    assert plain((7, 9, 40)).check(SideBySide(first, second)).compared >= FROM_OUTPUT


def test_a_large_batch_from_the_output_is_within_its_tolerance():
    weight, bias = near_the_limit(768, MAX_RATIO)
    assert plain((8, 128, 768)).check(Norm(weight, bias)).compared >= FROM_OUTPUT


@pytest.mark.parametrize(("weight", "bias"), [(0.0, 0.0), (1e-3, 1.0), (math.nan, 0.0), (1.0, math.inf)])
def test_one_weight_beyond_the_limit_is_enough_to_refuse(weight, bias):
    weights, biases = near_the_limit(9, MAX_RATIO)
    weights[4], biases[4] = weight, bias
    assert plain((3, 9)).check(Norm(weights, biases)).refused == FROM_OUTPUT


def test_a_gradient_from_the_output_needs_weights_that_are_there_when_the_step_begins():
    weight, bias = near_the_limit(6, 1.0)
    layers = {computed: Norm(weight, bias, computed=computed) for computed in (False, True)}
    offered = {key: plain((3, 6)).capture(layer).offered("layer_norm_backward") for key, layer in layers.items()}
    assert "from_output" in offered[False]
    assert "from_output" not in offered[True]
