"""GoogLeNet (Szegedy et al., arXiv:1409.4842), the batch-normalised variant without auxiliary heads.

As in torchvision's, whose module names these are, the "5×5" branch uses a 3×3 kernel: its checkpoints, and
the usual parameter count, depend on it.
"""

import torch
from torch import nn
from torch.nn import functional as F


class BasicConv2d(nn.Module):
    """Convolution without bias, batch norm, ReLU."""

    def __init__(self, in_channels: int, channels: int, kernel: int, *, stride: int = 1, padding: int = 0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, channels, kernel, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(channels, eps=0.001)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.bn(self.conv(x)), inplace=True)


class Inception(nn.Module):
    """Four branches side by side on the same input, concatenated along channels.

    Args:
        in_channels: channels of the input.
        ones: channels of the 1×1 branch.
        threes: channels of the second branch's 1×1 and 3×3.
        fives: channels of the third branch's 1×1 and (nominally 5×5) 3×3.
        pooled: channels of the 1×1 behind the max pool.
    """

    def __init__(
        self, in_channels: int, ones: int, threes: tuple[int, int], fives: tuple[int, int], pooled: int
    ) -> None:
        super().__init__()
        self.branch1 = BasicConv2d(in_channels, ones, 1)
        self.branch2 = nn.Sequential(
            BasicConv2d(in_channels, threes[0], 1),
            BasicConv2d(threes[0], threes[1], 3, padding=1),
        )
        self.branch3 = nn.Sequential(
            BasicConv2d(in_channels, fives[0], 1),
            BasicConv2d(fives[0], fives[1], 3, padding=1),
        )
        self.branch4 = nn.Sequential(
            nn.MaxPool2d(3, 1, 1, ceil_mode=True),
            BasicConv2d(in_channels, pooled, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.branch1(x), self.branch2(x), self.branch3(x), self.branch4(x)], 1)


class GoogLeNet(nn.Module):
    """Images (N, 3, H, W) to logits (N, classes); H and W of at least 32."""

    def __init__(self, *, classes: int = 1000, dropout: float = 0.2) -> None:
        super().__init__()
        self.conv1 = BasicConv2d(3, 64, 7, stride=2, padding=3)
        self.maxpool1 = nn.MaxPool2d(3, 2, ceil_mode=True)
        self.conv2 = BasicConv2d(64, 64, 1)
        self.conv3 = BasicConv2d(64, 192, 3, padding=1)
        self.maxpool2 = nn.MaxPool2d(3, 2, ceil_mode=True)

        self.inception3a = Inception(192, 64, (96, 128), (16, 32), 32)
        self.inception3b = Inception(256, 128, (128, 192), (32, 96), 64)
        self.maxpool3 = nn.MaxPool2d(3, 2, ceil_mode=True)

        self.inception4a = Inception(480, 192, (96, 208), (16, 48), 64)
        self.inception4b = Inception(512, 160, (112, 224), (24, 64), 64)
        self.inception4c = Inception(512, 128, (128, 256), (24, 64), 64)
        self.inception4d = Inception(512, 112, (144, 288), (32, 64), 64)
        self.inception4e = Inception(528, 256, (160, 320), (32, 128), 128)
        self.maxpool4 = nn.MaxPool2d(2, 2, ceil_mode=True)

        self.inception5a = Inception(832, 256, (160, 320), (32, 128), 128)
        self.inception5b = Inception(832, 384, (192, 384), (48, 128), 128)

        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(1024, classes)

        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.01, a=-0.02, b=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool1(self.conv1(x))
        x = self.maxpool2(self.conv3(self.conv2(x)))
        x = self.maxpool3(self.inception3b(self.inception3a(x)))
        x = self.inception4c(self.inception4b(self.inception4a(x)))
        x = self.maxpool4(self.inception4e(self.inception4d(x)))
        x = self.inception5b(self.inception5a(x))
        logits: torch.Tensor = self.fc(self.dropout(torch.flatten(self.avgpool(x), 1)))
        return logits
