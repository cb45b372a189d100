"""Kernels of other libraries, by stand-ins that are registered and called as theirs are.

| stand-in | of |
| --- | --- |
| `dequantize_4bit` inside of a `torch.autograd.Function`, packed weights in buffers | bitsandbytes (QLoRA) |
| `flash_forward`, and `flash_backward`, which writes into `dq`, `dk` and `dv` | flash-attn |
| `raw_norm`, which TorchDynamo can't look into | kernels that are not registered with torch |
| a tensor subclass made of integers and scales | torchao |
"""

import pytest
import torch
from small_models import twin
from thoroughness import often
from torch import Tensor, nn
from torch.nn import functional as F

import monetlite
from monetlite.core.graph import Phase

WIDTH, HEADS = 32, 2


@torch.library.custom_op("standin::dequantize_4bit", mutates_args=())
def dequantize(packed: Tensor, scales: Tensor, shape: list[int]) -> Tensor:
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten().float() - 7.5
    return (codes.view(scales.numel(), -1) * scales[:, None]).view(shape)


@dequantize.register_fake
def _(packed, scales, shape):
    return scales.new_empty(shape)


class MatMul4Bit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, packed, scales, shape):
        ctx.save_for_backward(packed, scales)
        ctx.shape = shape
        return F.linear(x, torch.ops.standin.dequantize_4bit(packed, scales, shape))

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ torch.ops.standin.dequantize_4bit(*ctx.saved_tensors, ctx.shape), None, None, None


class Linear4Bit(nn.Module):
    """Frozen weights in 4 bits, and LoRA."""

    def __init__(self):
        super().__init__()
        self.register_buffer("packed", torch.randint(0, 256, (WIDTH * WIDTH // 2,), dtype=torch.uint8))
        self.register_buffer("scales", torch.rand(WIDTH * WIDTH // 64) * 0.1)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x):
        frozen = MatMul4Bit.apply(x, self.packed, self.scales, [WIDTH, WIDTH])
        return frozen + self.up(self.down(F.dropout(x, 0.1)))


@torch.library.custom_op("standin::flash_forward", mutates_args=())
def flash_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    scores = (q @ k.transpose(-1, -2)) * scale
    sums = scores.logsumexp(-1)
    return torch.exp(scores - sums[..., None]) @ v, sums


@flash_forward.register_fake
def _(q, k, v, scale):
    return torch.empty_like(q), q.new_empty(q.shape[:-1])


@torch.library.custom_op("standin::flash_backward", mutates_args=("dq", "dk", "dv"))
def flash_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    result: Tensor,
    sums: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    scale: float,
) -> None:
    weights = torch.exp((q @ k.transpose(-1, -2)) * scale - sums[..., None])
    dv.copy_(weights.transpose(-1, -2) @ gradient)
    scores = weights * (gradient @ v.transpose(-1, -2) - (gradient * result).sum(-1, keepdim=True)) * scale
    dq.copy_(scores @ k)
    dk.copy_(scores.transpose(-1, -2) @ q)


@flash_backward.register_fake
def _(*_):
    return None


class Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, scale):
        result, sums = torch.ops.standin.flash_forward(q, k, v, scale)
        ctx.save_for_backward(q, k, v, result, sums)
        ctx.scale = scale
        return result

    @staticmethod
    def backward(ctx, gradient):
        q, k, v, result, sums = ctx.saved_tensors
        changed = [torch.empty_like(item) for item in (q, k, v)]
        torch.ops.standin.flash_backward(gradient, q, k, v, result, sums, *changed, ctx.scale)
        return *changed, None


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        split = (item.unflatten(-1, (HEADS, -1)).transpose(1, 2).contiguous() for item in self.qkv(x).chunk(3, -1))
        return self.out(Flash.apply(*split, (WIDTH // HEADS) ** -0.5).transpose(1, 2).flatten(-2))


@torch.compiler.disable
def raw_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


class RawNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return raw_norm(x, self.weight)


class Scaled(Tensor):
    """Integers, and a scale for each row."""

    @staticmethod
    def __new__(cls, integers, scales):
        return Tensor._make_wrapper_subclass(cls, integers.shape, dtype=scales.dtype, device=integers.device)

    def __init__(self, integers, scales):
        self.integers, self.scales = integers, scales

    def __repr__(self):
        return "Scaled"

    def __tensor_flatten__(self):
        return ["integers", "scales"], None

    @staticmethod
    def __tensor_unflatten__(tensors, _meta, _size, _stride):
        return Scaled(tensors["integers"], tensors["scales"])

    @classmethod
    def __torch_function__(cls, func, _types, args=(), kwargs=None):
        if func is F.linear:
            weight = args[1].integers.to(args[1].scales.dtype) * args[1].scales
            return F.linear(args[0], weight, *args[2:], **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, _types, args=(), _kwargs=None):
        assert func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten.alias.default)
        return Scaled(func(args[0].integers), func(args[0].scales))


class LinearOfSubclass(nn.Module):
    def __init__(self):
        super().__init__()
        integers = torch.randint(-127, 127, (WIDTH, WIDTH), dtype=torch.int8)
        self.weight = nn.Parameter(Scaled(integers, torch.rand(WIDTH, 1) * 0.01), requires_grad=False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x):
        return F.linear(x, self.weight) + self.up(self.down(x))


class Block(nn.Module):
    def __init__(self, of):
        super().__init__()
        self.layer, self.wide, self.narrow = of(), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.layer(x)
        return x + self.narrow(F.gelu(self.wide(x)))


class Blocks(nn.Module):
    def __init__(self, of):
        super().__init__()
        self.blocks = nn.ModuleList(Block(of) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return {"loss": x.square().mean()}


def same_steps(model, plain, steps=4):
    for number in range(steps):
        x, losses = torch.randn(4, 16, WIDTH), []
        for of in (plain, model):
            of.zero_grad()
            torch.manual_seed(number)
            losses.append(of(x)["loss"])
            losses[-1].backward()
        assert torch.equal(*losses)
        for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            if theirs.requires_grad:
                assert torch.equal(ours.grad, theirs.grad), name


@pytest.mark.parametrize("of", often([Linear4Bit, Attention, LinearOfSubclass], Attention))
def test_registered_kernels_are_operators(of):
    torch.manual_seed(0)
    model = Blocks(of).train()
    plain = twin(model)
    monetlite.within(model, budget="75%", device="rtx-4090", time_limit=0.3, whole=True)
    same_steps(model, plain)
    schedule = monetlite.schedule_of(model)
    assert schedule.peak_bytes <= schedule.budget_bytes < schedule.plain_peak_bytes


def test_kernels_that_are_not_registered_run_between_pieces():
    torch.manual_seed(0)
    model = Blocks(RawNorm).train()
    plain = twin(model)
    monetlite.within(model, budget="90%", device="rtx-4090", time_limit=0.3)
    with pytest.warns(UserWarning, match="raw_norm"):
        same_steps(model, plain)


def test_an_operator_that_changes_tensors_runs_in_place_or_on_copies():
    model = Blocks(Attention).train()
    graph = monetlite.trace(model, torch.randn(4, 16, WIDTH))
    calls = [(item, item.implementations[0].call) for item in graph.operators]
    changing = [item for item, call in calls if call is not None and call.target == "monetlite.changed"]
    assert len(changing) == 2
    for operator in changing:
        assert operator.phase is Phase.BACKWARD
        default, in_place = operator.implementations
        assert len(default.writes) == len(in_place.overwrites) == 3
    plain = twin(model)
    for names in ({"default"}, {"default", "inplace"}):
        allowed = graph.restricted(lambda item, names=names: item.name in names)
        schedule = monetlite.solve(monetlite.profile(allowed, "rtx-4090"), "80%", time_limit=0.3)
        same_steps(monetlite.MONeTWrapper(twin(model), schedule), plain, steps=1)
