"""The source of a schedule's model, from which another machine can build and trace it again."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from monetlite.core.graph import TensorSpec
from monetlite.core.units import Positive

Dtype: TypeAlias = Literal["float32", "float64", "bfloat16", "float16"]
_SHAREABLE = r"^(?!.*\.(json|py)$)((hf|timm|torchvision):)?[A-Za-z0-9][A-Za-z0-9_.-]*(\+lora[1-9][0-9]*)?$(?!\n)"
_NAMES = "a built-in model, or hf:, timm: or torchvision: and a name; +lora16 for adapters of rank 16"


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model by the name that commands know it by, and the sizes it was built with.

    It is never a path or a function of somebody's: a file that was downloaded must not run code by naming it.
    """

    model: Annotated[str, Meta(pattern=_SHAREABLE, title=_NAMES)]
    batch: Annotated[Positive, Meta(description="the inputs' first dimension")]
    input_size: Annotated[tuple[Positive, Positive] | None, Meta(description="height and width, pixels")] = None
    sequence_length: Annotated[Positive | None, Meta(description="tokens")] = None
    dtype: Annotated[Dtype | None, Meta(description="of weights and inputs; null as the model is built")] = None


def is_shareable(model: str) -> bool:
    """True if a name means the same model everywhere: not a path, nor a function, nor something on a hub."""
    return re.search(_SHAREABLE, model) is not None


def batch_of(source: ModelSource | None, inputs: Mapping[str, TensorSpec]) -> int | None:
    """The batch that a model was built for; of a person's own model, the first dimension of the first input."""
    if source is not None:
        return source.batch
    return next((spec.shape[0] for spec in inputs.values() if spec.shape), None)
