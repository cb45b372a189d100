"""A small network that labels every pixel, and images to train it on."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm(self.first(x)))
        return torch.relu(x + self.drop(self.second(y)))


def build(batch: int = 8) -> tuple[nn.Module, tuple[torch.Tensor]]:
    """The model and an example of what it is called with."""
    torch.manual_seed(0)
    blocks = [Block(16) for _ in range(6)]
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *blocks, nn.Conv2d(16, 5, 1))
    return model, (torch.randn(batch, 3, 96, 96),)
