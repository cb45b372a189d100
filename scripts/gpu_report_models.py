"""What scripts/gpu_report.py runs: the paper's five models and three transformers in plain PyTorch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from monetlite.models import build_model

PAPER_GB = ("10GB", "9GB", "8GB", "7GB", "6GB", "5GB")
PERCENT = ("80%", "60%", "50%", "40%")
SMALL = ("90%", "75%")


class Block(nn.Module):
    """A transformer's block, with normalisations first."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, length, width))
        made: torch.Tensor = x + self.mlp(self.norm2(x))
        return made


class Language(nn.Module):
    """GPT-2's sizes: tokens to the loss of predicting the next one."""

    def __init__(self, layers: int, width: int, heads: int, length: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads, causal=True) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        logits = self.head(self.norm(self.blocks(self.tokens(tokens) + self.places(places))))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Vision(nn.Module):
    """ViT's sizes: images to logits."""

    def __init__(self, layers: int, width: int, heads: int, pixels: int, patch: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.places = nn.Parameter(torch.zeros((pixels // patch) ** 2, width))
        self.blocks = nn.Sequential(*(Block(width, heads, causal=False) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2) + self.places
        scores: torch.Tensor = self.head(self.norm(self.blocks(patches)).mean(1))
        return scores


class RootMeanSquare(nn.Module):
    """Llama's normalisation, by operators that a GPU and a CPU have alike (`nn.RMSNorm` is one kernel on a GPU)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


class LlamaBlock(nn.Module):
    """A layer of Llama 3: rotated queries and keys, fewer heads of the latter, a gated MLP."""

    def __init__(self, width: int, heads: int, groups: int, hidden: int) -> None:
        super().__init__()
        self.size, self.heads, self.groups = width // heads, heads, groups
        self.norm1, self.norm2 = RootMeanSquare(width), RootMeanSquare(width)
        self.query, self.proj = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.key, self.value = (nn.Linear(width, groups * self.size, bias=False) for _ in range(2))
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        read = self.norm1(x)
        query, key, value = (
            layer(read).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        query, key = (item * cos + _turned(item) * sin for item in (query, key))
        key, value = (item.repeat_interleave(self.heads // self.groups, 1) for item in (key, value))
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        read = self.norm2(x)
        made: torch.Tensor = x + self.down(nn.functional.silu(self.gate(read)) * self.up(read))
        return made


def _turned(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


class Llama(nn.Module):
    """Llama 3.2 1B's sizes, tied embeddings included: tokens to the loss of predicting the next one."""

    def __init__(
        self, layers: int, width: int, heads: int, groups: int, hidden: int, length: int, vocabulary: int
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, groups, hidden) for _ in range(layers))
        self.norm = RootMeanSquare(width)
        size = width // heads
        angles = torch.outer(torch.arange(length), 500_000.0 ** (-torch.arange(0, size, 2) / size)).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = nn.functional.linear(self.norm(x), self.tokens.weight)
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


Built = tuple[nn.Module, tuple[Any, ...]]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model, the budgets it is solved for, and what MONeT's README says that they cost it (percent).

    `tolerance` is the least that its budgets can be met with: of other algorithms of its convolutions.
    """

    build: Callable[[bool], Built]
    budgets: tuple[str, ...] = PAPER_GB
    published: tuple[float, ...] = ()
    tolerance: float = 0.0


def built_in(name: str) -> Callable[[bool], Built]:
    """One of the paper's models at the paper's batch."""

    def build(small: bool) -> Built:
        sizes: dict[str, Any] = {"batch": 2, "input_size": (64, 64)} if small else {}
        made = build_model(name, **sizes)
        assert isinstance(made.example_inputs, tuple)
        return made.model, made.example_inputs

    return build


def gpt(small: bool) -> Built:
    """124 M parameters, 8 sequences of 1,024 tokens."""
    layers, width, heads, length, vocabulary = (2, 64, 2, 64, 60) if small else (12, 768, 12, 1024, 50257)
    model = Language(layers, width, heads, length, vocabulary)
    return model.train(), (torch.randint(0, vocabulary, (16 if small else 8, length)),)


def vit(small: bool) -> Built:
    """ViT-B/16, 128 images of 224²."""
    layers, width, heads, pixels = (2, 64, 2, 64) if small else (12, 768, 12, 224)
    return Vision(layers, width, heads, pixels, 16).train(), (torch.randn(16 if small else 128, 3, pixels, pixels),)


def llama(small: bool) -> Built:
    """1.2 B parameters in bfloat16, 8 sequences of 2,048 tokens."""
    sizes = (2, 64, 4, 2, 96, 64, 60) if small else (16, 2048, 32, 8, 8192, 2048, 128_256)
    model = Llama(*sizes).to(torch.bfloat16)
    return model.train(), (torch.randint(0, sizes[-1], (8, sizes[-2])),)


SUBJECTS = {
    "resnet50": Subject(build=built_in("resnet50"), published=(3.22, 4.68, 5.56, 7.28, 9.31, 11.95)),
    "googlenet": Subject(build=built_in("googlenet"), published=(7.13, 7.87, 8.44, 9.71, 12.14, 15.77)),
    "unet": Subject(build=built_in("unet"), published=(-4.10, -2.07, -0.09, 1.39, 4.95, 11.51), tolerance=2e-3),
    "mobilenet_v2": Subject(build=built_in("mobilenet_v2"), published=(2.40, 3.10, 4.77, 5.53, 7.55, 8.72)),
    "vgg16": Subject(
        build=built_in("vgg16"),
        budgets=("9.71GB", "8.99GB", "8.11GB", "7.3GB", "6.4GB", "5.51GB"),
        published=(-5.30, -4.64, -2.18, 1.99, 5.44, 9.11),
        tolerance=2e-3,
    ),
    "gpt": Subject(build=gpt, budgets=PERCENT),
    "vit": Subject(build=vit, budgets=PERCENT),
    "llama": Subject(build=llama, budgets=("50%", "25%")),
}
