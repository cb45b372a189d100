"""What a model's name means: one entry point over the families."""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from monetlite.core.errors import ModelError
from monetlite.models import builtin, custom, huggingface, libraries
from monetlite.models.built import BuildOptions, BuiltModel, close_matches

if TYPE_CHECKING:
    import torch

_FAMILIES: dict[str, Callable[[str, BuildOptions], BuiltModel]] = {
    "torchvision": libraries.build_torchvision,
    "timm": libraries.build_timm,
    "hf": huggingface.build,
}


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
    spec = spec.strip()
    family, colon, rest = spec.partition(":")
    if colon and family.lower() in _FAMILIES:
        if not rest:
            raise ModelError(f"{spec!r} names no model; write {family}:NAME")
        return _FAMILIES[family.lower()](rest, options)
    if colon:
        return custom.build(spec, options)
    name = builtin.canonical(spec)
    if name is None:
        raise ModelError(_unknown(spec))
    return builtin.build(name, options)


def _unknown(spec: str) -> str:
    names = builtin.builtin_names()
    if spec.endswith(".py") or os.path.isfile(spec):
        return f"{spec!r} names a file but no function in it; write {spec}:build"
    return (
        f"no model is called {spec!r}{close_matches(spec, names) or '.'} Built in: {', '.join(names)}. "
        "Others: torchvision:NAME, timm:NAME, hf:MODEL_TYPE or hf:path/to/config.json, "
        "path/to/file.py:FUNCTION, package.module:FUNCTION"
    )
