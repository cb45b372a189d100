"""Other libraries' models by name, randomly initialised.

`torchvision:NAME` and `timm:NAME` are any of their classification models. `hf:NAME` is a transformers model in the
class that computes a loss. NAME is a model type (`gpt2`, `bert`, `llama`, `vit`, …), whose configuration's defaults
are used, a published model (`Qwen/Qwen3-8B` or `qwen3-8b`, of those in `published.yaml`), or the path of a
`config.json` or of a folder with one, or a hub name whose configuration is already in the local cache.
`hf:NAME+lora16` has peft's adapters of rank 16 on all its linear layers but the head, and everything else frozen.
Nothing is downloaded, and no code from a hub is run.
"""

import importlib
import os
import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from importlib.metadata import version
from types import ModuleType
from typing import TYPE_CHECKING, Any

from monetlite.core.errors import ModelError, first_line
from monetlite.core.spelling import close_matches
from monetlite.models.built_model import DEFAULT_BATCH, BuildOptions, BuiltModel, finish
from monetlite.models.library_names import names_in_source
from monetlite.models.published import find_published, published_models

if TYPE_CHECKING:
    from torch import nn

TRANSFORMERS_BATCH = 8
DEFAULT_SEQUENCE_LENGTH = 128


@dataclass(frozen=True)
class _Head:
    """A kind of model with a loss: transformers' names of it in its mappings and of its class, and its inputs."""

    mapping: str
    auto_class: str
    image: bool = False
    label_per_token: bool = True

    def classes(self, model_type: str) -> tuple[str, ...]:
        """Names of the classes of a model type that have this head; empty if there are none."""
        from transformers.models.auto import modeling_auto

        found = getattr(modeling_auto, f"MODEL_FOR_{self.mapping}_MAPPING_NAMES").get(model_type, ())
        return (found,) if isinstance(found, str) else tuple(found)


# In order of preference, where the configuration does not name an architecture: the objective that the model
# type is mostly trained on comes before one that it also has (BERT has a causal head, BART a masked one).
_HEADS = (
    _Head("IMAGE_CLASSIFICATION", "AutoModelForImageClassification", image=True, label_per_token=False),
    _Head("SEQ_TO_SEQ_CAUSAL_LM", "AutoModelForSeq2SeqLM"),
    _Head("MASKED_LM", "AutoModelForMaskedLM"),
    _Head("CAUSAL_LM", "AutoModelForCausalLM"),
    _Head("SEQUENCE_CLASSIFICATION", "AutoModelForSequenceClassification", label_per_token=False),
)
_ADAPTED = re.compile(r"(.+)\+lora([1-9][0-9]{0,3})")


def split_adapters(name: str) -> tuple[str, int]:
    """A model's name without its adapters, and their rank; 0 if there are none.

    >>> split_adapters("Qwen/Qwen3-8B+lora16")
    ('Qwen/Qwen3-8B', 16)
    """
    found = _ADAPTED.fullmatch(name)
    return (found[1], int(found[2])) if found else (name, 0)


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


def local_path(name: str) -> str:
    """The path of a configuration, or of a folder with a `config.json`, if a name is one; else nothing."""
    path = os.path.expanduser(name)
    return path if os.path.isfile(path) or os.path.isfile(os.path.join(path, "config.json")) else ""


def check_library_name(library: str, name: str) -> None:
    """Check a name without importing its library; names that the library's source doesn't tell pass.

    Raises:
        ModelError: there is no such model or path, or the library is not installed.
    """
    known = names_in_source(library)
    if library == "hf":
        name, _ = split_adapters(name)
        if local_path(name) or find_published(name):
            return
        if _looks_like_path(name):
            raise ModelError(
                f"hf:{name}: there is no file or folder {os.path.expanduser(name)} with a model's configuration; "
                "check the path, or give a model type like hf:gpt2"
            )
        if known is not None and name not in known and not is_cached(name):
            raise _unknown("hf", name, known)
    elif known is not None and name.partition(".")[0] not in known:  # timm's names may end in a tag
        raise _unknown(library, name, known)


def has_name(library: str, name: str) -> bool:
    """True if a library is installed and its source lists a model of this name."""
    try:
        published = library == "hf" and find_published(name) is not None
        return published or name in (names_in_source(library) or ())
    except ModelError:
        return False


def _unknown(library: str, name: str, known: Iterable[str]) -> ModelError:
    if library != "hf":
        kind = "classification model" if library == "torchvision" else "model"
        return ModelError(f"{library} has no {kind} {name!r}{close_matches(name, known, f'{library}:')}")
    last = name.rpartition("/")[2].lower()
    hint = close_matches(last, published_models(), "hf:")
    prefixes = [kind for kind in known if last.startswith(kind)]
    if not hint:
        hint = f"; did you mean hf:{max(prefixes, key=len)}?" if prefixes else close_matches(last, known, "hf:")
    return ModelError(
        f"hf:{name}: {name!r} is neither a model type of transformers {version('transformers')}, nor the path "
        f"of a configuration, nor in the local hub cache, and nothing is downloaded"
        f"{hint or '; e.g. hf:gpt2, hf:Qwen/Qwen3-8B, hf:llama-3.1-8b, hf:vit'}"
    )


def _looks_like_path(name: str) -> bool:
    return name.endswith(".json") or name.startswith((".", "~", os.sep)) or name.count("/") > 1


def is_cached(name: str) -> bool:
    """True if a model of the hub is in the local cache."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return os.path.isdir(os.path.join(HF_HUB_CACHE, f"models--{name.replace('/', '--')}"))


def build_torchvision(name: str, options: BuildOptions) -> BuiltModel:
    """Build `torchvision.models.get_model(name)` without pretrained weights."""
    models = require("torchvision.models", f"torchvision:{name}")
    known = models.list_models(module=models)
    if name not in known:
        raise _unknown("torchvision", name, known)
    return _built("torchvision", name, lambda: models.get_model(name, weights=None), options)


def build_timm(name: str, options: BuildOptions) -> BuiltModel:
    """Build `timm.create_model(name)` without pretrained weights, at its own image size by default."""
    timm = require("timm", f"timm:{name}")
    if not timm.is_model(name):
        raise _unknown("timm", name, timm.list_models())
    return _built("timm", name, lambda: timm.create_model(name, pretrained=False), options)


def _built(library: str, name: str, make: "Callable[[], nn.Module]", options: BuildOptions) -> BuiltModel:
    spec = f"{library}:{name}"
    try:
        with options.device():
            model = make()
    except Exception as error:
        raise ModelError(f"{spec} failed to build: {_told(error)}") from error
    configuration: Any = getattr(model, "default_cfg", {}) if library == "timm" else {}
    channels, height, width = configuration.get("input_size", (3, 224, 224))
    images = options.image(spec, channels, DEFAULT_BATCH, (height, width))
    returns = "its outputs, the loss is yours"
    return finish(spec, model, (images,), options, title=f"{library} {name}", returns=returns)


def _told(error: BaseException) -> str:
    """An error in words, with what it arose from: an import that failed may be that of another library."""
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    said = f"{type(error).__name__}: {error}"
    return said if root is error else f"{said} ({type(root).__name__}: {first_line(root)})"


def build_transformers(name: str, options: BuildOptions) -> BuiltModel:
    """Build a transformers model and inputs with labels, so that calling it returns a loss.

    Raises:
        ModelError: transformers is missing, no configuration has that name, the model type has no class with
            a loss, or the sequence is longer than the model's positions.
    """
    import torch

    base, rank = split_adapters(name)
    path = local_path(base)
    if not path and (published := find_published(base)):
        base = published.short_name
    spec = f"hf:{base}" + (f"+lora{rank}" if rank else "")
    transformers = require("transformers", spec)
    config = _config(transformers, base, path)
    head = _head(config, spec)
    config.use_cache = False
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        # A model type's defaults lack it; the decoder's inputs are the labels, shifted behind this token.
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
    inputs = _images(config, options, spec) if head.image else _tokens(config, options, spec)
    try:
        with options.device():
            model = getattr(transformers, head.auto_class).from_config(config)
            title = type(model).__name__
            if rank:
                model, title = _adapted(model, rank, options, spec), f"{title} with LoRA of rank {rank}"
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{spec} failed to build: {_told(error)}") from error
    (first,) = inputs.values()
    labels = first.clone()
    if not head.label_per_token:
        with options.device():
            labels = torch.randint(config.num_labels, (first.shape[0],))
    built = finish(spec, model, {**inputs, "labels": labels}, options, title=title, returns="its loss")
    return replace(built, source=None) if path else built


def _adapted(model: Any, rank: int, options: BuildOptions, spec: str) -> "nn.Module":
    """A model with adapters in the dtype of its weights, and everything else frozen."""
    peft = require("peft", spec)
    if options.dtype is not None:
        model = model.to(options.dtype)
    settings = peft.LoraConfig(r=rank, target_modules="all-linear")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, which peft asks by an old name
        adapted: nn.Module = peft.get_peft_model(model, settings, autocast_adapter_dtype=False)
    for module in adapted.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            # peft does so itself where the adapters are not on the meta device.
            dtype = module.get_base_layer().weight.dtype
            module.lora_A.to(dtype)
            module.lora_B.to(dtype)
    return adapted


def _config(transformers: Any, name: str, path: str) -> Any:
    spec = f"hf:{name}"
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    try:
        if path:
            return transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        if name in known:
            return transformers.AutoConfig.for_model(name)
        if published := find_published(name):
            return transformers.AutoConfig.for_model(**published.config)
        if not _looks_like_path(name):
            return transformers.AutoConfig.from_pretrained(name, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        if path:
            raise ModelError(
                f"{spec}: {path} is not a model configuration that transformers can read "
                f"({reason}); it needs a config.json with a model_type"
            ) from error
        if name in known:
            raise ModelError(
                f"{spec}: the model type {name!r} has no default configuration ({reason}); "
                "give the path of a config.json"
            ) from error
    raise _unknown("hf", name, known)


def _head(config: Any, spec: str) -> _Head:
    """The kind of model to build: the configuration's own architecture if it has a loss, or by preference."""
    offered = {head: head.classes(config.model_type) for head in _HEADS}
    named = [head for name in config.architectures or () for head in _HEADS if name in offered[head]]
    known = [head for head in _HEADS if offered[head]]
    if not known:
        raise ModelError(
            f"{spec}: transformers has no class of model type {config.model_type!r} with a language-modelling or "
            "classification loss; write a builder function instead: path/to/file.py:build"
        )
    return (named or known)[0]


def _images(config: Any, options: BuildOptions, spec: str) -> dict[str, Any]:
    own = getattr(config, "image_size", None)
    if options.input_size is not None and own is not None:
        height, width = options.input_size
        config.image_size = height if height == width else (height, width)
    size = own or 224
    if isinstance(size, dict):
        size = (size["height"], size["width"])
    height, width = (size, size) if isinstance(size, int) else size
    channels = getattr(config, "num_channels", 3)
    return {"pixel_values": options.image(spec, channels, TRANSFORMERS_BATCH, (height, width))}


def _tokens(config: Any, options: BuildOptions, spec: str) -> dict[str, Any]:
    import torch

    if options.input_size is not None:
        raise ModelError(f"{spec} takes sequences, not images; give a sequence length instead of an input size")
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    length = options.sequence_length or min(DEFAULT_SEQUENCE_LENGTH, longest or DEFAULT_SEQUENCE_LENGTH)
    if longest is not None and length > longest:
        raise ModelError(
            f"{spec}: sequences of {length} tokens are longer than the model's {longest} positions; "
            "give a shorter one, or a config.json with more max_position_embeddings"
        )
    with options.device():
        return {"input_ids": torch.randint(text.vocab_size, (options.batch or TRANSFORMERS_BATCH, length))}
