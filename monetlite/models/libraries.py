"""`torchvision:NAME` and `timm:NAME`: any of their classification models, randomly initialised."""

import importlib
from types import ModuleType

from monetlite.core.errors import ModelError
from monetlite.models.built import DEFAULT_BATCH, BuildOptions, BuiltModel, close_matches, finish


def require(package: str, what: str) -> ModuleType:
    """Import an optional package.

    Raises:
        ModelError: it is not installed, or does not import.
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        root = package.partition(".")[0]
        if error.name is not None and error.name.partition(".")[0] != root:
            raise ModelError(f"{what}: importing {package} failed: {error}; install what it misses") from error
        raise ModelError(f"{what} needs {root}, which is not installed; run: pip install {root}") from error
    except Exception as error:  # a broken install (a library built for another torch) can raise anything
        raise ModelError(f"{what}: importing {package} failed: {type(error).__name__}: {error}") from error


def build_torchvision(name: str, options: BuildOptions) -> BuiltModel:
    """Build `torchvision.models.get_model(name)` without pretrained weights.

    Raises:
        ModelError: torchvision is missing, does not know the name, or fails to build it.
    """
    spec = f"torchvision:{name}"
    models = require("torchvision.models", spec)
    known = models.list_models(module=models)
    if name not in known:
        raise ModelError(f"torchvision has no classification model {name!r}{close_matches(name, known)}")
    _refuse_sequences(spec, options)
    try:
        with options.device():
            model = models.get_model(name, weights=None)
    except Exception as error:
        raise ModelError(f"{spec} failed to build: {type(error).__name__}: {error}") from error
    images = options.image(3, DEFAULT_BATCH, (224, 224))
    return finish(
        spec, model, (images,), options, title=f"torchvision {name}", returns="its outputs, the loss is yours"
    )


def build_timm(name: str, options: BuildOptions) -> BuiltModel:
    """Build `timm.create_model(name)` without pretrained weights, at its own image size by default.

    Raises:
        ModelError: timm is missing, does not know the name, or fails to build it.
    """
    spec = f"timm:{name}"
    timm = require("timm", spec)
    known = timm.list_models()
    if not timm.is_model(name):
        raise ModelError(f"timm has no model {name!r}{close_matches(name, known)}")
    _refuse_sequences(spec, options)
    try:
        with options.device():
            model = timm.create_model(name, pretrained=False)
    except Exception as error:
        raise ModelError(f"{spec} failed to build: {type(error).__name__}: {error}") from error
    channels, height, width = getattr(model, "default_cfg", {}).get("input_size", (3, 224, 224))
    images = options.image(channels, DEFAULT_BATCH, (height, width))
    return finish(spec, model, (images,), options, title=f"timm {name}", returns="its outputs, the loss is yours")


def _refuse_sequences(spec: str, options: BuildOptions) -> None:
    if options.sequence_length is not None:
        raise ModelError(f"{spec} takes images, not sequences; drop the sequence length")
