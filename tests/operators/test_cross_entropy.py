"""Cross-entropy and softmax: gradients some rows at a time, and over what they read."""

import pytest
import torch
from contents import FLOATS, cases, drawn, fill, plain
from hypothesis import given
from hypothesis import strategies as st
from kernels import assert_same_bits
from torch import nn
from torch.nn import functional as F

from monetlite.operators import resolve
from monetlite.operators.softmax import softmax_

counts = st.sampled_from([1, 2, 3, 8, 33])
classes = st.sampled_from([1, 2, 5, 16, 17, 100])
logits = st.one_of(
    st.tuples(st.integers(0, 3), classes),
    st.tuples(counts, classes),
    st.tuples(st.integers(1, 3), counts, classes),
    st.tuples(st.integers(1, 3), classes, st.just(3), st.just(4)),
)
IGNORED = 0


@st.composite
def losses(draw):
    """(how the loss is made, whether classes have weights, whether some targets are ignored)."""
    return (
        draw(st.sampled_from(["mean", "sum", "none"])),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.sampled_from([0.0, 0.1])),
    )


class CrossEntropy(nn.Module):
    def __init__(self, dtype, count, reduction, weighted, ignores, smoothing):
        super().__init__()
        weight = fill((count,), dtype, "normal", 5).abs() if weighted else None
        self.register_buffer("weight", weight)
        self.options = {"reduction": reduction, "label_smoothing": smoothing}
        if ignores:
            self.options["ignore_index"] = IGNORED

    def forward(self, x, target):
        if x.dim() == 3:
            x, target = x.flatten(0, 1), target.flatten()
        return F.cross_entropy(x, target, self.weight, **self.options)


def targets(shape, seed):
    """Classes for logits of a shape, all kinds of them."""
    count = shape[1] if len(shape) == 4 else shape[-1]
    places = (shape[0], *shape[2:]) if len(shape) == 4 else shape[:-1]
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, count, places, generator=generator), count


@drawn(max_examples=24)
@given(cases(logits, dtypes=(*FLOATS[:3], torch.float32)), losses())
def test_every_way_to_run_a_cross_entropy_makes_the_same_bits(case, options):
    target, count = targets(case.shape, case.seed)
    case.check(CrossEntropy(case.dtype, count, *options), target)


@pytest.mark.parametrize("count", [5, 64, 1000, 5003])
def test_a_large_vocabulary_makes_the_same_bits(count):
    """Rows of more and of fewer classes than the vectorised loops take at a time."""
    target, _ = targets((33, count), count)
    seen = plain((33, count), gradient="same").check(
        CrossEntropy(torch.float32, count, "mean", True, True, 0.0), target
    )
    assert seen.names("cross_entropy_backward") == {"by_rows", "inplace"}


def test_kernels_of_cross_entropy_are_merged_where_nobody_reads_between_them():
    target, count = targets((6, 9), 1)
    case = plain((6, 9))
    options = ("mean", False, False)
    merged = case.capture(CrossEntropy(torch.float32, count, *options, 0.0), target)
    assert merged.operator("cross_entropy_backward")
    apart = case.capture(CrossEntropy(torch.float32, count, *options, 0.1), target)
    assert not [item for item in apart.operators if item.family == "cross_entropy_backward"]


@drawn(max_examples=20)
@given(
    cases(logits, dtypes=FLOATS),
    st.sampled_from([-1, 0]),
    st.sampled_from([F.softmax, F.log_softmax]),
)
def test_every_way_to_run_a_softmax_makes_the_same_bits(case, dim, function):
    case.check(lambda x: function(x, dim))


@pytest.mark.parametrize("function", [F.softmax, F.log_softmax])
@pytest.mark.parametrize(
    ("before", "dim", "offered"), [("contiguous", -1, ["inplace"]), ("contiguous", 0, []), ("dense", -1, [])]
)
def test_only_a_softmax_along_rows_of_a_contiguous_tensor_is_offered_in_place(function, before, dim, offered):
    captured = plain((4, 5), before=before).capture(lambda x: function(x, dim))
    assert captured.offered(function.__name__) == offered
    if before == "contiguous":
        assert captured.offered(function.__name__ + "_backward_data") == offered


@pytest.mark.parametrize("name", ["_softmax", "_log_softmax"])
def test_a_softmax_over_what_is_not_as_captured_is_still_that_softmax(name):
    """torch's kernels write into any other layout as if it were contiguous."""
    target = f"aten.{name}.default"
    x = torch.randn(6, 4)
    expected = resolve(target)(x, -1, False)
    other = x.t().contiguous().t()
    assert softmax_(target, other, -1, False) is other
    assert_same_bits(other, expected)
    gradient = torch.randn(6, 4)
    backward = f"aten.{name}_backward_data.default"
    wanted = resolve(backward)(gradient, expected, -1, torch.float32)
    assert_same_bits(softmax_(backward, gradient.t().contiguous().t(), expected, -1, torch.float32), wanted)
