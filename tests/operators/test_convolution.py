"""Convolutions: each way to run each part, within what rounding in another order may do."""

from dataclasses import replace

import pytest
import torch
from contents import ANY, MODERATE, MOSTLY_FLOAT32, RARELY, cases, drawn, plain
from hypothesis import given
from hypothesis import strategies as st
from kernels import Bench
from torch import nn

from monetlite.operators import resolve
from monetlite.operators.convolution import TOLERANCE, split_backward


@st.composite
def convolutions(draw, dimensions=2):
    """(layer, shape of its image): kernels, strides, padding, dilation and groups of all kinds."""

    def pair(items):
        return draw(st.tuples(*[items] * dimensions))

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


@drawn(max_examples=24)
@given(st.data(), convolutions())
def test_every_way_to_run_a_convolution_is_within_its_tolerance(data, drawn_convolution):
    layer, shape = drawn_convolution
    case = data.draw(cases(st.just(shape), dtypes=MOSTLY_FLOAT32, kinds=MODERATE))
    case.check(layer.to(case.dtype))


@drawn(max_examples=12)
@given(st.data(), st.one_of(convolutions(1), convolutions(3)))
def test_convolutions_of_rows_and_of_volumes_are_within_their_tolerance(data, drawn_convolution):
    layer, shape = drawn_convolution
    case = data.draw(cases(st.just(shape), dtypes=MOSTLY_FLOAT32, kinds=MODERATE))
    case.check(layer.to(case.dtype))


@drawn(max_examples=12)
@given(st.data(), convolutions())
def test_what_promises_the_bits_of_a_convolution_makes_them_of_anything(data, drawn_convolution):
    layer, shape = drawn_convolution
    case = data.draw(cases(st.just(shape), dtypes=(torch.float32, torch.bfloat16, torch.float16), kinds=ANY))
    case.check(layer.to(case.dtype), extreme=True)


LARGER = {
    "pointwise": (nn.Conv2d(64, 48, 1), (8, 64, 9, 9), {"channels_last", "chunks2", "chunks4", "matmul"}),
    "deep": (nn.Conv2d(96, 160, 3, padding=1), (8, 96, 4, 4), {"channels_last", "chunks2", "chunks4", "unfold"}),
    "large": (nn.Conv2d(16, 32, 3, stride=2), (6, 16, 33, 33), {"channels_last", "chunks2"}),
    "depthwise": (nn.Conv2d(32, 32, 3, padding=1, groups=32), (4, 32, 17, 17), {"channels_last", "chunks2"}),
    "valid": (nn.Conv2d(16, 32, 3, stride=2, padding="valid"), (6, 16, 33, 33), {"channels_last", "chunks2"}),
    "groups": (nn.Conv2d(32, 64, 3, padding=1, groups=4), (4, 32, 9, 9), {"channels_last", "chunks2"}),
}


@pytest.mark.parametrize("which", LARGER)
def test_convolutions_as_large_as_in_models_are_within_their_tolerance(which):
    layer, shape, ways = LARGER[which]
    seen = plain(shape, gradient="integers").check(layer)
    for family in ("convolution", "convolution_backward_weight"):
        assert seen.names(family) == ways
    expected = {*ways, "transposed" if layer.groups > 1 else "transposed_reordered"}
    assert seen.names("convolution_backward_input") == expected


def test_only_the_gradient_for_the_weight_needs_the_image():
    captured = plain((4, 3, 8, 8)).capture(nn.Conv2d(3, 4, 3))
    (image,) = captured.operators[0].writes
    by_family = {item.family: item for item in captured.operators}
    reads = {item.name: image in item.reads for item in by_family["convolution_backward_input"].implementations}
    assert reads.pop("default")
    assert reads
    assert not any(reads.values())
    assert all(image in item.reads for item in by_family["convolution_backward_weight"].implementations)


@pytest.mark.parametrize(
    ("layer", "before", "after", "tolerance"),
    [
        (nn.Conv2d(4, 6, 3), "contiguous", "plain", TOLERANCE),
        (nn.Conv2d(4, 6, 3), "channels_last", "plain", TOLERANCE),
        (nn.Conv2d(4, 6, 3, groups=2), "contiguous", "plain", TOLERANCE),
        (nn.Conv2d(4, 8, 3, groups=4), "contiguous", "plain", 0.0),
        (nn.Conv2d(4, 8, 3, groups=4), "channels_last", "plain", TOLERANCE),
        (nn.Conv2d(4, 6, 3), "contiguous", "channels_last", None),
        (nn.Conv2d(4, 6, 3).double(), "contiguous", "plain", TOLERANCE),
    ],
)
def test_a_transposed_convolution_promises_the_same_bits_only_where_it_is_the_same_kernel(
    layer, before, after, tolerance
):
    case = plain((2, 4, 6, 7), before=before, after=after, dtype=layer.weight.dtype)
    offered = case.capture(layer).operator("convolution_backward_input").implementations
    on_a_cpu = [
        item.tolerance
        for item in offered
        if item.name.startswith("transposed") and (not item.devices or "cpu" in item.devices)
    ]
    assert on_a_cpu == ([] if tolerance is None else [tolerance])


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    "needs", [(True, True, True), (True, True, False), (False, True, True), (True, False, False)]
)
def test_a_convolutions_backward_in_parts_is_the_joint_call(needs, groups):
    source, weight = torch.randn(4, 6, 9, 9), torch.randn(8, 6 // groups, 3, 3)
    gradient = torch.randn(4, 8, 5, 5)
    arguments = [[8] if needs[2] else None, [2, 2], [1, 1], [1, 1], False, [0, 0], groups]
    target = "aten.convolution_backward.default"
    expected = resolve(target)(gradient, source, weight, *arguments, needs)
    bench = Bench(target, gradient, source, weight, *arguments, [True, True, True])
    call = replace(
        bench.kernel.call,
        args=(*bench.kernel.call.args[:-1], tuple(needs)),
        outputs=tuple(f"r{i}" if need else None for i, need in enumerate(needs)),
    )
    parts = dict(split_backward(call))
    assert set(parts) == ({"_input"} if needs[0] else set()) | ({"_weight"} if needs[1] or needs[2] else set())
    found = {}
    for part in parts.values():
        results, _ = bench.run(replace(bench.kernel.default, call=part))
        for name, result in zip(part.outputs, results, strict=True):
            if name is not None:
                assert name not in found
                found[name] = result
    assert found.keys() == {name for name in call.outputs if name is not None}
    for i, result in enumerate(expected):
        if needs[i]:
            assert torch.equal(found[f"r{i}"], result)


def test_other_calls_are_one_part():
    call = Bench("aten.tanh.default", torch.randn(3)).kernel.call
    assert list(split_backward(call)) == [("", call)]
