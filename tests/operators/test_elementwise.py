"""Elementwise operators in place: offered where an operand can be overwritten, with the bits of the default."""

from dataclasses import replace

import pytest
import torch
from contents import SPECIAL, cases, drawn
from hypothesis import given
from hypothesis import strategies as st
from kernels import Bench, assert_same_bits
from test_relu import shapes
from torch.nn import functional as F

from monetlite.core.graph import ValueKind
from monetlite.fx.call_encoding import spec_of
from monetlite.operators import alternatives, resolve
from monetlite.operators.traits import TRAITS

DTYPES = [torch.float32, torch.bfloat16]

TAIL = {
    "aten.leaky_relu.default": (0.01,),
    "aten.clamp.default": (-0.5, 0.5),
    "aten.masked_fill.Scalar": (torch.tensor([True, False, True, False, True]), -float("inf")),
    "aten.pow.Tensor_Scalar": (2,),
    "aten.add.Scalar": (0.3,),
    "aten.sub.Scalar": (0.3,),
    "aten.mul.Scalar": (0.3,),
    "aten.div.Scalar": (0.3,),
    "aten.threshold_backward.default": (0,),
    "aten.hardtanh_backward.default": (0.0, 6.0),
    "aten.leaky_relu_backward.default": (0.01, False),
}
"""Arguments after the tensors, where a kernel has them."""


def numbers(dtype, seed=0, columns=5):
    """A matrix of random numbers and everything special, of 160 rows: enough for the vectorised loops."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randn(160, columns, generator=generator)
    place = torch.randperm(data.numel(), generator=generator)[: 10 * len(SPECIAL)]
    data.view(-1)[place] = torch.tensor(SPECIAL * 10)
    return data.to(dtype)


def arrange(target, operands):
    """The arguments of a kernel, in its own order."""
    if target == "aten.elu_backward.default":
        gradient, source = operands
        return (gradient, 1.0, 1.0, 1.0, False, source)
    arguments = (*operands, *TAIL.get(target, ()))
    rest = resolve(target)._schema.arguments[len(arguments) :]
    missing = [item.name for item in rest if not item.kwarg_only and not item.has_default_value()]
    assert not missing, f"say in TAIL what {', '.join(missing)} of {target} are"
    return arguments


def inplace_targets():
    for name, traits in TRAITS.items():
        for overload in traits.in_place:
            yield (
                f"aten.{name}.{overload}",
                "inplace",
                2 if overload == "Tensor" or name.endswith("_backward") else 1,
            )
        if traits.commutative:
            yield f"aten.{name}.Tensor", "inplace_second", 2


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("target", "name", "tensors"), list(inplace_targets()))
def test_in_place_is_the_default_bit_for_bit(target, name, tensors, dtype):
    operands = [numbers(dtype, seed) for seed in range(tensors)]
    bench = Bench(target, *arrange(target, operands))
    found = {item.name: item for item in alternatives(bench.kernel)}
    implementation = found[name]
    position = 1 if name == "inplace_second" else 0
    assert implementation.overwrites == (position,)
    assert implementation.tolerance == 0
    result, after = bench.run(implementation)
    assert_same_bits(result, bench.expected)
    assert result.data_ptr() == after[position].data_ptr(), "it did take over the operand's memory"
    for number, operand in enumerate(operands):
        if number != position:
            assert_same_bits(after[number], operand)


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
def test_addition_with_a_factor(dtype):
    """add and sub take alpha as a keyword; the in-place variants keep it."""
    x, y = numbers(dtype, 1), numbers(dtype, 2)
    for target in ("aten.add.Tensor", "aten.sub.Tensor"):
        bench = Bench(target, x, y, alpha=0.3)
        for item in alternatives(bench.kernel):
            result, _ = bench.run(item)
            assert_same_bits(result, bench.expected)


@pytest.mark.parametrize("kind", [ValueKind.OUTPUT, ValueKind.TANGENT, ValueKind.PARAM_GRAD])
def test_what_is_held_to_the_end_of_the_step_is_not_overwritten(kind):
    x, y = numbers(torch.float32, 1), numbers(torch.float32, 2)
    assert not list(alternatives(Bench("aten.tanh.default", x, kinds=[kind]).kernel))
    names = [item.name for item in alternatives(Bench("aten.add.Tensor", x, y, kinds=[kind]).kernel)]
    assert names == ["inplace_second"]


@pytest.mark.parametrize(
    ("what", "x", "y", "offered"),
    [
        ("same layout", torch.randn(4, 6), torch.randn(4, 6), ["inplace", "inplace_second"]),
        ("broadcast second", torch.randn(4, 6), torch.randn(6), ["inplace"]),
        ("broadcast first", torch.randn(1, 6), torch.randn(4, 6), ["inplace_second"]),
        ("both broadcast", torch.randn(4, 1), torch.randn(1, 6), []),
        ("transposed first", torch.randn(6, 4).t(), torch.randn(4, 6), ["inplace_second"]),
        ("other dtype", torch.randn(4, 6).bfloat16(), torch.randn(4, 6), ["inplace_second"]),
        ("part of a storage", torch.randn(4, 12)[:, :6], torch.randn(4, 6), ["inplace_second"]),
        ("rows of a storage", torch.randn(8, 6)[:4], torch.randn(4, 6), ["inplace_second"]),
        ("expanded", torch.randn(1, 6).expand(4, 6), torch.randn(4, 6), ["inplace_second"]),
    ],
    ids=lambda item: item if isinstance(item, str) else "",
)
def test_only_a_whole_operand_of_the_results_layout_is_overwritten(what, x, y, offered):
    found = [item.name for item in alternatives(Bench("aten.add.Tensor", x, y).kernel)]
    if what == "transposed first":
        found = [name for name in found if name != "inplace"]  # TensorIterator may keep the first operand's layout
        offered = [name for name in offered if name in found]
    assert found == offered


def test_an_operand_that_is_read_twice_in_different_ways_is_not_overwritten():
    """x + x.t(): writing over x would change what is still to be read."""
    x = torch.randn(4, 4)
    bench = Bench("aten.add.Tensor", x, x)
    assert list(alternatives(bench.kernel)), "x + x reads each element where it writes it"
    first, second = bench.kernel.call.args
    turned = replace(second, node="t0_t", spec=spec_of(x.t()))
    kernel = replace(bench.kernel, call=replace(bench.kernel.call, args=(first, turned)))
    assert not list(alternatives(kernel))


def test_x_plus_x_in_place():
    bench = Bench("aten.mul.Tensor", *[torch.randn(4, 4)] * 2)
    for item in alternatives(bench.kernel):
        result, _ = bench.run(item)
        assert_same_bits(result, bench.expected)


FUNCTIONS = (
    torch.sigmoid,
    torch.tanh,
    F.leaky_relu,
    F.elu,
    F.hardswish,
    F.hardsigmoid,
    F.mish,
    lambda x: (x + x.exp()) * x / 3 - x.neg(),
    lambda x: x.abs().sqrt() + (x * x + 1).rsqrt() * x.sin() * x.cos(),
    lambda x: torch.clamp(x, -0.5, 0.5).pow(3).reciprocal() - (x - 0.3).abs().log(),
    lambda x: x.masked_fill(x > 0.5, -1.0) / (x + 2) + 0.1,
)


@drawn(max_examples=24)
@given(cases(shapes), st.sampled_from(FUNCTIONS))
def test_every_way_to_run_a_function_and_its_gradient_makes_the_same_bits(case, function):
    case.check(function)
