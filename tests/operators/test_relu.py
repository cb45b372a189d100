"""ReLU and hardtanh: gradients from the output, the input, or one bit an element."""

import torch
from contents import Case, cases, drawn
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

sizes = st.sampled_from([1, 2, 3, 7, 8, 9, 17])
shapes = st.one_of(
    st.tuples(sizes),
    st.tuples(st.integers(0, 5), sizes),
    st.tuples(st.integers(0, 3), sizes, sizes, sizes),
)


@drawn(max_examples=30)
@given(cases(shapes))
def test_every_way_to_run_a_relu_makes_the_same_bits(case):
    case.check(nn.ReLU())


@drawn(max_examples=30)
@given(cases(shapes), st.sampled_from([nn.ReLU6(), nn.Hardtanh(-0.5, 0.5), nn.Hardtanh(0.5, 1.5)]))
def test_every_way_to_run_a_hardtanh_makes_the_same_bits(case, layer):
    case.check(layer)


def test_a_mask_holds_for_a_gradient_that_is_laid_out_otherwise_than_captured():
    """The gradient of hardswish is laid out like one of its operands on fake tensors, like the other on real ones."""
    case = Case(
        shape=(5, 7),
        dtype=torch.float32,
        before="dense",
        after="sliced",
        kind="normal",
        gradient="normal",
        seed=0,
        in_pieces=False,
    )
    for layer in (nn.ReLU(), nn.ReLU6(), nn.Dropout(0.5), nn.GELU(), nn.SiLU()):
        seen = case.check(nn.Sequential(layer, nn.Hardswish()))
        assert any(name.startswith(("from_mask", "from_bfloat16")) for _, name in seen.compared), layer
