"""Max pooling: gradients from the indices, or from one byte for each window."""

import pytest
import torch
from contents import cases, drawn, plain
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from monetlite.operators import pooling
from monetlite.operators.pooling import max_pool2d_backward_from_offsets, pooling_offsets

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


@drawn(max_examples=34)
@given(cases(shapes), poolings())
def test_every_way_to_run_a_max_pooling_makes_the_same_bits(case, layer):
    case.check(layer)


@drawn(max_examples=6)
@given(cases(st.tuples(st.integers(1, 4), sides, sides)), poolings())
def test_pooling_of_images_without_a_batch_makes_the_same_bits(case, layer):
    case.check(layer)


@pytest.mark.parametrize("size", [15, 16])
def test_the_largest_window_that_a_byte_can_address(size):
    """256 places, the last of which holds the maximum; one more row is too many."""
    x = torch.arange(1.0, 1 + 2 * 18 * 20).view(1, 2, 18, 20)
    arguments = ([16, size + 1], [1, 1], [0, 0], [1, 1])
    result, indices = torch.ops.aten.max_pool2d_with_indices.default(x, *arguments)
    offered = plain((1, 2, 18, 20)).capture(nn.MaxPool2d((16, size + 1), stride=1)).offered("max_pool2d_backward")
    assert ("from_offsets" in offered) == (size == 15)
    if size == 15:
        offsets = pooling_offsets(indices, list(x.shape), *arguments)
        assert offsets.unique().tolist() == [255]
        gradient = torch.randn_like(result)
        expected = torch.ops.aten.max_pool2d_with_indices_backward.default(gradient, x, *arguments, False, indices)
        found = max_pool2d_backward_from_offsets(gradient, list(x.shape), *arguments, False, offsets)
        assert torch.equal(found, expected)


def test_a_gradient_of_max_pooling_without_the_input_reads_indices_or_offsets_alone():
    captured = plain((2, 3, 8, 8)).capture(nn.MaxPool2d(2))
    backward, offsets = captured.operator("max_pool2d_backward"), captured.operator("pooling_offsets")
    (source,) = captured.operators[0].writes
    _, indices = captured.operator("max_pool2d").writes
    reads = {item.name: set(item.reads) for item in backward.implementations}
    gradient = reads["default"] - {source, indices}
    assert reads["from_indices"] == {*gradient, indices}
    assert reads["from_offsets"] == {*gradient, *offsets.writes}
    assert offsets.find("default").reads == (indices,)


@pytest.mark.parametrize("before", ["channels_last", "transposed", "dense"])
def test_max_pooling_of_another_layout_keeps_its_input(before):
    captured = plain((2, 3, 8, 8), before=before).capture(nn.MaxPool2d(2))
    assert captured.offered("max_pool2d_backward") == []


def test_nothing_of_the_size_of_the_input_is_made_but_the_result(monkeypatch):
    """CUDA's kernel copies an input that is not contiguous, so what stands for it has to be."""
    x = torch.randn(6, 3, 8, 8)
    arguments = ([3, 3], [2, 2], [1, 1], [1, 1])
    result, indices = torch.ops.aten.max_pool2d_with_indices.default(x, *arguments)
    gradient = torch.randn_like(result)
    offsets = pooling_offsets(indices, list(x.shape), *arguments)
    monkeypatch.setitem(pooling.CHUNK_ELEMENTS, "cpu", 2 * result[0].numel())
    for run, places, calls in (
        (pooling.max_pool2d_backward_from_indices, indices, 1),
        (max_pool2d_backward_from_offsets, offsets, 3),
    ):
        with Inputs() as seen:
            made = run(gradient, list(x.shape), *arguments, False, places)
        assert len(seen.of_pooling) == calls
        for source in seen.of_pooling:
            assert source.is_contiguous()
            assert source.untyped_storage().data_ptr() == made.untyped_storage().data_ptr()


class Inputs(TorchDispatchMode):
    """What pooling's gradient is given for its input."""

    def __init__(self):
        super().__init__()
        self.of_pooling = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.max_pool2d_with_indices_backward.grad_input:
            self.of_pooling.append(args[1])
        return func(*args, **(kwargs or {}))
