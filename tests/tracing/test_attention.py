"""Attention traced for a GPU, on a machine without one: the kernel that torch would choose there."""

import pytest
import torch
import torch.nn.functional as F
from small_models import assert_same, step, twin
from thoroughness import often
from torch import nn

import monetlite
from monetlite.core.costs import without_costs
from monetlite.core.devices import known_devices
from monetlite.core.errors import ScheduleMismatch
from monetlite.core.simulate import simulate
from monetlite.core.steps import plain_steps
from monetlite.tracing.attention_capture import _kernel

AMPERE, ADA, HOPPER, TURING, PASCAL = (8, 0), (8, 9), (9, 0), (7, 5), (6, 0)


class Attention(nn.Module):
    def __init__(self, width=32, heads=4, dropout=0.0, causal=False, mask=False):
        super().__init__()
        self.heads, self.dropout, self.causal, self.mask = heads, dropout, causal, mask
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        parts = [part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.into(x).chunk(3, -1)]
        length = x.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril() if self.mask else None
        y = F.scaled_dot_product_attention(*parts, mask, self.dropout, self.causal)
        return self.out(y.transpose(1, 2).flatten(2))


def targets(graph):
    return [op.implementations[0].call.target for op in graph.operators if op.implementations[0].call is not None]


def attention_of(graph):
    return [name.split(".")[1] for name in targets(graph) if "attention" in name]


@pytest.mark.parametrize(
    ("capability", "dtype", "changes", "expected"),
    [
        (AMPERE, torch.float32, {}, "efficient"),
        (PASCAL, torch.float32, {}, "efficient"),
        (PASCAL, torch.float16, {}, "efficient"),
        (PASCAL, torch.bfloat16, {}, "math"),
        (TURING, torch.float16, {}, "efficient"),
        (AMPERE, torch.bfloat16, {}, "flash"),
        (AMPERE, torch.bfloat16, {"mask": torch.ones(16, 16)}, "efficient"),
        (AMPERE, torch.bfloat16, {"size": 20}, "flash"),
        (AMPERE, torch.float32, {"size": 18}, "math"),
        (AMPERE, torch.bfloat16, {"size": 264}, "efficient"),
        (AMPERE, torch.bfloat16, {"size": 256, "dropout_p": 0.1}, "flash"),
        (ADA, torch.bfloat16, {"size": 256, "dropout_p": 0.1}, "efficient"),
        (ADA, torch.bfloat16, {"size": 200}, "efficient"),
        (AMPERE, torch.bfloat16, {"length": 8, "is_causal": True}, "efficient"),
        (AMPERE, torch.bfloat16, {"grouped": True, "kv_heads": 2}, "flash"),
        (AMPERE, torch.float32, {"grouped": True, "kv_heads": 2}, "math"),
        (AMPERE, torch.float64, {}, "math"),
        (HOPPER, torch.bfloat16, {}, "cudnn"),
        (HOPPER, torch.bfloat16, {"dropout_p": 0.1}, "flash"),
        (HOPPER, torch.bfloat16, {"dropout_p": 0.125}, "cudnn"),
        (HOPPER, torch.bfloat16, {"size": 136}, "flash"),
        (HOPPER, torch.float32, {}, "efficient"),
        (AMPERE, torch.float32, {"strided": True}, "math"),
    ],
)
def test_the_kernel_is_the_one_that_torch_chooses(capability, dtype, changes, expected):
    size, heads, kv_heads = changes.get("size", 64), 4, changes.get("kv_heads", 4)
    query = torch.empty(2, heads, changes.get("length", 16), size, dtype=dtype)
    key, value = (torch.empty(2, kv_heads, 16, size, dtype=dtype) for _ in range(2))
    if changes.get("strided"):
        value = torch.empty(2, kv_heads, size, 16, dtype=dtype).mT
    chosen = _kernel(
        capability,
        (query, key, value),
        changes.get("mask"),
        changes.get("dropout_p", 0.0),
        changes.get("is_causal", False),
        changes.get("grouped", False),
    )
    assert chosen == expected


@pytest.mark.thorough
def test_only_attention_differs_from_a_trace_for_the_cpu():
    model, inputs = Attention(), torch.randn(2, 16, 32)
    here, there = monetlite.trace(model, inputs), monetlite.trace(model, inputs, device="rtx-3090")
    assert attention_of(here) == [f"_scaled_dot_product_flash_attention_for_cpu{end}" for end in ("", "_backward")]
    assert attention_of(there) == [f"_scaled_dot_product_efficient_attention{end}" for end in ("", "_backward")]
    plain = [[name for name in targets(graph) if "attention" not in name] for graph in (here, there)]
    assert plain[0] == plain[1]
    assert (here.device, there.device) == ("cpu", "rtx-3090")
    convolution = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    images = torch.randn(2, 3, 8, 8)
    graphs = [monetlite.trace(convolution, images, device=device) for device in (None, "rtx-3090")]
    assert graphs[0].fingerprint == graphs[1].fingerprint


def test_with_dropout_the_probabilities_are_not_kept():
    """On a CPU they are: there is no fused kernel with dropout."""
    model, inputs = Attention(dropout=0.1), torch.randn(2, 256, 32)
    graphs = [monetlite.trace(model, inputs, device=device) for device in (None, "rtx-3090")]
    peaks = [simulate(without_costs(graph), plain_steps(graph)).peak_bytes for graph in graphs]
    probabilities = 2 * 4 * 256 * 256 * 4
    assert peaks[1] < peaks[0] - probabilities


def test_a_random_kernel_runs_again_from_the_generators_state():
    graph = monetlite.trace(Attention(dropout=0.1), torch.randn(2, 16, 32), device="rtx-3090")
    attention = next(op for op in graph.operators if op.family == "attention")
    assert [op.name for op in graph.operators if "rng_state" in op.family]
    again = attention.implementations[0].again
    assert not attention.rerunnable or (again is not None and again.target == "monetlite.replay")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("length", [16, 13])
def test_masks_and_odd_heads(dtype, length):
    """Bias rows that memory-efficient attention can't load are padded, and so are heads for flash attention."""
    model = Attention(width=80, mask=dtype == torch.float32).to(dtype)
    graph = monetlite.trace(model, torch.randn(2, length, 80, dtype=dtype), device="rtx-3090")
    kernel = "efficient" if dtype == torch.float32 else "flash"
    assert attention_of(graph)[0] == f"_scaled_dot_product_{kernel}_attention"
    pads = sum("constant_pad_nd" in name for name in targets(graph))
    if dtype == torch.float32:
        assert (pads > 0) == (length % 8 != 0)
    else:
        assert pads >= 3  # heads of 20: query, key and value


def test_under_autocast_operands_are_cast():
    model, inputs = Attention(), torch.randn(2, 16, 32)
    with torch.autocast("cpu", torch.bfloat16):
        graph = monetlite.trace(model, inputs, device="a100-40gb")
    assert attention_of(graph)[0] == "_scaled_dot_product_flash_attention"


@pytest.mark.parametrize("causal", often([False, True], True))
def test_a_schedule_for_a_gpu_runs_on_a_cpu(causal):
    """Whatever kernel attention is, it reads and writes the same, but for notes on the generator."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Attention(causal=causal) for _ in range(3)))
    inputs = (torch.randn(4, 16, 32),)
    schedule = monetlite.optimize(model, inputs, "85%", device="rtx-3090", time_limit=1)
    there = monetlite.trace(model, inputs, device="rtx-3090")
    assert schedule.fingerprint == there.fingerprint != monetlite.trace(model, inputs).fingerprint
    assert any(runs for runs in schedule.choices.before.values())
    wrapped = monetlite.MONeTWrapper(twin(model), schedule)
    assert_same(step(wrapped, inputs), step(twin(model), inputs))


def test_where_a_cpu_has_no_such_kernel_the_schedule_is_refused():
    model, inputs = Attention(dropout=0.1), torch.randn(4, 128, 32)
    schedule = monetlite.optimize(model, inputs, "100%", device="rtx-3090", time_limit=1)
    with pytest.raises(ScheduleMismatch, match="They begin to differ at"):
        monetlite.MONeTWrapper(model, schedule)(inputs)


def test_estimating_from_a_trace_of_another_device_says_so():
    model, inputs = Attention(), torch.randn(2, 16, 32)
    with pytest.warns(UserWarning, match=r'Trace it with device="rtx-3090"'):
        monetlite.profile(monetlite.trace(model, inputs), "rtx-3090")
    monetlite.profile(monetlite.trace(model, inputs, device="rtx-3090"))
    with pytest.raises(monetlite.MonetliteError, match="rtx-3090"):
        monetlite.profile(monetlite.trace(model, inputs, device="rtx-3090"), "cpu")
    with pytest.raises(monetlite.MonetliteError, match="no figures"):
        monetlite.trace(model, inputs, device="gtx-9000")


def test_every_device_has_a_compute_capability():
    assert all((5, 0) <= device.compute_capability <= (12, 1) for device in known_devices().values())
