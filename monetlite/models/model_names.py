"""Models by name: the networks that monetlite brings along, other libraries' models, and people's own."""

import importlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from monetlite.core.errors import ModelError
from monetlite.core.spelling import close_matches
from monetlite.models import library_models, own_models
from monetlite.models.built_model import DEFAULT_BATCH, BuildOptions, BuiltModel, finish

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class _Network:
    """A network that monetlite brings along.

    Attributes:
        make: makes it, from the module `convnets`.
        size: height and width of the images. smallest: where every stage still has a pixel to work on.
    """

    title: str
    make: "Callable[[Any], nn.Module]"
    batch: int = DEFAULT_BATCH
    size: tuple[int, int] = (224, 224)
    smallest: int = 32
    returns: str = "logits"


# Batches other than the default, and the UNet's size, are the paper's (Shah et al., arXiv:2010.14501, section 5).
_NETWORKS = {
    "resnet18": _Network("ResNet-18", lambda net: net.ResNet((2, 2, 2, 2), block=net.BasicBlock)),
    "resnet34": _Network("ResNet-34", lambda net: net.ResNet((3, 4, 6, 3), block=net.BasicBlock)),
    "resnet50": _Network("ResNet-50", lambda net: net.ResNet((3, 4, 6, 3)), batch=184),
    "resnet101": _Network("ResNet-101", lambda net: net.ResNet((3, 4, 23, 3))),
    "resnet152": _Network("ResNet-152", lambda net: net.ResNet((3, 8, 36, 3))),
    "resnext50_32x4d": _Network(
        "ResNeXt-50 32×4d",
        lambda net: net.ResNet((3, 4, 6, 3), groups=32, width_per_group=4),
    ),
    "wide_resnet50_2": _Network("Wide ResNet-50-2", lambda net: net.ResNet((3, 4, 6, 3), width_per_group=128)),
    "vgg11": _Network("VGG-11", lambda net: net.VGG((1, 1, 2, 2, 2))),
    "vgg13": _Network("VGG-13", lambda net: net.VGG((2, 2, 2, 2, 2))),
    "vgg16": _Network("VGG-16", lambda net: net.VGG((2, 2, 3, 3, 3)), batch=176),
    "vgg16_bn": _Network("VGG-16 with batch norm", lambda net: net.VGG((2, 2, 3, 3, 3), batch_norm=True)),
    "vgg19": _Network("VGG-19", lambda net: net.VGG((2, 2, 4, 4, 4))),
    "googlenet": _Network("GoogLeNet", lambda net: net.GoogLeNet(), batch=320),
    "mobilenet_v2": _Network("MobileNetV2", lambda net: net.MobileNetV2(), batch=272),
    "densenet121": _Network("DenseNet-121", lambda net: net.DenseNet((6, 12, 24, 16))),
    "densenet161": _Network("DenseNet-161", lambda net: net.DenseNet((6, 12, 36, 24), growth=48, stem_channels=96)),
    "densenet169": _Network("DenseNet-169", lambda net: net.DenseNet((6, 12, 32, 32))),
    "densenet201": _Network("DenseNet-201", lambda net: net.DenseNet((6, 12, 48, 32))),
    "unet": _Network(
        "UNet",
        lambda net: net.UNet(),
        batch=11,
        size=(416, 608),
        smallest=16,
        returns="one logit per pixel",
    ),
}
_LIBRARIES: dict[str, Callable[[str, BuildOptions], BuiltModel]] = {
    "torchvision": library_models.build_torchvision,
    "timm": library_models.build_timm,
    "hf": library_models.build_transformers,
}


def builtin_names() -> tuple[str, ...]:
    """List the canonical names of built-in models."""
    return tuple(_NETWORKS)


def build_model(
    spec: str,
    *,
    batch: int | None = None,
    input_size: tuple[int, int] | None = None,
    dtype: "torch.dtype | None" = None,
    sequence_length: int | None = None,
    meta: bool = False,
) -> BuiltModel:
    """Build a model, with random weights and in training mode, and inputs for one step of it.

    Args:
        spec: one of
            - a built-in name (`resnet50`, `unet`, …; `builtin_names()` lists them), case and hyphens aside;
            - `torchvision:NAME`, `timm:NAME`;
            - `hf:NAME`, with NAME a transformers model type (`gpt2`, `bert`, …) or a path to a config.json;
            - `path/to/file.py:FUNCTION` or `package.module:FUNCTION`, which returns a module, or
              (module, inputs).
        batch: the inputs' first dimension; by default the paper's, or the family's own.
        input_size: height and width of images, in pixels.
        dtype: of parameters and floating-point inputs; by default as the model is built, mostly float32.
        sequence_length: tokens in a sequence, for models of text.
        meta: build model and inputs on torch's meta device, which allocates nothing: for tracing. Without it,
            whatever device or fake-tensor mode the caller has set applies.

    Returns:
        The model and its inputs. Built-in and torchvision models return logits, whose loss the person
        computes outside; transformers models return their loss.

    Raises:
        ModelError: the name is unknown, a package is missing, their code failed, or an option does not apply.

    >>> build_model("ResNet-18", batch=2, input_size=(64, 64), meta=True).description
    'ResNet-18: 11.7 M parameters; input 2×3×64×64 float32; returns logits, the loss is yours'
    """
    options = BuildOptions(
        batch=batch, input_size=input_size, dtype=dtype, sequence_length=sequence_length, meta=meta
    )
    spec = check_spelling(spec)
    library, colon, rest = spec.partition(":")
    if colon and library in _LIBRARIES:
        return _LIBRARIES[library](rest, options)
    return own_models.build(spec, options) if colon else _build_network(_canonical_name(spec), options)


def check_spelling(spec: str) -> str:
    """Check that a model's name can be one, within a moment: neither torch nor the model's library is imported.

    Returns it without spaces around it, the library in lower case.

    Raises:
        ModelError: nothing is called that; says what comes close.
    """
    spec = spec.strip()
    library, colon, rest = spec.partition(":")
    if not colon:
        _canonical_name(spec)
    elif library.lower() not in _LIBRARIES:
        own_models.check_place(spec)
    elif not rest:
        raise ModelError(f"{spec!r} names no model; write {library}:NAME")
    else:
        library_models.check_library_name(library.lower(), rest)
        return f"{library.lower()}:{rest}"
    return spec


def _canonical_name(spec: str) -> str:
    """The name of a built-in network, by any spelling of it."""
    spellings = {re.sub(r"[-_]", "", name): name for name in _NETWORKS}
    if name := spellings.get(re.sub(r"[-_ ]", "", spec.lower())):
        return name
    if os.path.isdir(spec):
        raise ModelError(f"{spec!r} is a folder; write path/to/file.py:FUNCTION")
    if spec.endswith(".py"):
        raise ModelError(f"{spec!r} names a file but no function in it; write {spec}:build")
    if os.path.isfile(spec):
        raise ModelError(f"{spec!r} is not a Python file; write path/to/file.py:FUNCTION")
    elsewhere = [f"{library}:{spec}" for library in _LIBRARIES if library_models.has_name(library, spec.lower())]
    hint = f"; did you mean {', '.join(elsewhere)}?" if elsewhere else close_matches(spec, _NETWORKS)
    raise ModelError(
        f"no model is called {spec!r}{hint or '.'} Built in: {', '.join(_NETWORKS)}. "
        "Others: torchvision:NAME, timm:NAME, hf:MODEL_TYPE or hf:path/to/config.json, "
        "path/to/file.py:FUNCTION, package.module:FUNCTION"
    )


def _build_network(name: str, options: BuildOptions) -> BuiltModel:
    network = _NETWORKS[name]
    height, width = options.input_size or network.size
    if min(height, width) < network.smallest:
        raise ModelError(
            f"{name} can't take images of {height}×{width}: the least is {network.smallest}×{network.smallest}"
        )
    with options.device():
        model = network.make(importlib.import_module("monetlite.models.convnets"))
    images = options.image(name, 3, network.batch, network.size)
    return finish(
        name, model, (images,), options, title=network.title, returns=f"{network.returns}, the loss is yours"
    )
