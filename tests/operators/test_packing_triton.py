"""Triton's kernels pack and unpack as torch's operators do, bit for bit; run in Triton's interpreter on the CPU."""

import os
import subprocess
import sys
import warnings

import pytest
import torch

from monetlite.operators import packing, packing_triton

PROGRAM = """
import math
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from monetlite.operators import packing, packing_triton

SPECIAL = torch.tensor([0.0, -0.0, 1e-40, -1e-40, 3e38, math.inf, -math.inf, math.nan, 6.0, -1.0, 1.0])


def without_triton(run):
    usable, packing_triton.usable = packing_triton.usable, lambda _: False
    try:
        return run()
    finally:
        packing_triton.usable = usable


torch.manual_seed(0)
cases = 0
for count in (0, 1, 7, 8, 9, 63, 64, 4095, 4096, 4097, 10000):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.randn(count).mul_(4)
        x[::3] = SPECIAL.repeat(count // 11 + 1)[: len(x[::3])]
        x = x.to(dtype)
        if dtype is torch.bfloat16:
            x[x.abs() < 1e-38] = 0  # the interpreter (not a GPU) takes bfloat16's subnormal numbers for zeros
        assert packing_triton.usable(x)
        for bounds in ((0.0,), (-1.0, 1.0), (0.0, 6.0), (0.1,)):
            predicate = packing.Outside(*bounds)
            found = packing.pack(x, (1,), predicate)
            expected = without_triton(lambda: packing.pack(x, (1,), predicate))
            assert torch.equal(found, expected), (count, dtype, predicate)
            gradient = torch.randn(count).to(dtype)
            gradient[:: 5] = math.nan
            cleared = packing.masked_gradient(gradient, found, [1])
            expected = without_triton(lambda: packing.masked_gradient(gradient, found, [1]))
            assert torch.equal(cleared.view(torch.uint8), expected.view(torch.uint8)), (count, dtype, predicate)
            cases += 1
    kept = torch.rand(count) < 0.5
    assert torch.equal(packing.pack(kept, (1,)), without_triton(lambda: packing.pack(kept, (1,))))
strided = torch.randn(6, 5, 4).transpose(0, 2)
assert torch.equal(
    packing.pack(strided, (30, 6, 1), packing.Outside(0.0)),
    without_triton(lambda: packing.pack(strided, (30, 6, 1), packing.Outside(0.0))),
)
seen = []
make_fx(lambda tensor: seen.append(packing_triton.usable(tensor)) or tensor + 1)(torch.randn(8))
torch.func.functionalize(lambda tensor: seen.append(packing_triton.usable(tensor)) or tensor + 1)(torch.randn(8))
assert seen == [False, False], "a kernel can't be traced"
print("same bits", cases)
"""


def test_the_same_bits_as_torchs_operators():
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout == "same bits 132\n", run.stderr[-3000:]


def test_without_a_compiler_torchs_operators_pack_and_that_is_said_once(monkeypatch):
    def fail(*_):
        raise RuntimeError("Failed to find C compiler\nMore of it")

    monkeypatch.setattr(packing_triton, "_launch", fail)
    monkeypatch.setattr(packing_triton, "triton", object())
    monkeypatch.setattr(packing_triton, "_pack_true", object(), raising=False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    packing_triton.works.cache_clear()
    try:
        x = torch.tensor([1.0, -1.0, 0.0, 2.0, -3.0, 4.0, 5.0, -6.0, 7.0])
        with pytest.warns(UserWarning, match=r"\(Failed to find C compiler\); masks are packed"):
            packed = packing.pack(x, (1,), packing.Outside(0.0))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not packing_triton.usable(x)
    finally:
        packing_triton.works.cache_clear()
    monkeypatch.delenv("TRITON_INTERPRET")
    assert torch.equal(packed, packing.pack(x, (1,), packing.Outside(0.0)))
