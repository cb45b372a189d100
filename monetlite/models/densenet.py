"""DenseNet-BC (Huang et al., arXiv:1608.06993). Module names are torchvision's.

Every layer concatenates all that came before it in its block, which is what makes this network expensive
to store and worth rematerialising.
"""

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from monetlite.models.convnet_weights import init_convnet

_BOTTLENECK = 4
"""A layer's 1×1 convolution makes this many times the growth rate of channels."""


class DenseLayer(nn.Module):
    """BN, ReLU, 1×1, BN, ReLU, 3×3: from all features so far, `growth` new channels."""

    def __init__(self, in_channels: int, growth: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(in_channels)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(in_channels, _BOTTLENECK * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(_BOTTLENECK * growth)
        self.relu2 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(_BOTTLENECK * growth, growth, 3, padding=1, bias=False)

    def forward(self, features: Sequence[torch.Tensor]) -> torch.Tensor:
        x = self.conv1(self.relu1(self.norm1(torch.cat(list(features), 1))))
        out: torch.Tensor = self.conv2(self.relu2(self.norm2(x)))
        return out


class DenseBlock(nn.ModuleDict):
    """Layers that each read the block's input and every earlier layer's output."""

    def __init__(self, in_channels: int, growth: int, layers: int) -> None:
        super().__init__(
            OrderedDict(
                (f"denselayer{index + 1}", DenseLayer(in_channels + index * growth, growth))
                for index in range(layers)
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = [x]
        for layer in self.values():
            features.append(layer(features))
        return torch.cat(features, 1)


def _transition(in_channels: int, out_channels: int) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            norm=nn.BatchNorm2d(in_channels),
            relu=nn.ReLU(inplace=True),
            conv=nn.Conv2d(in_channels, out_channels, 1, bias=False),
            pool=nn.AvgPool2d(2, 2),
        )
    )


class DenseNet(nn.Module):
    """Images (N, 3, H, W) to logits (N, classes); H and W of at least 32.

    Args:
        depths: layers in each of the dense blocks; a transition between two blocks halves the channels.
        growth: channels that each layer adds.
        stem_channels: channels of the first convolution.
        classes: width of the output.
    """

    def __init__(
        self, depths: Sequence[int], *, growth: int = 32, stem_channels: int = 64, classes: int = 1000
    ) -> None:
        super().__init__()
        self.features = nn.Sequential(
            OrderedDict(
                conv0=nn.Conv2d(3, stem_channels, 7, 2, 3, bias=False),
                norm0=nn.BatchNorm2d(stem_channels),
                relu0=nn.ReLU(inplace=True),
                pool0=nn.MaxPool2d(3, 2, 1),
            )
        )
        channels = stem_channels
        for index, depth in enumerate(depths, start=1):
            self.features.add_module(f"denseblock{index}", DenseBlock(channels, growth, depth))
            channels += depth * growth
            if index < len(depths):
                self.features.add_module(f"transition{index}", _transition(channels, channels // 2))
                channels //= 2
        self.features.add_module("norm5", nn.BatchNorm2d(channels))
        self.classifier = nn.Linear(channels, classes)
        init_convnet(self, mode="fan_in", linear_std=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.features(x), inplace=True)
        x = F.adaptive_avg_pool2d(x, (1, 1))
        logits: torch.Tensor = self.classifier(torch.flatten(x, 1))
        return logits
