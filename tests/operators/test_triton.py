"""Triton's kernels make the same bits as torch's operators, run in Triton's interpreter; and they compile."""

import os
import subprocess
import sys
import warnings

import pytest
import torch

from monetlite.operators import packing, triton_kernels

MASKS = """
import itertools, math, sys
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from monetlite.operators import dropout, packing, pooling
from monetlite.operators.triton_kernels import usable

SPECIAL = torch.tensor([0.0, -0.0, 1e-40, -1e-40, 3e38, math.inf, -math.inf, math.nan, 6.0, -1.0, 1.0])


def without_triton(run):
    switched = [(module, module.usable) for module in (packing, pooling)]
    for module, _ in switched:
        module.usable = lambda *_: False
    try:
        return run()
    finally:
        for module, kept in switched:
            module.usable = kept


def check(run, *what):
    found, expected = run(), without_triton(run)
    assert found.stride() == expected.stride(), what
    assert torch.equal(found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)), what


torch.manual_seed(0)
cases = 0
for count in (0, 1, 7, 8, 9, 63, 4096, 4097, 10000):
    for dtype in (torch.float32, torch.bfloat16, torch.float16) if count in (7, 4097) else (torch.float32,):
        x = torch.randn(count).mul_(4)
        x[::3] = SPECIAL.repeat(count // 11 + 1)[: len(x[::3])]
        x = x.to(dtype)
        if dtype is torch.bfloat16:
            x[x.abs() < 1e-38] = 0  # the interpreter (not a GPU) takes bfloat16's subnormal numbers for zeros
        assert usable(x)
        gradient = torch.randn(count).to(dtype)
        gradient[:: 5] = math.nan
        for bounds in ((0.0,), (-1.0, 1.0), (0.0, 6.0), (0.1,)):
            check(lambda: packing.pack(x, (1,), *bounds), count, dtype, bounds)
            packed = packing.pack(x, (1,), *bounds)
            check(lambda: packing.masked_gradient(gradient, packed, [1]), count, dtype, bounds)
            check(lambda: packing.masked_gradient_(gradient.clone(), packed, [1]), count, dtype, bounds)
            cases += 1
    kept = torch.rand(count) < 0.5
    check(lambda: packing.pack(kept, (1,)), count)
    mask, gradient = packing.pack(kept, (1,)), torch.randn(count)
    gradient[:: 3] = SPECIAL.repeat(count // 11 + 1)[: len(gradient[:: 3])]
    check(lambda: dropout.dropout_backward_from_mask(gradient, mask, [1], 1 / 0.7), count)
    check(lambda: dropout.dropout_backward_from_mask_(gradient.clone(), mask, [1], 1 / 0.7), count)
strided = torch.randn(6, 5, 4).transpose(0, 2)
check(lambda: packing.pack(strided, (30, 6, 1), 0.0))
for tensor in (torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.randn(2, 3, 4, 5)):
    packed = packing.pack(tensor, tensor.stride(), 0.0)
    for strides in (list(tensor.stride()), [60, 1, 15, 3], [60, 20, 5, 1]):
        check(lambda: packing.masked_gradient(tensor, packed, strides), strides)
        check(lambda: dropout.dropout_backward_from_mask(tensor, packed, strides, 2.0), strides)
half = torch.randn(999).half()  # rounded once from float32, as on a GPU
mask = packing.pack(kept[:999], (1,))
found = dropout.dropout_backward_from_mask(half, mask, [1], 1 / 0.7)
assert torch.equal(found, (half.float() * kept[:999] * torch.tensor(1 / 0.7)).half())
from torch._subclasses.fake_tensor import FakeTensorMode
seen = [usable(FakeTensorMode().from_tensor(torch.randn(8)))]
make_fx(lambda tensor: seen.append(usable(tensor)) or tensor + 1)(torch.randn(8))
torch.func.functionalize(lambda tensor: seen.append(usable(tensor)) or tensor + 1)(torch.randn(8))
assert seen == [False, False, False], "a kernel can't be traced"
print("same bits", cases)
"""

POOLING = """
served = 0
both, one, other = (False, True), (False,), (True,)
# The last one takes several blocks.
images = ((2, 17, 19), both, 9), ((2, 9, 7, 6), one, 9), ((1, 34, 33), other, 3)
windows = (
    (2, 2, 0, 1), (3, 2, 1, 1), (3, 1, 1, 1), ((3, 2), (1, 3), (1, 0), 1), (5, 1, 2, 1), (2, 3, 0, 1), (3, 2, 1, 2),
    ((2, 3), 2, 1, (3, 1)), ((4, 16), 2, (2, 8), 1),
)
tried = [case for shape, ceils, count in images for case in itertools.product([shape], windows[:count], ceils)]
for shape, (size, stride, padding, dilation), ceil in tried:
    image = torch.randn(shape)
    image[image > 1.5] = 2.0  # ties
    image[..., 0, 0] = math.nan
    try:
        made, indices = torch.ops.aten.max_pool2d_with_indices(image, size, stride, padding, dilation, ceil)
    except RuntimeError:
        continue  # smaller than the window
    rest = [list(pooling._pair(pair)) for pair in (size, stride, padding, dilation)]
    window = pooling.PoolingWindow.of(shape, *rest)
    served += pooling.fits_triton(window, indices)
    check(lambda: pooling.pooling_offsets(indices, list(shape), *rest), shape, rest)
    offsets = pooling.pooling_offsets(indices, list(shape), *rest)
    gradient = torch.randn_like(made)
    gradient.flatten()[::7] = math.inf
    gradient.flatten()[::5] = -0.0
    run = lambda: pooling.max_pool2d_backward_from_offsets(gradient, list(shape), *rest, ceil, offsets)
    check(run, shape, rest, ceil)
    plain = torch.ops.aten.max_pool2d_with_indices_backward(gradient, image, *rest, ceil, indices)
    assert torch.equal(run().nan_to_num(7), plain.nan_to_num(7)), (shape, rest, ceil)
narrow = pooling.PoolingWindow.of((1, 2, 2), 3, 1, 1, 1)
assert not pooling.fits_triton(narrow, torch.zeros(1, 2, 2, dtype=torch.int64)), "two places of one index"
image = torch.randn(1, 2, 2)
_, indices = torch.ops.aten.max_pool2d_with_indices(image, 3, 1, 1, 1, False)
rest = [[3, 3], [1, 1], [1, 1], [1, 1]]
offsets = pooling.pooling_offsets(indices, [1, 2, 2], *rest)
plain = torch.ops.aten.max_pool2d_with_indices_backward(image, image, *rest, False, indices)
assert torch.equal(pooling.max_pool2d_backward_from_offsets(image, [1, 2, 2], *rest, False, offsets), plain)
made_up = torch.randint(0, 17 * 19, (2, 8, 9))
wrong = pooling.pooling_offsets(made_up, [2, 17, 19], [3, 3], [2, 2], [0, 0], [1, 1])
assert wrong.max() < 9, "of indices outside of their windows"
print("same bits", served)
"""


def interpreted(program):
    run = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout, run.stderr[-3000:]
    return run.stdout.splitlines()


def test_the_same_bits_as_torchs_operators():
    pytest.importorskip("triton")
    masks, pooled = interpreted(MASKS + POOLING)
    assert masks == "same bits 52"
    assert int(pooled.removeprefix("same bits ")) > 20


FLOAT, BYTE, INDEX, COUNT = "*fp32", "*u8", "*i64", "i32"
WINDOW = {"WINDOW": (3, 3), "STRIDE": (2, 2), "PADDING": (1, 1), "DILATION": (1, 1)}
PLANE = {"PLANES": 1, "BLOCK": 1024}
KERNELS = {
    "pack_outside": ([FLOAT, BYTE, COUNT, "fp32", "fp32"], {"BYTES": 512}),
    "pack_true": ([BYTE, BYTE, COUNT], {"BYTES": 512}),
    "cleared": ([FLOAT, BYTE, FLOAT, COUNT], {"BYTES": 512}),
    "scaled": ([FLOAT, BYTE, FLOAT, COUNT, "fp32"], {"BYTES": 512}),
    "pooling_offsets": ([INDEX, BYTE, *[COUNT] * 4], {**WINDOW, **PLANE}),
    "pooling_gradient": ([FLOAT, BYTE, FLOAT, *[COUNT] * 5], {**WINDOW, **PLANE}),
    "write_one": ([BYTE], {}),
}


@pytest.mark.parametrize("capability", [75, 80, 90])
@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_compiles(name, capability):
    """For GPUs from Turing on, with no GPU: down to their machine code, for each type of gradient."""
    triton = pytest.importorskip("triton")
    backends = pytest.importorskip("triton.backends.compiler")
    types, constants = KERNELS[name]
    kernel = getattr(triton_kernels, name)
    assert len(kernel.arg_names) == len(types) + len(constants)
    for dtype in ("*fp32", "*fp16") if capability == 75 else ("*fp32", "*bf16"):
        replaced = [dtype if kind == FLOAT else kind for kind in types]
        signature = dict(zip(kernel.arg_names, replaced + ["constexpr"] * len(constants), strict=True))
        source = triton.compiler.ASTSource(fn=kernel, signature=signature, constexprs=constants)
        compiled = triton.compile(source, target=backends.GPUTarget("cuda", capability, 32))
        assert len(compiled.asm["cubin"]) > 1000


def test_every_kernel_is_tried():
    triton = pytest.importorskip("triton")
    kernels = {name for name, kernel in vars(triton_kernels).items() if isinstance(kernel, triton.JITFunction)}
    parts = {"_elements", "_plane_elements", "_store", "_bits"}  # of the others
    assert kernels - parts == set(KERNELS)


def test_without_a_compiler_torchs_operators_pack_and_that_is_said_once(monkeypatch):
    def fail(*_):
        raise RuntimeError("Failed to find C compiler\nMore of it")

    monkeypatch.setattr(triton_kernels, "launch", fail)
    monkeypatch.setattr(triton_kernels, "triton", object())
    monkeypatch.setattr(triton_kernels, "write_one", object(), raising=False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    triton_kernels.works.cache_clear()
    try:
        x = torch.tensor([1.0, -1.0, 0.0, 2.0, -3.0, 4.0, 5.0, -6.0, 7.0])
        with pytest.warns(UserWarning, match=r"\(Failed to find C compiler\); masks and offsets are packed"):
            packed = packing.pack(x, (1,), 0.0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not triton_kernels.usable(x)
    finally:
        triton_kernels.works.cache_clear()
    monkeypatch.delenv("TRITON_INTERPRET")
    assert torch.equal(packed, packing.pack(x, (1,), 0.0))
