"""The MONeT paper's five convolutional networks and their relatives.

All but UNet's have torchvision's module names, so its checkpoints load. Unless a network says otherwise, it takes
images (N, 3, H, W) of at least 32×32 and returns logits (N, classes).
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F


def _initialise(
    model: nn.Module, *, mode: Literal["fan_in", "fan_out"] = "fan_out", linear_std: float | None = 0.01
) -> None:
    """Initialise convolutions after He et al. (arXiv:1502.01852), biases with zero, linear layers if asked to.

    `fan_out` keeps the gradients' variance through the layers, `fan_in` the activations'.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode=mode, nonlinearity="relu")
        elif isinstance(module, nn.Linear) and linear_std is not None:
            nn.init.normal_(module.weight, 0.0, linear_std)
        else:
            continue
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def _convolution(
    in_channels: int,
    channels: int,
    kernel: int = 3,
    stride: int = 1,
    *,
    groups: int = 1,
    bias: bool = False,
    batch_norm: bool = True,
    activation: type[nn.ReLU] | type[nn.ReLU6] = nn.ReLU,
) -> list[nn.Module]:
    """A convolution that keeps the size at stride 1, batch norm if asked for, and an activation."""
    return [
        nn.Conv2d(in_channels, channels, kernel, stride, kernel // 2, groups=groups, bias=bias),
        *([nn.BatchNorm2d(channels)] if batch_norm else []),
        activation(inplace=True),
    ]


class BasicBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut."""

    expansion = 1

    def __init__(self, in_channels: int, channels: int, *, stride: int, groups: int, width: int) -> None:
        super().__init__()
        out_channels = channels * self.expansion
        shapes = [(in_channels, channels, 3, stride), (channels, channels, 3, 1)]
        if self.expansion > 1:
            shapes = [(in_channels, width, 1, 1), (width, width, 3, stride), (width, out_channels, 1, 1)]
        self.relu = nn.ReLU(inplace=True)
        self.depth = len(shapes)
        for number, (before, after, kernel, step) in enumerate(shapes, start=1):
            grouped = groups if kernel == 3 else 1
            layer = nn.Conv2d(before, after, kernel, step, kernel // 2, groups=grouped, bias=False)
            self.add_module(f"conv{number}", layer)
            self.add_module(f"bn{number}", nn.BatchNorm2d(after))
        self.downsample: nn.Sequential | None = None
        if stride != 1 or in_channels != out_channels:
            projection = nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)
            self.downsample = nn.Sequential(projection, nn.BatchNorm2d(out_channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x
        for number in range(1, self.depth + 1):
            out = self.get_submodule(f"bn{number}")(self.get_submodule(f"conv{number}")(out))
            if number < self.depth:
                out = self.relu(out)
        out += x if self.downsample is None else self.downsample(x)
        result: torch.Tensor = self.relu(out)
        return result


class Bottleneck(BasicBlock):
    """1×1 down, 3×3 with the stride (in `groups`, `width` channels in all), 1×1 up, and a shortcut."""

    expansion = 4


class _InTurn(nn.Module):
    """Runs its children in turn; what leaves `avgpool` is flattened."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name, layer in self.named_children():
            x = torch.flatten(layer(x), 1) if name == "avgpool" else layer(x)
        return x


class ResNet(_InTurn):
    """ResNet (He et al., arXiv:1512.03385), ResNeXt (arXiv:1611.05431) and wide ResNet (arXiv:1605.07146).

    Args:
        depths: blocks in each of the four stages.
        block: the kind of residual block.
        classes: width of the output.
        groups: groups of each bottleneck's 3×3 convolution.
        width_per_group: channels of a group in the first stage; 64 is the plain network.
    """

    def __init__(
        self,
        depths: Sequence[int],
        *,
        block: type[BasicBlock] = Bottleneck,
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
        for stage, depth in enumerate(depths):
            channels = 64 * 2**stage
            blocks = []
            for index in range(depth):
                blocks.append(
                    block(
                        in_channels,
                        channels,
                        stride=2 if stage and index == 0 else 1,
                        groups=groups,
                        width=channels * width_per_group // 64 * groups,
                    )
                )
                in_channels = channels * block.expansion
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(in_channels, classes)
        _initialise(self, linear_std=None)


class VGG(_InTurn):
    """VGG (Simonyan and Zisserman, arXiv:1409.1556), plain or with batch norm.

    Args:
        depths: 3×3 convolutions in each of the five stages; a 2×2 max pool ends each stage.
        batch_norm: normalise after each convolution.
    """

    def __init__(self, depths: Sequence[int], *, batch_norm: bool = False) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        in_channels = 3
        for channels, depth in zip((64, 128, 256, 512, 512), depths, strict=True):
            for _ in range(depth):
                layers += _convolution(in_channels, channels, bias=True, batch_norm=batch_norm)
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
            nn.Linear(4096, 1000),
        )
        _initialise(self)


class BasicConv2d(nn.Module):
    """Convolution without bias, batch norm, ReLU."""

    def __init__(self, in_channels: int, channels: int, kernel: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, channels, kernel, stride, kernel // 2, bias=False)
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
        self.branch2 = nn.Sequential(BasicConv2d(in_channels, threes[0], 1), BasicConv2d(*threes, 3))
        self.branch3 = nn.Sequential(BasicConv2d(in_channels, fives[0], 1), BasicConv2d(*fives, 3))
        self.branch4 = nn.Sequential(nn.MaxPool2d(3, 1, 1, ceil_mode=True), BasicConv2d(in_channels, pooled, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.branch1(x), self.branch2(x), self.branch3(x), self.branch4(x)], 1)


class GoogLeNet(_InTurn):
    """GoogLeNet (Szegedy et al., arXiv:1409.4842), the batch-normalised variant without auxiliary heads.

    As in torchvision's, the "5×5" branch uses a 3×3 kernel: its checkpoints, and the usual parameter count, depend
    on it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = BasicConv2d(3, 64, 7, 2)
        self.maxpool1 = nn.MaxPool2d(3, 2, ceil_mode=True)
        self.conv2 = BasicConv2d(64, 64, 1)
        self.conv3 = BasicConv2d(64, 192, 3)
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
        self.dropout = nn.Dropout(0.2)
        self.fc = nn.Linear(1024, 1000)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.01, a=-0.02, b=0.02)


class InvertedResidual(nn.Module):
    """1×1 expansion, depthwise 3×3, linear 1×1 projection; a shortcut where the shapes allow one."""

    def __init__(self, in_channels: int, channels: int, *, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = in_channels * expansion
        self.conv = nn.Sequential(
            *([_conv_bn_relu6(in_channels, hidden, 1)] if expansion != 1 else []),
            _conv_bn_relu6(hidden, hidden, 3, stride, groups=hidden),
            nn.Conv2d(hidden, channels, 1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.shortcut = stride == 1 and in_channels == channels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.conv(x) if self.shortcut else self.conv(x)
        return out


def _conv_bn_relu6(in_channels: int, channels: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(*_convolution(in_channels, channels, kernel, stride, groups=groups, activation=nn.ReLU6))


class MobileNetV2(nn.Module):
    """MobileNetV2 (Sandler et al., arXiv:1801.04381)."""

    # Table 2 of the paper: expansion, output channels, repeats, stride of the first repeat.
    STAGES = (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    )

    def __init__(self, *, classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = [_conv_bn_relu6(3, 32, 3, 2)]
        in_channels = 32
        for expansion, channels, repeats, first_stride in self.STAGES:
            for index in range(repeats):
                stride = first_stride if index == 0 else 1
                layers.append(InvertedResidual(in_channels, channels, stride=stride, expansion=expansion))
                in_channels = channels
        layers.append(_conv_bn_relu6(in_channels, 1280, 1))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, classes))
        _initialise(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.adaptive_avg_pool2d(self.features(x), (1, 1))
        logits: torch.Tensor = self.classifier(torch.flatten(x, 1))
        return logits


class DenseLayer(nn.Module):
    """BN, ReLU, 1×1, BN, ReLU, 3×3: from all features so far, `growth` new channels."""

    def __init__(self, in_channels: int, growth: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(in_channels)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(in_channels, 4 * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(4 * growth)
        self.relu2 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, features: list[torch.Tensor]) -> torch.Tensor:
        x = self.conv1(self.relu1(self.norm1(torch.cat(features, 1))))
        out: torch.Tensor = self.conv2(self.relu2(self.norm2(x)))
        return out


class DenseBlock(nn.ModuleDict):
    """Layers that each read the block's input and every earlier layer's output."""

    def __init__(self, in_channels: int, growth: int, layers: int) -> None:
        super().__init__(
            {f"denselayer{index + 1}": DenseLayer(in_channels + index * growth, growth) for index in range(layers)}
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = [x]
        for layer in self.values():
            features.append(layer(features))
        return torch.cat(features, 1)


class DenseNet(nn.Module):
    """DenseNet-BC (Huang et al., arXiv:1608.06993).

    Every layer concatenates all that came before it in its block, which makes this network expensive to store and
    worth recomputing.

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
        layers: OrderedDict[str, nn.Module] = OrderedDict(
            conv0=nn.Conv2d(3, stem_channels, 7, 2, 3, bias=False),
            norm0=nn.BatchNorm2d(stem_channels),
            relu0=nn.ReLU(inplace=True),
            pool0=nn.MaxPool2d(3, 2, 1),
        )
        channels = stem_channels
        for index, depth in enumerate(depths, start=1):
            layers[f"denseblock{index}"] = DenseBlock(channels, growth, depth)
            channels += depth * growth
            if index < len(depths):
                layers[f"transition{index}"] = nn.Sequential(
                    OrderedDict(
                        norm=nn.BatchNorm2d(channels),
                        relu=nn.ReLU(inplace=True),
                        conv=nn.Conv2d(channels, channels // 2, 1, bias=False),
                        pool=nn.AvgPool2d(2, 2),
                    )
                )
                channels //= 2
        layers["norm5"] = nn.BatchNorm2d(channels)
        self.features = nn.Sequential(layers)
        self.classifier = nn.Linear(channels, classes)
        _initialise(self, mode="fan_in", linear_std=None)
        nn.init.zeros_(self.classifier.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.features(x), inplace=True)
        x = F.adaptive_avg_pool2d(x, (1, 1))
        logits: torch.Tensor = self.classifier(torch.flatten(x, 1))
        return logits


class DoubleConv(nn.Sequential):
    """Twice (3×3 convolution, batch norm, ReLU), the spatial size kept."""

    def __init__(self, in_channels: int, mid_channels: int, out_channels: int) -> None:
        first = _convolution(in_channels, mid_channels, bias=True)
        super().__init__(*first, *_convolution(mid_channels, out_channels, bias=True))


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
    """UNet (Ronneberger et al., arXiv:1505.04597) with batch norm, padding and bilinear upsampling.

    Of the common variants this is the one that the MONeT authors measured (the resident bytes of their 416×608
    instance match it to the byte): the decoder upsamples bilinearly, so the deepest level stays at 512 channels and
    only the concatenation there has 1024, and each decoder's first convolution halves its input's channels. The
    output is one logit per pixel (N, 1, H, W). H and W are at least 16.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inc = DoubleConv(3, 64, 64)
        self.pool = nn.MaxPool2d(2)
        self.down1 = DoubleConv(64, 128, 128)
        self.down2 = DoubleConv(128, 256, 256)
        self.down3 = DoubleConv(256, 512, 512)
        self.down4 = DoubleConv(512, 512, 512)
        self.up1 = Up(1024, 256)
        self.up2 = Up(512, 128)
        self.up3 = Up(256, 64)
        self.up4 = Up(128, 64)
        self.outc = nn.Conv2d(64, 1, 1)
        _initialise(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        levels = [self.inc(x)]
        for down in (self.down1, self.down2, self.down3, self.down4):
            levels.append(down(self.pool(levels[-1])))
        x = levels.pop()
        for up in (self.up1, self.up2, self.up3, self.up4):
            x = up(x, levels.pop())
        logits: torch.Tensor = self.outc(x)
        return logits
