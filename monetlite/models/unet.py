"""UNet (Ronneberger et al., arXiv:1505.04597) with batch norm, padding and bilinear upsampling.

Of the common variants this is the one that the MONeT authors measured (the resident bytes of their 416×608
instance match it to the byte): the decoder upsamples bilinearly, so the deepest level stays at 512 channels
and only the concatenation there has 1024, and each decoder's first convolution halves its input's channels.
One logit per pixel: a foreground mask, for a binary cross-entropy loss outside of the model.
"""

import torch
from torch import nn
from torch.nn import functional as F

from monetlite.models.convnet_weights import init_convnet


class DoubleConv(nn.Sequential):
    """Twice (3×3 convolution, batch norm, ReLU), the spatial size kept."""

    def __init__(self, in_channels: int, mid_channels: int, out_channels: int) -> None:
        super().__init__(
            nn.Conv2d(in_channels, mid_channels, 3, padding=1),
            nn.BatchNorm2d(mid_channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(mid_channels, out_channels, 3, padding=1),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
        )


class Up(nn.Module):
    """Upsample to the skip connection's size, concatenate with it, convolve twice."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = DoubleConv(in_channels, in_channels // 2, out_channels)

    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        x = F.interpolate(x, size=skip.shape[-2:], mode="bilinear", align_corners=True)
        out: torch.Tensor = self.conv(torch.cat([skip, x], 1))
        return out


class UNet(nn.Module):
    """Images (N, 3, H, W) to logits (N, classes, H, W); H and W of at least 16, any size above."""

    def __init__(self, *, classes: int = 1, in_channels: int = 3) -> None:
        super().__init__()
        self.inc = DoubleConv(in_channels, 64, 64)
        self.pool = nn.MaxPool2d(2)
        self.down1 = DoubleConv(64, 128, 128)
        self.down2 = DoubleConv(128, 256, 256)
        self.down3 = DoubleConv(256, 512, 512)
        self.down4 = DoubleConv(512, 512, 512)
        self.up1 = Up(1024, 256)
        self.up2 = Up(512, 128)
        self.up3 = Up(256, 64)
        self.up4 = Up(128, 64)
        self.outc = nn.Conv2d(64, classes, 1)
        init_convnet(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        level1 = self.inc(x)
        level2 = self.down1(self.pool(level1))
        level3 = self.down2(self.pool(level2))
        level4 = self.down3(self.pool(level3))
        x = self.down4(self.pool(level4))
        x = self.up1(x, level4)
        x = self.up2(x, level3)
        x = self.up3(x, level2)
        logits: torch.Tensor = self.outc(self.up4(x, level1))
        return logits
