"""Convolutions: each way to run each part, within what rounding in another order may do."""

import torch
from contents import MODERATE, MOSTLY_FLOAT32, RARELY, Case, cases, drawn
from hypothesis import given
from hypothesis import strategies as st
from torch import nn


@st.composite
def convolutions(draw, dimensions=2):
    """(layer, shape of its image): kernels, strides, padding, dilation and groups of all kinds."""
    pair = lambda items: draw(st.tuples(*[items] * dimensions))
    groups = draw(st.sampled_from([1, 1, 1, 2, 3]))
    into = groups * draw(st.integers(1, 4))
    out = groups * draw(st.integers(1, 4))
    if draw(st.booleans()):
        into, out = into * 8, out * 8
    size, dilation, padding = (
        pair(st.sampled_from([1, 1, 2, 3, 5])),
        pair(st.integers(1, 2)),
        pair(st.integers(0, 2)),
    )
    layer = nn.Conv2d if dimensions == 2 else {1: nn.Conv1d, 3: nn.Conv3d}[dimensions]
    stride = pair(st.sampled_from([1, 1, 2, 3]))
    if draw(st.booleans()):
        stride = (1,) * dimensions
    if draw(RARELY):
        size, padding, stride, groups = (1,) * dimensions, (0,) * dimensions, (1,) * dimensions, 1
    smallest = [max(1, (points - 1) * step + 1 - 2 * pad) for points, step, pad in zip(size, dilation, padding)]
    image = tuple(least + draw(st.integers(0, 6)) for least in smallest)
    made = layer(
        into, out, size, stride=stride, padding=padding, dilation=dilation, groups=groups, bias=draw(st.booleans())
    )
    return made, (draw(st.sampled_from([0, 1, 2, 3, 4, 5, 8, 9])), into, *image)


@drawn(max_examples=110)
@given(st.data(), convolutions())
def test_every_way_to_run_a_convolution_is_within_its_tolerance(data, drawn_convolution):
    layer, shape = drawn_convolution
    case = data.draw(cases(st.just(shape), dtypes=MOSTLY_FLOAT32, kinds=MODERATE))
    case.check(layer.to(case.dtype))
