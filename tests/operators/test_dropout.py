"""Dropout: in place, and its gradient from packed bits or from the generator's state."""

import torch
from contents import cases, drawn
from hypothesis import given
from hypothesis import strategies as st
from test_relu import shapes
from torch import nn


@drawn(max_examples=30)
@given(cases(shapes), st.sampled_from([0.0, 0.1, 0.25, 0.3, 0.5, 0.999, 1.0]))
def test_every_way_to_run_a_dropout_makes_the_same_bits(case, probability):
    case.check(nn.Dropout(probability))


@drawn(max_examples=8)
@given(cases(st.just((2, 3, 5, 4)), dtypes=(torch.float32, torch.float64)))
def test_random_operators_of_other_kinds_draw_the_same_again(case):
    case.check(nn.Sequential(nn.Dropout2d(0.4), nn.RReLU(), nn.AlphaDropout(0.3)))
