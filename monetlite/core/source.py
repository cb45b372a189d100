"""What a schedule's model was built from, so that another machine can build and trace it again."""

import re
from dataclasses import dataclass

_SHAREABLE = re.compile(r"(?:(?:hf|timm|torchvision):)?[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model by the name that commands know it by, and the sizes it was built with.

    Attributes:
        model: a built-in model's name, or one of a library's (`hf:gpt2`). Never a path or a function of
            somebody's: a file that was downloaded must not run code by naming it.
        batch: of the inputs. input_size: height and width of images; sequence_length: of sequences, in tokens;
            None where the model has none.
        dtype: of weights and inputs, as torch names it; None as the model is built.
    """

    model: str
    batch: int
    input_size: tuple[int, int] | None = None
    sequence_length: int | None = None
    dtype: str | None = None


def is_shareable(model: str) -> bool:
    """Whether a name means the same model everywhere: not a path, nor a function, nor something on a hub."""
    return _SHAREABLE.fullmatch(model) is not None and not model.endswith((".json", ".py"))


__all__ = ["ModelSource", "is_shareable"]
