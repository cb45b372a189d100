"""The networks that monetlite brings along, with the batches and sizes of the MONeT paper's experiments."""

import importlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from monetlite.core.errors import ModelError
from monetlite.models.built import DEFAULT_BATCH, BuildOptions, BuiltModel, finish

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class _Builtin:
    title: str
    module: str
    batch: int = DEFAULT_BATCH
    size: tuple[int, int] = (224, 224)
    """Height and width of the images."""
    smallest: int = 32
    """Least height and width at which every stage still has a pixel to work on."""
    returns: str = "logits"


# Keys are the functions' names in their modules. Batches other than the default are the paper's
# (Shah et al., arXiv:2010.14501, section 5).
_BUILTINS = {
    "resnet18": _Builtin(title="ResNet-18", module="resnet"),
    "resnet34": _Builtin(title="ResNet-34", module="resnet"),
    "resnet50": _Builtin(title="ResNet-50", module="resnet", batch=184),
    "resnet101": _Builtin(title="ResNet-101", module="resnet"),
    "resnet152": _Builtin(title="ResNet-152", module="resnet"),
    "resnext50_32x4d": _Builtin(title="ResNeXt-50 32×4d", module="resnet"),
    "wide_resnet50_2": _Builtin(title="Wide ResNet-50-2", module="resnet"),
    "vgg11": _Builtin(title="VGG-11", module="vgg"),
    "vgg13": _Builtin(title="VGG-13", module="vgg"),
    "vgg16": _Builtin(title="VGG-16", module="vgg", batch=176),
    "vgg16_bn": _Builtin(title="VGG-16 with batch norm", module="vgg"),
    "vgg19": _Builtin(title="VGG-19", module="vgg"),
    "googlenet": _Builtin(title="GoogLeNet", module="googlenet", batch=320),
    "mobilenet_v2": _Builtin(title="MobileNetV2", module="mobilenet", batch=272),
    "densenet121": _Builtin(title="DenseNet-121", module="densenet"),
    "densenet161": _Builtin(title="DenseNet-161", module="densenet"),
    "densenet169": _Builtin(title="DenseNet-169", module="densenet"),
    "densenet201": _Builtin(title="DenseNet-201", module="densenet"),
    "unet": _Builtin(
        title="UNet", module="unet", batch=11, size=(416, 608), smallest=16, returns="one logit per pixel"
    ),
}


def builtin_names() -> tuple[str, ...]:
    """The canonical names, in the order in which to list them."""
    return tuple(_BUILTINS)


def canonical(name: str) -> str | None:
    """The canonical spelling of a built-in model's name, or None: `ResNet-50` is `resnet50`."""
    spellings = {re.sub(r"[-_]", "", key): key for key in _BUILTINS}
    return spellings.get(re.sub(r"[-_ ]", "", name.lower()))


def build(name: str, options: BuildOptions) -> BuiltModel:
    """Build a model by its canonical name, randomly initialised.

    Raises:
        ModelError: an image too small for the network, or an option that it has no use for.
    """
    entry = _BUILTINS[name]
    height, width = options.input_size or entry.size
    if min(height, width) < entry.smallest:
        raise ModelError(
            f"{name} can't take images of {height}×{width}: the least is {entry.smallest}×{entry.smallest}"
        )
    if options.sequence_length is not None:
        raise ModelError(f"{name} takes images, not sequences; drop the sequence length, or give an input size")
    module = importlib.import_module(f"monetlite.models.{entry.module}")
    with options.device():
        model: nn.Module = getattr(module, name)()
    images = options.image(3, entry.batch, entry.size)
    returns = f"{entry.returns}, the loss is yours"
    return finish(name, model, (images,), options, title=entry.title, returns=returns)
