"""Estimated costs: operations against torch's own counts, bytes and passes by hand, the P100 as measured."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import monetlite
from monetlite.core.costs import Cost, ProfileKind
from monetlite.core.devices import Efficiency, find_device
from monetlite.core.errors import DeviceError
from monetlite.core.graph import (
    AS_TRACED,
    TILED_ROWS,
    Call,
    Implementation,
    Operator,
    OperatorGraph,
    Phase,
    Resident,
    TensorRef,
    TensorSpec,
    Value,
    ValueKind,
)
from monetlite.core.simulate import simulate
from monetlite.core.steps import plain_steps
from monetlite.profiling import estimate, roofline
from monetlite.profiling.estimate import estimate_call, estimate_profile, tensor_bytes

P100 = find_device("p100")
PERFECT = replace(
    P100,
    launch_us=0.0,
    bandwidth_bytes_per_s=1e9,
    peak_flops={"fp32": 1e9},
    efficiency=Efficiency(
        fp32_matmul=1.0,
        fp32_convolution=1.0,
        tensor_matmul=1.0,
        tensor_convolution=1.0,
        elementwise=1.0,
        normalization=1.0,
        pooling=1.0,
        resampling=1.0,
        scatter=1.0,
    ),
)
"""A millisecond is a million bytes, or a million operations."""


def tensor(*shape, name="x", dtype="float32", stride=None):
    steps = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    spec = TensorSpec(shape=shape, stride=steps if stride is None else stride, dtype=dtype)
    return TensorRef(node=name, value=None, spec=spec)


def call(target, *args, **kwargs):
    return Call(target=target, args=args, kwargs=tuple(kwargs.items()), outputs=("out",))


def convolution(image, weight, *, stride=1, padding=0, dilation=1, transposed=False, groups=1):
    pair = [(value, value) for value in (stride, padding, dilation)]
    return call("aten.convolution.default", image, weight, None, *pair, transposed, (0, 0), groups)


def convolution_backward(gradient, image, weight, mask, *, stride=1, padding=0, transposed=False, groups=1):
    args = ((stride, stride), (padding, padding), (1, 1), transposed, (0, 0), groups, mask)
    return call("aten.convolution_backward.default", gradient, image, weight, None, *args)


def milliseconds(target, *args, written_bytes, device=PERFECT, **kwargs):
    return estimate_call(call(target, *args, **kwargs), device, written_bytes).latency_ms


def test_what_streams_is_bytes_over_bandwidth():
    x, y = tensor(1000, 250), tensor(1000, 250, name="y")
    assert milliseconds("aten.add.Tensor", x, y, written_bytes=10**6) == pytest.approx(3.0)
    assert milliseconds("aten.add.Tensor", x, x, written_bytes=10**6) == pytest.approx(2.0)
    assert milliseconds("aten.relu_.default", x, written_bytes=10**6) == pytest.approx(2.0)
    expanded = tensor(1000, 250, name="bias", stride=(0, 1))
    assert milliseconds("aten.add.Tensor", x, expanded, written_bytes=10**6) == pytest.approx(2.001)
    assert milliseconds("aten.cat.default", (x, y), 1, written_bytes=2 * 10**6) == pytest.approx(4.0)


def test_unknown_targets_stream():
    x = tensor(1000, 250)
    assert milliseconds("mylib.twist.default", x, written_bytes=10**6) == pytest.approx(2.0)
    assert milliseconds("monetlite.pack_mask", x, written_bytes=31250) == pytest.approx(1.03125)
    assert milliseconds("strange", written_bytes=0) == 0.0


def test_launches_are_counted():
    assert estimate_call(call("aten.relu.default", tensor(1)), P100, 4).latency_ms == pytest.approx(0.008, rel=0.01)


def test_batch_norm_reads_its_input_twice():
    x, weight = tensor(10, 10, 50, 50), tensor(10, name="w")
    target = "aten._native_batch_norm_legit_functional.default"
    args = (x, weight, weight, tensor(10, name="mean"), tensor(10, name="var"), True, 0.1, 1e-5)
    assert milliseconds(target, *args, written_bytes=10**6) == pytest.approx(3.0, rel=1e-3)
    backward = "aten.native_batch_norm_backward.default"
    args = (
        tensor(10, 10, 50, 50, name="g"),
        x,
        weight,
        None,
        None,
        weight,
        weight,
        True,
        1e-5,
        (True, True, True),
    )
    assert milliseconds(backward, *args, written_bytes=10**6) == pytest.approx(5.0, rel=1e-3)
    rows = (x, (50,), tensor(50, name="w"), tensor(50, name="b"), 1e-5)
    assert milliseconds("aten.native_layer_norm.default", *rows, written_bytes=10**6) == pytest.approx(
        2.0, rel=1e-3
    )


def test_operands_of_which_only_the_shape_matters_are_not_read():
    gradient, source = tensor(10, 10, 25, 25, name="g"), tensor(10, 10, 50, 50)
    indices = tensor(10, 10, 25, 25, name="i", dtype="int64")
    args = (gradient, source, (2, 2), (2, 2), (0, 0), (1, 1), False, indices)
    target = "aten.max_pool2d_with_indices_backward.default"
    assert milliseconds(target, *args, written_bytes=10**6) == pytest.approx(0.25 + 0.5 + 1.0)
    without = "monetlite.max_pool2d_backward_from_indices"
    args = (gradient, source.spec.shape, *args[2:])
    assert milliseconds(without, *args, written_bytes=10**6) == pytest.approx(0.25 + 0.5 + 1.0)
    assert milliseconds("aten.new_zeros.default", source, (5,), written_bytes=20) == pytest.approx(20e-6)


def test_a_gather_reads_what_it_takes():
    table, indices = tensor(50_000, 250), tensor(10, name="i", dtype="int64")
    assert milliseconds("aten.embedding.default", table, indices, written_bytes=10_000) == pytest.approx(0.03)


def test_tensor_bytes_by_dtype():
    assert [tensor_bytes(tensor(6, dtype=dtype)) for dtype in ("float64", "bfloat16", "bool")] == [48, 12, 6]
    assert tensor_bytes(tensor()) == 4


CONVOLUTIONS = [
    {"kernel": 3, "padding": 1},
    {"kernel": 1, "stride": 2},
    {"kernel": 5, "stride": 2, "padding": 2},
    {"kernel": 4, "stride": 2, "padding": 1, "transposed": True},
]


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolutions_count_operations_as_torch_does(case, monkeypatch):
    """Forward and both gradients, against `FlopCounterMode` on the real operator."""
    seen = []

    def record(device, work, **_):
        seen.append(work)
        return Cost(latency_ms=0.0, workspace_bytes=0)

    monkeypatch.setattr(estimate.roofline, "convolution", record)
    options = {key: value for key, value in case.items() if key != "kernel"}
    kernel, transposed = case["kernel"], case.get("transposed", False)
    layer = (nn.ConvTranspose2d if transposed else nn.Conv2d)(
        6, 10, kernel, stride=case.get("stride", 1), padding=case.get("padding", 0)
    ).to("meta")
    image = torch.empty(3, 6, 12, 16, device="meta", requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        result = layer(image)
        forward = counter.get_total_flops()
        result.sum().backward()
    refs = tensor(*image.shape), tensor(*layer.weight.shape, name="w")
    estimate_call(convolution(*refs, **options), PERFECT, result.nbytes)
    gradient = tensor(*result.shape, name="g")
    estimate_call(convolution_backward(gradient, *refs, (True, True, False), **options), PERFECT, 0)
    assert [work.operations for work in seen] == [forward] * 3
    assert sum(work.operations for work in seen) == counter.get_total_flops()
    assert {math.prod(work.product) * 2 for work in seen if work.role != "input_gradient"} == {forward}
    assert sorted(work.role for work in seen) == ["forward", "input_gradient", "weight_gradient"]
    images = math.prod(image.shape) + math.prod(result.shape)
    assert {work.image_bytes for work in seen} == {4 * images}
    spatial = (tuple(image.shape[2:]), tuple(result.shape[2:]))
    assert {(work.input_size, work.output_size) for work in seen} == {spatial[::-1] if transposed else spatial}


def test_each_gradient_costs_on_its_own():
    g, x, w = tensor(8, 64, 28, 28, name="g"), tensor(8, 64, 28, 28), tensor(64, 64, 3, 3, name="w")
    costs = [
        estimate_call(convolution_backward(g, x, w, mask, padding=1), replace(P100, launch_us=0.0), 0).latency_ms
        for mask in ((True, False, False), (False, True, False), (True, True, False), (False, True, True))
    ]
    assert costs[2] == pytest.approx(costs[0] + costs[1])
    assert costs[3] > costs[1]


def test_matrix_products_count_operations_as_torch_does():
    a, b, c = tensor(300, 200), tensor(200, 400, name="b"), tensor(400, name="c")
    for target, args in (("aten.mm.default", (a, b)), ("aten.addmm.default", (c, a, b))):
        operations = estimate._operations(call(target, *args))
        assert operations == 2 * 300 * 200 * 400
    slow = replace(PERFECT, peak_flops={"fp32": 1e6})
    deep = 1 / (1 + (48 / 200) ** 2) * min(1 / (1 + 13_000 / 120_000), 300 / 320 * 400 / 416)
    expected = 2 * 300 * 200 * 400 / 1e6 * 1e3 / deep
    assert milliseconds("aten.mm.default", a, b, written_bytes=480_000, device=slow) == pytest.approx(expected)
    batched = (tensor(5, 30, 20), tensor(5, 20, 40, name="b"))
    assert estimate._operations(call("aten.bmm.default", *batched)) == 2 * 5 * 30 * 20 * 40


@pytest.mark.parametrize(
    "where", ["flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu"]
)
def test_attention_counts_two_products_forwards_and_five_backwards(where):
    q, k, v = (tensor(2, 4, 64, 32, name=name) for name in "qkv")
    product = 2 * (2 * 4) * 64 * 64 * 32
    forward, backward = f"_scaled_dot_product_{where}", f"_scaled_dot_product_{where}_backward"
    assert estimate._operations(call(f"aten.{forward}.default", q, k, v, 0.0, False)) == 2 * product
    args = (tensor(2, 4, 64, 32, name="g"), q, k, v, tensor(2, 4, 64, 32, name="o"))
    assert estimate._operations(call(f"aten.{backward}.default", *args)) == 5 * product
    assert milliseconds(f"aten.{forward}.default", q, k, v, 0.0, False, written_bytes=0) > 0


def test_precision_chooses_the_peak():
    a100, p100, v100 = find_device("a100-80gb"), P100, find_device("v100")
    assert roofline.arithmetic(a100, "float32", tf32=True) == (156e12, True)
    assert roofline.arithmetic(a100, "float32", tf32=False) == (19.5e12, False)
    assert roofline.arithmetic(a100, "bfloat16", tf32=False) == (312e12, True)
    assert roofline.arithmetic(v100, "bfloat16", tf32=True) == (15.7e12, False)
    assert roofline.arithmetic(p100, "float16", tf32=True) == (18.7e12, False)
    assert roofline.arithmetic(find_device("rtx-4090"), "float64", tf32=True)[0] == pytest.approx(82.6e12 / 32)


def test_tensor_cores_convert_contiguous_images():
    image, weight = (32, 256, 28, 28), tensor(256, 256, 3, 3, name="w")
    rows = (256 * 28 * 28, 1, 28 * 256, 256)
    a100 = find_device("a100-80gb")
    written = 4 * math.prod(image)
    contiguous = estimate_call(convolution(tensor(*image), weight, padding=1), a100, written)
    last = estimate_call(convolution(tensor(*image, stride=rows), weight, padding=1), a100, written)
    assert last.latency_ms < contiguous.latency_ms
    assert last.workspace_bytes == 0
    assert contiguous.workspace_bytes == 2 * written + tensor_bytes(weight)
    without_tf32 = replace(a100, peak_flops={key: peak for key, peak in a100.peak_flops.items() if key != "tf32"})
    strict = estimate_call(convolution(tensor(*image), weight, padding=1), without_tf32, written)
    assert strict.latency_ms > contiguous.latency_ms


# Convolutions of the P100 instances: (image, weight, stride, padding) and measured (ms, workspace in bytes).
MEASURED = [
    ((184, 256, 56, 56), (64, 256, 1, 1), 1, 0, 2.81, 0),
    ((184, 512, 28, 28), (1024, 512, 1, 1), 2, 0, 5.08, 0),
    ((184, 256, 28, 28), (256, 256, 3, 3), 2, 1, 5.73, 0),
    ((184, 512, 7, 7), (512, 512, 3, 3), 1, 1, 2.34, 151e6),
    ((176, 512, 28, 28), (512, 512, 3, 3), 1, 1, 24.94, 1310e6),
    ((11, 512, 52, 76), (512, 512, 3, 3), 1, 1, 11.08, 621e6),
    ((11, 128, 416, 608), (64, 128, 3, 3), 1, 1, 35.95, 0),
]


@pytest.mark.parametrize(("image", "weight", "stride", "padding", "measured_ms", "workspace_bytes"), MEASURED)
def test_convolutions_measured_on_a_p100(image, weight, stride, padding, measured_ms, workspace_bytes):
    size = [(points + 2 * padding - weight[2]) // stride + 1 for points in image[2:]]
    written = 4 * image[0] * weight[0] * math.prod(size)
    cost = estimate_call(
        convolution(tensor(*image), tensor(*weight, name="w"), stride=stride, padding=padding), P100, written
    )
    assert cost.latency_ms == pytest.approx(measured_ms, rel=0.10)
    assert cost.workspace_bytes == pytest.approx(workspace_bytes, rel=0.02, abs=5e6)


def test_depthwise_convolutions_are_bound_by_memory():
    x, w = tensor(8, 96, 56, 56), tensor(96, 1, 3, 3, name="w")
    cost = estimate_call(convolution(x, w, padding=1, groups=96), PERFECT, tensor_bytes(x))
    assert cost.latency_ms == pytest.approx((2 * tensor_bytes(x) + tensor_bytes(w)) / 1e6)


def test_no_workspace_larger_than_a_third_of_the_memory():
    x, w = tensor(64, 256, 56, 56), tensor(256, 256, 3, 3, name="w")
    roomy = estimate_call(convolution(x, w, padding=1), P100, tensor_bytes(x))
    tight = estimate_call(convolution(x, w, padding=1), replace(P100, memory_bytes=2**30), tensor_bytes(x))
    assert roomy.workspace_bytes > 2**30 // 3
    assert tight.workspace_bytes == 0
    assert tight.latency_ms > roomy.latency_ms


@pytest.mark.parametrize("count", [2, 4])
def test_a_convolution_in_parts_takes_the_workspace_of_one(count):
    """And copies what each part made, or adds it, for a weight's gradient."""
    shape = (176, 256, 28, 28)
    x, g, w = tensor(*shape), tensor(*shape, name="g"), tensor(256, 256, 3, 3, name="w")
    part, part_g = tensor(176 // count, *shape[1:]), tensor(176 // count, *shape[1:], name="g")
    made = tensor_bytes(part)

    whole_call = convolution(x, w, padding=1)
    chunked = replace(
        whole_call, target="monetlite.convolve_chunks", args=(*whole_call.args, count), outputs=("y",)
    )
    found = estimate_call(chunked, P100, tensor_bytes(x))
    one = estimate_call(convolution(part, w, padding=1), P100, made)
    assert one.workspace_bytes > 0
    assert found.workspace_bytes == one.workspace_bytes + made
    copied_ms = 2 * made / (P100.bandwidth_bytes_per_s * P100.efficiency.elementwise) * 1e3
    assert found.latency_ms == pytest.approx(count * (one.latency_ms + copied_ms), rel=0.01)

    whole_gradient = convolution_backward(g, x, w, (False, True, False), padding=1)
    args = (*whole_gradient.args, count)
    chunked = replace(
        whole_gradient, target="monetlite.weight_gradient_chunks", args=args, outputs=(None, "w", None)
    )
    found = estimate_call(chunked, P100, tensor_bytes(w))
    one = estimate_call(
        convolution_backward(part_g, part, w, (False, True, False), padding=1), P100, tensor_bytes(w)
    )
    assert found.workspace_bytes == one.workspace_bytes + tensor_bytes(w)
    assert found.workspace_bytes < estimate_call(whole_gradient, P100, tensor_bytes(w)).workspace_bytes


def relu_graph():
    x = tensor(1000, 250)
    relu = Implementation(name="default", reads=(), writes=(0,), call=call("aten.relu.default", x))
    loss = Implementation(name="default", reads=(0,), writes=(1,))
    values = (
        Value(name="y", kind=ValueKind.OUTPUT, size_bytes=10**6),
        Value(name="t", kind=ValueKind.TANGENT, size_bytes=10**6),
    )
    operators = (
        Operator(
            name="relu",
            family="relu",
            phase=Phase.FORWARD,
            implementations=(relu, replace(relu, name="again")),
        ),
        Operator(name="loss", family="loss", phase=Phase.BACKWARD, implementations=(loss,)),
    )
    return OperatorGraph(name="g", operators=operators, values=values, resident=Resident())


def test_profiles_say_what_they_are():
    profile = estimate_profile(relu_graph(), "NVIDIA H100 80GB HBM3")
    assert (profile.device, profile.kind) == ("h100", ProfileKind.ESTIMATED)
    assert profile.environment["float32 convolutions"] == "tf32"
    assert profile.environment["float32 matmuls"] == "fp32"
    assert profile.environment["device"] == "NVIDIA H100 SXM5 80 GB"
    first, second = profile.costs[0]
    assert first == second
    assert first.latency_ms == pytest.approx(0.005 + 2e6 / (3.35e12 * 0.8) * 1e3)
    (outside,) = profile.costs[1]
    assert (outside.latency_ms, outside.workspace_bytes) == (0.0, 0)


def test_unknown_device():
    with pytest.raises(DeviceError, match="Known: p100"):
        estimate_profile(relu_graph(), "abacus")


def test_a_traced_model_has_finite_costs_everywhere():
    from monetlite.models import build_model
    from monetlite.tracing import trace

    built = build_model("mobilenet_v2", batch=2, input_size=(64, 64), meta=True)
    model = nn.Sequential(*built.model.features[:5], nn.AdaptiveAvgPool2d(1), nn.Flatten())
    graph = trace(model, built.example_inputs)
    profile = estimate_profile(graph, "t4")
    costs = [cost for row in profile.costs for cost in row]
    assert len(costs) >= len(graph.operators) > 60
    assert all(0 <= cost.latency_ms < 10 and cost.workspace_bytes >= 0 for cost in costs)


@pytest.mark.parametrize(
    ("device", "config", "each_bytes"),
    [
        ("rtx-3090", None, 8519680),
        ("h200", None, 2**25),
        ("h200", ":4096:8", 2**25),
        ("rtx-3090", ":4096:2:16:8", 8519680),
        ("rtx-3090", ":0:0", 0),
    ],
)
def test_what_cublas_keeps_counts_for_each_part_of_a_step(device, config, each_bytes, monkeypatch):
    if config is None:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    else:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", config)
    linear, convolution = [nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)], [nn.Conv1d(8, 8, 1), nn.ReLU()]
    for layers, shape, parts in (
        (linear, (2**24, 8), 2),
        (convolution, (2**20, 8, 16), 0),
        (linear, (2**10, 8), 0),  # of a small step it would be the most
    ):
        model = nn.Sequential(*layers).to("meta")
        graph = monetlite.trace(model, torch.empty(shape, device="meta"), device=device)
        assert monetlite.profile(graph, device).graph.resident.libraries == parts * each_bytes


@pytest.mark.parametrize(("device", "tolerance"), [("p100", 1e-5), ("rtx-3090", 2e-3)])
def test_another_way_to_convolve_may_round_otherwise_in_tf32(device, tolerance):
    graph = monetlite.trace(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), torch.randn(8, 3, 8, 8))
    profile = monetlite.profile(graph, device)
    ways = [
        item for operator in profile.graph.operators for item in operator.implementations if "chunks" in item.name
    ]
    assert {item.tolerance for item in ways} == {tolerance}


@pytest.mark.parametrize("name", ["flash", "efficient", "cudnn"])
def test_causal_attention_multiplies_half_as_much(name):
    """Forward and backward, by each kernel that a GPU has."""

    class Attention(nn.Module):
        def __init__(self, causal):
            super().__init__()
            self.causal = causal

        def forward(self, x):
            return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=self.causal)

    dtype, device = {
        "flash": (torch.bfloat16, "a100-40gb"),
        "efficient": (torch.float32, "a100-40gb"),
        "cudnn": (torch.bfloat16, "h200"),
    }[name]
    operations = []
    for causal in (False, True):
        x = torch.randn(2, 4, 64, 64, dtype=dtype, requires_grad=True)
        graph = monetlite.trace(Attention(causal), x, device=device)
        calls = [item.call for operator in graph.operators for item in operator.implementations[:1] if item.call]
        found = [call for call in calls if "attention" in call.target]
        assert len(found) == 2
        assert all(name in call.target for call in found)
        operations.append([estimate._operations(call) for call in found])
    assert operations[0] == [2 * size for size in operations[1]]


@pytest.mark.parametrize(
    ("model", "shape"),
    [(nn.Linear(4, 4), (0, 4)), (nn.Conv2d(3, 8, 3), (0, 3, 6, 6)), (nn.Conv2d(8, 8, 3, padding=1), (0, 8, 6, 6))],
)
def test_products_of_no_rows_take_no_longer_than_their_launch(model, shape):
    graph = monetlite.trace(model, torch.empty(shape))
    profile = monetlite.profile(graph, "p100")
    product = next(at for at, item in enumerate(graph.operators) if item.family in ("addmm", "convolution"))
    assert profile.costs[product][0].latency_ms == pytest.approx(P100.launch_us / 1e3, rel=0.1)
    assert profile.costs[product][0].workspace_bytes == 0


def test_attention_whose_operations_torch_counts_by_tensors_is_bound_by_memory():
    queries = [tensor(128, 4, 64, name=name) for name in "qkv"]
    flash = call("aten._flash_attention_forward.default", *queries, None, None, 128, 128, 0.0, False, False)
    assert estimate_call(flash, PERFECT, 0).latency_ms == pytest.approx(3 * 128 * 4 * 64 * 4 / 1e6)


class Chain(nn.Module):
    """An MLP of many small operators, which a chain of rows takes in, between others."""

    def __init__(self, head=0):
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)
        self.head = nn.Linear(256, head) if head else None

    def forward(self, rows, targets=None):
        inner = self.up(rows)
        gate = 0.5 * inner * (1 + torch.tanh(0.8 * (inner + 0.04 * inner**3)))
        made = rows + self.down(gate)
        if self.head is None:
            return made.square().sum()
        return nn.functional.cross_entropy(self.head(made), targets)


def in_layouts(model, *inputs):
    graphs = [monetlite.trace(model, inputs, device="rtx-4090", layout=item) for item in (AS_TRACED, TILED_ROWS)]
    return [monetlite.profile(graph, "rtx-4090") for graph in graphs]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_chain_in_one_tile_takes_as_long_as_its_operators_one_by_one(dtype):
    traced, tiled = in_layouts(Chain().to(dtype), torch.zeros(8192, 256, dtype=dtype))
    assert "row_chain" in {item.family for item in tiled.graph.operators}
    one_by_one, chained = (simulate(item, plain_steps(item.graph)).latency_ms for item in (traced, tiled))
    assert chained == pytest.approx(one_by_one, rel=0.05)


def test_a_head_and_its_loss_take_as_long_as_their_operators_one_by_one():
    rows, targets = torch.zeros(4096, 256), torch.zeros(4096, dtype=torch.int64)
    traced, tiled = in_layouts(Chain(head=20_000), rows, targets)
    assert "linear_cross_entropy" in {item.family for item in tiled.graph.operators}
    one_by_one, chained = (simulate(item, plain_steps(item.graph)).latency_ms for item in (traced, tiled))
    assert chained == pytest.approx(one_by_one, rel=0.1)


def test_more_tiles_take_longer():
    _, tiled = in_layouts(Chain(head=20_000), torch.zeros(4096, 256), torch.zeros(4096, dtype=torch.int64))
    for operator, costs in zip(tiled.graph.operators, tiled.costs, strict=True):
        if operator.family in ("row_chain", "linear_cross_entropy"):
            tiles = [
                cost.latency_ms
                for item, cost in zip(operator.implementations, costs, strict=True)
                if item.name.startswith("tiles_") and "inplace" not in item.name
            ]
            assert tiles == sorted(tiles)
            assert tiles[0] >= costs[0].latency_ms
