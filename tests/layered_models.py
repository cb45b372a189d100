"""Models in layers, with what layers have: attention, dropout, normalisations, keyword arguments, buffers."""

import torch
from torch import nn
from torch.nn import functional as F


class Layer(nn.Module):
    """A transformer's layer, with dropout if it is told to; it takes a mask by name."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out(attended)) * scale
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Transformer(nn.Module):
    """Layers, and a loss."""

    def __init__(self, layers: int = 3, width: int = 64, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, width), nn.Linear(width, 50)
        self.layers = nn.ModuleList(Layer(width, dropout) for _ in range(layers))

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(tokens)
        scale = torch.full_like(x, 0.5)
        for layer in self.layers:
            x = layer(x, scale=scale)
        return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())}


class Convolutions(nn.Module):
    """Residual blocks with batch norm and ReLU in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.Sequential(*(Residual(16) for _ in range(3)))
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Residual(nn.Module):
    """Convolutions around a ReLU in place, and a sum."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.norm1(self.first(x)))
        return torch.relu(x + self.norm2(self.second(y)))


def transformer(dropout: float = 0.0) -> tuple[nn.Module, tuple[torch.Tensor]]:
    torch.manual_seed(0)
    return Transformer(dropout=dropout).train(), (torch.randint(0, 50, (4, 128)),)


def convolutions() -> tuple[nn.Module, tuple[torch.Tensor]]:
    torch.manual_seed(0)
    return Convolutions().train(), (torch.randn(4, 3, 32, 32),)
