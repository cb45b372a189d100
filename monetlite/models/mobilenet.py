"""MobileNetV2 (Sandler et al., arXiv:1801.04381). Module names are torchvision's."""

import torch
from torch import nn

from monetlite.models.convnet_weights import init_convnet

# Table 2 of the paper: expansion, output channels, repeats, stride of the first repeat.
_STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


def _conv_bn_relu6(
    in_channels: int, channels: int, kernel: int, *, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, channels, kernel, stride, (kernel - 1) // 2, groups=groups, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU6(inplace=True),
    )


class InvertedResidual(nn.Module):
    """1×1 expansion, depthwise 3×3, linear 1×1 projection; a shortcut where the shapes allow one."""

    def __init__(self, in_channels: int, channels: int, *, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = in_channels * expansion
        layers: list[nn.Module] = []
        if expansion != 1:
            layers.append(_conv_bn_relu6(in_channels, hidden, 1))
        layers += [
            _conv_bn_relu6(hidden, hidden, 3, stride=stride, groups=hidden),
            nn.Conv2d(hidden, channels, 1, bias=False),
            nn.BatchNorm2d(channels),
        ]
        self.conv = nn.Sequential(*layers)
        self.shortcut = stride == 1 and in_channels == channels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.conv(x) if self.shortcut else self.conv(x)
        return out


class MobileNetV2(nn.Module):
    """Images (N, 3, H, W) to logits (N, classes); H and W of at least 32."""

    def __init__(self, *, classes: int = 1000, dropout: float = 0.2) -> None:
        super().__init__()
        layers: list[nn.Module] = [_conv_bn_relu6(3, 32, 3, stride=2)]
        in_channels = 32
        for expansion, channels, repeats, first_stride in _STAGES:
            for index in range(repeats):
                stride = first_stride if index == 0 else 1
                layers.append(InvertedResidual(in_channels, channels, stride=stride, expansion=expansion))
                in_channels = channels
        layers.append(_conv_bn_relu6(in_channels, 1280, 1))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Dropout(dropout), nn.Linear(1280, classes))
        init_convnet(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.features(x)
        x = nn.functional.adaptive_avg_pool2d(x, (1, 1))
        logits: torch.Tensor = self.classifier(torch.flatten(x, 1))
        return logits
