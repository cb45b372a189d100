"""Max pooling: gradients from the indices, or from one byte for each window."""

import pytest
import torch
from contents import Case, cases, drawn
from harness import bits
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from monetlite.operators.pooling import Window

sides = st.sampled_from([5, 6, 7, 11, 16])
shapes = st.tuples(st.integers(0, 4), st.integers(1, 5), sides, sides)


@st.composite
def poolings(draw):
    size = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    dilation = draw(st.tuples(st.integers(1, 2), st.integers(1, 2)))
    return nn.MaxPool2d(
        size,
        stride=draw(st.one_of(st.none(), st.tuples(st.integers(1, 4), st.integers(1, 4)))),
        padding=tuple(draw(st.integers(0, side // 2)) for side in size),
        dilation=dilation,
        ceil_mode=draw(st.booleans()),
    )


@drawn(max_examples=60)
@given(cases(shapes), poolings())
def test_every_way_to_run_a_max_pooling_makes_the_same_bits(case, layer):
    case.check(layer)


@drawn(max_examples=10)
@given(cases(st.tuples(st.integers(1, 4), sides, sides)), poolings())
def test_pooling_of_images_without_a_batch_makes_the_same_bits(case, layer):
    case.check(layer)
