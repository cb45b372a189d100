"""Steps with convolutions, traced on the CPU and taken for steps on CUDA."""

from dataclasses import replace
from functools import cache

import torch
from torch import nn

import monetlite
from monetlite.core.choices import Choices

ROLES = {
    "convolution": "forward",
    "convolution_backward_input": "input_gradient",
    "convolution_backward_weight": "weight_gradient",
}


class Block(nn.Module):
    """A residual block whose image shrinks, as in a ResNet, after a first convolution with a bias."""

    def __init__(self, channels=8):
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.conv1 = nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(2 * channels)
        self.conv2 = nn.Conv2d(2 * channels, 2 * channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(2 * channels)
        self.conv3 = nn.Conv2d(2 * channels, 2 * channels, 3, padding=1, bias=False)
        self.down = nn.Conv2d(channels, 2 * channels, 1, stride=2, bias=False)

    def forward(self, x):
        x = self.stem(x).relu()
        y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu())).relu()
        return (self.conv3(y) + self.down(x)).relu()


@cache
def traced(model=None, shape=(4, 3, 16, 16), layout="as_traced", dtype=torch.float32):
    """The step of a model on the meta device, as if it were on CUDA."""
    with torch.device("meta"):
        model, image = Block() if model is None else model(), torch.randn(shape, dtype=dtype)
    graph = monetlite.trace(model.to(dtype), image, layout=layout)
    return replace(graph, device="cuda")


def convolutions(graph):
    """(operator, role) of each convolution of a graph and each part of a convolution's backward pass."""
    return [(operator, ROLES[operator.family]) for operator in graph.operators if operator.family in ROLES]


def plans_of(operator):
    return [item for item in operator.implementations if item.name.startswith("cudnn.")]


def naming(graph, plan):
    """Choices that run every convolution by a plan, and the rest by default."""
    return Choices(implementations={operator.name: plan for operator, _ in convolutions(graph)})
