"""What scripts/gpu_report.py runs: the paper's five models and two transformers in plain PyTorch."""

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
        return x + self.mlp(self.norm2(x))


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
        return self.head(self.norm(self.blocks(patches)).mean(1))


Built = tuple[nn.Module, tuple[Any, ...]]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model, the budgets it is solved for, and what MONeT's README says that they cost it (percent)."""

    build: Callable[[bool], Built]
    budgets: tuple[str, ...] = PAPER_GB
    published: tuple[float, ...] = ()


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


SUBJECTS = {
    "resnet50": Subject(build=built_in("resnet50"), published=(3.22, 4.68, 5.56, 7.28, 9.31, 11.95)),
    "googlenet": Subject(build=built_in("googlenet"), published=(7.13, 7.87, 8.44, 9.71, 12.14, 15.77)),
    "unet": Subject(build=built_in("unet"), published=(-4.10, -2.07, -0.09, 1.39, 4.95, 11.51)),
    "mobilenet_v2": Subject(build=built_in("mobilenet_v2"), published=(2.40, 3.10, 4.77, 5.53, 7.55, 8.72)),
    "vgg16": Subject(
        build=built_in("vgg16"),
        budgets=("9.71GB", "8.99GB", "8.11GB", "7.3GB", "6.4GB", "5.51GB"),
        published=(-5.30, -4.64, -2.18, 1.99, 5.44, 9.11),
    ),
    "gpt": Subject(build=gpt, budgets=PERCENT),
    "vit": Subject(build=vit, budgets=PERCENT),
}
