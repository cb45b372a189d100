"""Every implementation computes what the default one does, and is offered only where it may be."""

import pytest
import torch
from kernels import Bench, assert_same_bits
from torch import nn

import monetlite
from monetlite.captured.calls import spec_of
from monetlite.graph import Call, ValueKind
from monetlite.operators import again, alternatives, elementwise, resolve, split
from monetlite.operators.random import replay

SPECIAL = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    3.0,
    -3.0,
    6.0,
    0.5,
    1e-40,
    -1e-40,
    3e38,
    -3e38,
    float("inf"),
    -float("inf"),
    float("nan"),
]
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
    return (*operands, *TAIL.get(target, ()))


def inplace_targets():
    for target in elementwise._IN_PLACE:
        yield target, "inplace", 2 if target.endswith(".Tensor") else 1
    for target in elementwise._COMMUTATIVE:
        yield target, "inplace_second", 2
    for target in elementwise._GRADIENTS:
        yield target, "inplace", 2


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("target", "name", "tensors"), list(inplace_targets()))
def test_in_place_is_the_default_bit_for_bit(target, name, tensors, dtype):
    operands = [numbers(dtype, seed) for seed in range(tensors)]
    bench = Bench(target, *arrange(target, operands))
    found = {item.name: item for item in alternatives(bench.kernel)}
    implementation = found[name]
    position = 1 if name == "inplace_second" else 0
    assert implementation.overwrites == (position,)
    assert implementation.exact
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
    from dataclasses import replace

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


def relu_call(source):
    bench = Bench("aten.relu.default", source)
    return bench.kernel.call, bench.expected


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
def test_the_gradient_of_relu_from_its_input(dtype):
    source, gradient = numbers(dtype, 1), numbers(dtype, 2)
    output = torch.relu(source)
    forward = Bench("aten.relu.default", source)
    reference = forward.kernel.call.args[0]
    # In the gradient's bench the tensors are: 0 the gradient, 1 the output, 2 the ReLU's input.
    from dataclasses import replace

    writer = replace(forward.kernel.call, args=(replace(reference, value=2, node="t2"),))
    bench = Bench("aten.threshold_backward.default", gradient, output, 0, writer=writer, extra=[source])
    found = {item.name: item for item in alternatives(bench.kernel)}
    assert set(found) == {"inplace", "from_input", "from_input_inplace"}
    assert found["from_input"].reads == (0, 2), "the output is not needed"
    assert found["from_input_inplace"].overwrites == (0,)
    for item in found.values():
        result, _ = bench.run(item)
        assert_same_bits(result, bench.expected)


def test_the_gradient_of_what_is_not_a_relu_keeps_its_own_operand():
    gradient, output = torch.randn(3, 4), torch.randn(3, 4)
    for writer in (None, Call(target="aten.dropout.default", args=(), outputs=("x",))):
        bench = Bench("aten.threshold_backward.default", gradient, output, 0, writer=writer)
        assert [item.name for item in alternatives(bench.kernel)] == ["inplace"]
    source, _ = relu_call(output)
    bench = Bench("aten.threshold_backward.default", gradient, output, 0.5, writer=source)
    assert [item.name for item in alternatives(bench.kernel)] == ["inplace"], "another threshold"


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "window", [(2, 2, 0, 1, False), (3, 2, 1, 1, False), (3, 1, 1, 1, True), (2, 3, 0, 2, True)]
)
def test_the_gradient_of_max_pooling_from_indices_alone(window, dtype):
    kernel_size, stride, padding, dilation, ceil = window
    source = torch.randn(2, 3, 11, 13).to(dtype)
    source[0, 0, :4, :4] = 1.0
    source[0, 1, 2, 2] = float("inf")
    arguments = ([kernel_size] * 2, [stride] * 2, [padding] * 2, [dilation] * 2, ceil)
    output, indices = torch.ops.aten.max_pool2d_with_indices(source, *arguments)
    gradient = torch.randn_like(output)
    target = "aten.max_pool2d_with_indices_backward.default"
    bench = Bench(target, gradient, source, *arguments, indices)
    (item,) = alternatives(bench.kernel)
    assert item.name == "from_indices"
    assert 1 not in item.reads, "the input is not needed"
    result, _ = bench.run(item)
    assert_same_bits(result, bench.expected)
    assert result.stride() == bench.expected.stride()


def test_max_pooling_of_another_layout_keeps_its_input():
    source = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    arguments = ([2, 2], [2, 2], [0, 0], [1, 1], False)
    output, indices = torch.ops.aten.max_pool2d_with_indices(source, *arguments)
    bench = Bench("aten.max_pool2d_with_indices_backward.default", output, source, *arguments, indices)
    assert not list(alternatives(bench.kernel))


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
    from dataclasses import replace

    call = replace(
        bench.kernel.call,
        args=(*bench.kernel.call.args[:-1], tuple(needs)),
        outputs=tuple(f"r{i}" if need else None for i, need in enumerate(needs)),
    )
    parts = dict(split(call))
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
    assert list(split(call)) == [("", call)]


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
def test_batch_norm_run_again_is_the_first_run_without_its_side_effect(dtype):
    source = torch.randn(4, 6, 5, 5).to(dtype)
    weight, bias, mean, variance = torch.randn(6), torch.randn(6), torch.zeros(6), torch.ones(6)
    target = "aten._native_batch_norm_legit_functional.default"
    bench = Bench(target, source, weight, bias, mean, variance, True, 0.1, 1e-5)
    call = again(bench.kernel.call)
    assert call is not None
    assert {ref.value for ref in call.tensors()} == {0, 1, 2}, "running statistics are not even read"
    from dataclasses import replace

    results, _ = bench.run(replace(bench.kernel.default, call=call))
    assert len(results) == len(call.outputs) == 3
    for found, first in zip(results, bench.expected[:3], strict=True):
        assert torch.equal(found, first)
    evaluating = Bench(target, source, weight, bias, mean, variance, False, 0.1, 1e-5).kernel.call
    assert again(evaluating) is None
    assert again(Bench("aten.tanh.default", source).kernel.call) is None


@pytest.mark.parametrize(
    "target", ["aten.nothing.default", "aten.relu", "os.system.default", "relu", "aten.relu.no", ""]
)
def test_unknown_functions(target):
    with pytest.raises(KeyError):
        resolve(target)


def test_dropout_that_keeps_everything_is_not_random():
    """Attention with dropout is drawn again from the generator's state; without, no state is noted."""

    class Attention(nn.Module):
        def __init__(self, p):
            super().__init__()
            self.p, self.weight = p, nn.Parameter(torch.ones(8))

        def forward(self, x):
            x = x * self.weight
            return nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=self.p)

    x = torch.randn(2, 2, 4, 8)
    for p in (0.0, 0.5):
        graph = monetlite.trace(Attention(p), x)
        states = [op for op in graph.operators if op.family == "rng_state"]
        assert len(states) == (p != 0.0)
        assert not any(op.rerunnable for op in states)
        assert all(op.rerunnable for op in graph.operators if op.phase == "forward" and op not in states)


def test_a_traced_graph_offers_each_family_where_it_belongs():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3), nn.Tanh())
    graph = monetlite.trace(model, torch.randn(2, 3, 12, 12))
    offered = {op.name: [item.name for item in op.implementations] for op in graph.operators}
    assert offered["1"] == ["default", "inplace"]
    assert offered["1.backward"] == ["default", "inplace", "from_input", "from_input_inplace"]
    assert "from_indices" in offered["2.backward"]
    assert offered["4"] == ["default", "inplace"]
    assert offered["4.backward"] == ["default"], "the tangent is the caller's"
    for operator in graph.operators:
        for item in operator.implementations:
            assert not any(graph.values[value].held for value in item.overwrites)


def assert_overwrites_first(bench, implementation):
    assert implementation.overwrites == (0,)
    assert implementation.exact
    result, after = bench.run(implementation)
    assert_same_bits(result, bench.expected)
    assert result.data_ptr() == after[0].data_ptr(), "it did take over the operand's memory"


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("columns", [1, 5, 64, 1000, 5003])
@pytest.mark.parametrize("name", ["_softmax", "_log_softmax"])
def test_softmax_and_its_gradient_in_place_are_the_default_bit_for_bit(name, columns, dtype):
    generator = torch.Generator().manual_seed(columns)
    source = torch.randn(33, columns, generator=generator).to(dtype)
    gradient = torch.randn(33, columns, generator=generator).to(dtype)
    result = resolve(f"aten.{name}.default")(source, -1, False)
    for bench in (
        Bench(f"aten.{name}.default", source, -1, False),
        Bench(f"aten.{name}_backward_data.default", gradient, result, 1, dtype),
    ):
        (implementation,) = alternatives(bench.kernel)
        assert implementation.name == "inplace"
        assert_overwrites_first(bench, implementation)


def test_softmax_across_rows_is_not_offered_in_place():
    bench = Bench("aten._softmax.default", torch.randn(4, 5), 0, False)
    assert not list(alternatives(bench.kernel))


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5])
def test_dropout_drawn_again_is_the_first_draw_and_leaves_the_generator_alone(p):
    torch.manual_seed(3)
    source = torch.randn(1000)
    state = torch.get_rng_state()
    first = torch.ops.aten.native_dropout.default(source, p, True)
    torch.rand(17)
    after = torch.get_rng_state()
    second = replay(state, "cpu", "aten.native_dropout.default", source, p, True)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(first, second, strict=True))
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5])
def test_the_gradient_of_dropout_in_place_is_the_default_bit_for_bit(p):
    gradient, mask = numbers(torch.float32), torch.rand(160, 5) > p
    bench = Bench("aten.native_dropout_backward.default", gradient, mask, 1 / (1 - p))
    (implementation,) = alternatives(bench.kernel)
    assert_overwrites_first(bench, implementation)


def test_the_gradient_of_bfloat16_dropout_is_not_offered_in_place():
    gradient = torch.randn(8, 8, dtype=torch.bfloat16)
    bench = Bench("aten.native_dropout_backward.default", gradient, torch.rand(8, 8) > 0.1, 1 / 0.9)
    assert not list(alternatives(bench.kernel))
