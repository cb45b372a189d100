"""VGG (Simonyan and Zisserman, arXiv:1409.1556), plain or with batch norm. Module names are torchvision's."""

from collections.abc import Sequence

import torch
from torch import nn

from monetlite.models.convnet_weights import init_convnet

_STAGE_CHANNELS = (64, 128, 256, 512, 512)


class VGG(nn.Module):
    """Images (N, 3, H, W) to logits (N, classes); H and W of at least 32.

    The classifier, whose first layer holds three quarters of VGG-16's parameters, drops half of its
    activations in training.

    Args:
        depths: 3×3 convolutions in each of the five stages; a 2×2 max pool ends each stage.
        classes: width of the output.
        batch_norm: normalise after each convolution.
    """

    def __init__(self, depths: Sequence[int], *, classes: int = 1000, batch_norm: bool = False) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        in_channels = 3
        for channels, depth in zip(_STAGE_CHANNELS, depths, strict=True):
            for _ in range(depth):
                layers.append(nn.Conv2d(in_channels, channels, 3, padding=1))
                if batch_norm:
                    layers.append(nn.BatchNorm2d(channels))
                layers.append(nn.ReLU(inplace=True))
                in_channels = channels
            layers.append(nn.MaxPool2d(2, 2))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d((7, 7))
        self.classifier = nn.Sequential(
            nn.Linear(in_channels * 7 * 7, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(4096, classes),
        )
        init_convnet(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.avgpool(self.features(x))
        logits: torch.Tensor = self.classifier(torch.flatten(x, 1))
        return logits
