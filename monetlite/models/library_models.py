"""`torchvision:NAME` and `timm:NAME`: any of their classification models, randomly initialised."""

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from monetlite.core.errors import ModelError
from monetlite.models.built_model import DEFAULT_BATCH, BuildOptions, BuiltModel, close_matches, finish

if TYPE_CHECKING:
    from torch import nn


def require(package: str, spec: str) -> ModuleType:
    """Import an optional package."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        root = package.partition(".")[0]
        if error.name is not None and error.name.partition(".")[0] != root:
            raise ModelError(f"{spec}: importing {package} failed: {error}; install what it misses") from error
        raise ModelError(f"{spec} needs {root}, which is not installed; run: pip install {root}") from error
    except Exception as error:  # a broken install (a library built for another torch) can raise anything
        raise ModelError(f"{spec}: importing {package} failed: {type(error).__name__}: {error}") from error


def build_torchvision(name: str, options: BuildOptions) -> BuiltModel:
    """Build `torchvision.models.get_model(name)` without pretrained weights."""
    models = require("torchvision.models", f"torchvision:{name}")
    known = models.list_models(module=models)
    if name not in known:
        raise ModelError(f"torchvision has no classification model {name!r}{close_matches(name, known)}")
    return _built("torchvision", name, lambda: models.get_model(name, weights=None), options)


def build_timm(name: str, options: BuildOptions) -> BuiltModel:
    """Build `timm.create_model(name)` without pretrained weights, at its own image size by default."""
    timm = require("timm", f"timm:{name}")
    if not timm.is_model(name):
        raise ModelError(f"timm has no model {name!r}{close_matches(name, timm.list_models())}")
    return _built("timm", name, lambda: timm.create_model(name, pretrained=False), options)


def _built(library: str, name: str, make: "Callable[[], nn.Module]", options: BuildOptions) -> BuiltModel:
    spec = f"{library}:{name}"
    if options.sequence_length is not None:
        raise ModelError(f"{spec} takes images, not sequences; drop the sequence length")
    try:
        with options.device():
            model = make()
    except Exception as error:
        raise ModelError(f"{spec} failed to build: {type(error).__name__}: {error}") from error
    configuration: Any = getattr(model, "default_cfg", {}) if library == "timm" else {}
    channels, height, width = configuration.get("input_size", (3, 224, 224))
    images = options.image(channels, DEFAULT_BATCH, (height, width))
    returns = "its outputs, the loss is yours"
    return finish(spec, model, (images,), options, title=f"{library} {name}", returns=returns)
