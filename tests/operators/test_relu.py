"""ReLU and hardtanh: gradients from the output, the input, or one bit an element."""

import pytest
import torch
from contents import ANY, cases, drawn, plain
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from monetlite.tracing import whole_kernels

sizes = st.sampled_from([1, 2, 3, 7, 8, 9, 17])
shapes = st.one_of(
    st.tuples(sizes),
    st.tuples(st.integers(0, 5), sizes),
    st.tuples(st.integers(0, 3), sizes, sizes, sizes),
)


@drawn(max_examples=18)
@given(cases(shapes))
def test_every_way_to_run_a_relu_makes_the_same_bits(case):
    case.check(nn.ReLU())


WITHOUT_NAN = tuple(kind for kind in ANY if kind not in ("special", "one nan"))
"""torch's own gradient of a hardtanh depends, for a NaN, on where in the storage it is."""


@drawn(max_examples=18)
@given(
    cases(shapes, kinds=WITHOUT_NAN),
    st.sampled_from([nn.ReLU6(), nn.Hardtanh(-0.5, 0.5), nn.Hardtanh(0.5, 1.5), nn.Hardtanh(0.1, 0.7)]),
)
def test_every_way_to_run_a_hardtanh_makes_the_same_bits(case, layer):
    case.check(layer)


@pytest.mark.parametrize(
    ("dtype", "low", "high", "offered"),
    [
        (torch.float32, 0.1, 0.7, True),
        (torch.bfloat16, 0.1, 0.7, False),
        (torch.float16, -1.0, 0.7, False),
        (torch.bfloat16, -1.0, 257.0, False),
        (torch.float16, -1.0, 257.0, True),
        (torch.bfloat16, 0.0, 6.0, True),
    ],
)
def test_bounds_that_a_type_does_not_have_keep_the_input(dtype, low, high, offered):
    """Clamped to 0.7 in bfloat16, a result is 0.699, which is below the bound."""
    names = plain((3, 8), dtype=dtype).capture(nn.Hardtanh(low, high)).offered("hardtanh_backward")
    assert {"from_output", "from_mask"} <= set(names) if offered else names == ["inplace"]


def test_a_mask_holds_for_a_gradient_that_is_laid_out_otherwise_than_captured(monkeypatch):
    """Without the table, Hardswish's gradient is laid out like one operand if fake, like the other if real."""
    monkeypatch.setattr(whole_kernels, "_LAYOUTS", {})
    case = plain((5, 7), before="dense", after="sliced")
    for layer in (nn.ReLU(), nn.ReLU6(), nn.Dropout(0.5), nn.GELU(), nn.SiLU()):
        seen = case.check(nn.Sequential(layer, nn.Hardswish()))
        assert any(name.startswith(("from_mask", "from_bfloat16")) for _, name in seen.compared), layer


def test_what_each_gradient_reads():
    """From the input or the mask, a ReLU's output need not be kept; from the mask, neither need its input."""
    captured = plain((3, 8)).capture(nn.ReLU())
    operator, mask = captured.operator("relu_backward"), captured.operator("relu_mask")
    source, output = captured.operators[0].writes, captured.operator("relu").writes
    gradient = {"default": output, "inplace": output, "from_input": source, "from_input_inplace": source}
    gradient |= {"from_mask": mask.writes, "from_mask_inplace": mask.writes}
    (tangent,) = set(operator.find("default").reads) - set(output)
    assert {item.name: set(item.reads) for item in operator.implementations} == {
        name: {tangent, *reads} for name, reads in gradient.items()
    }
    assert {item.name: item.reads for item in mask.implementations} == {"default": output, "from_input": source}
