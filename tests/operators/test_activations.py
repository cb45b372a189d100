"""GELU and SiLU: gradients from the input in half the bytes."""

import torch
from contents import MOSTLY_FLOAT32, cases, drawn
from hypothesis import given
from hypothesis import strategies as st
from test_relu import shapes
from torch import nn

layers = st.sampled_from([nn.GELU(), nn.GELU(approximate="tanh"), nn.SiLU()])


@drawn(max_examples=22)
@given(cases(shapes, dtypes=(*MOSTLY_FLOAT32, torch.float16)), layers)
def test_every_way_to_run_gelu_and_silu_is_within_its_tolerance(case, layer):
    case.check(layer)
