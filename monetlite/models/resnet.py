"""ResNet (He et al., arXiv:1512.03385), ResNeXt (arXiv:1611.05431) and wide ResNet (arXiv:1605.07146).

The bottleneck strides in its 3×3 convolution, as torchvision's does, not in its first 1×1. Module names are
torchvision's, so its checkpoints load.
"""

from collections.abc import Sequence

import torch
from torch import nn

from monetlite.models.convnet_weights import init_convnet


def _downsample(in_channels: int, out_channels: int, stride: int) -> nn.Sequential | None:
    """The projection on a shortcut whose ends differ in shape; None where they agree."""
    if stride == 1 and in_channels == out_channels:
        return None
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 1, stride, bias=False),
        nn.BatchNorm2d(out_channels),
    )


class BasicBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut."""

    expansion = 1

    def __init__(self, in_channels: int, channels: int, *, stride: int, groups: int, width: int) -> None:
        super().__init__()
        if groups != 1 or width != channels:
            raise ValueError("groups and a width of their own are for bottleneck blocks")
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample = _downsample(in_channels, channels, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x if self.downsample is None else self.downsample(x)
        result: torch.Tensor = self.relu(out)
        return result


class Bottleneck(nn.Module):
    """1×1 down, 3×3 (in `groups`, `width` channels in all), 1×1 up to 4 × `channels`, and a shortcut."""

    expansion = 4

    def __init__(self, in_channels: int, channels: int, *, stride: int, groups: int, width: int) -> None:
        super().__init__()
        out_channels = channels * self.expansion
        self.conv1 = nn.Conv2d(in_channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, groups=groups, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out_channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _downsample(in_channels, out_channels, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        result: torch.Tensor = self.relu(out)
        return result


class ResNet(nn.Module):
    """Images (N, 3, H, W) to logits (N, classes); H and W of at least 32.

    Args:
        block: the kind of residual block.
        depths: blocks in each of the four stages.
        classes: width of the output.
        groups: groups of each bottleneck's 3×3 convolution.
        width_per_group: channels of a group in the first stage; 64 is the plain network.
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        depths: Sequence[int],
        *,
        classes: int = 1000,
        groups: int = 1,
        width_per_group: int = 64,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)

        in_channels = 64

        def stage(channels: int, depth: int, first_stride: int) -> nn.Sequential:
            nonlocal in_channels
            width = channels * width_per_group // 64 * groups
            blocks = []
            for index in range(depth):
                stride = first_stride if index == 0 else 1
                blocks.append(block(in_channels, channels, stride=stride, groups=groups, width=width))
                in_channels = channels * block.expansion
            return nn.Sequential(*blocks)

        self.layer1 = stage(64, depths[0], 1)
        self.layer2 = stage(128, depths[1], 2)
        self.layer3 = stage(256, depths[2], 2)
        self.layer4 = stage(512, depths[3], 2)

        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(in_channels, classes)
        init_convnet(self, linear_std=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: torch.Tensor = self.fc(torch.flatten(self.avgpool(x), 1))
        return logits
