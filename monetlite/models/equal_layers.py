"""Equal layers of a model, and the model with fewer of them.

A transformer is a list of layers, of which all but the first do the same, or repeat with a period (five layers with
a sliding window, and one without). A step of few such layers then says what a step of all is
(`planning.depth_costs`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

_OWN_INDEX = ("layer_idx", "layer_id", "layer_index")
"""Attributes by which layers know their place."""
_SET_TO_BE_CHECKPOINTED = "GradientCheckpointingLayer"
"""Class of the layers that transformers' setting checkpoints."""


@dataclass(frozen=True, kw_only=True)
class EqualLayers:
    """A list of layers.

    Attributes:
        path: of the list among the model's modules.
        count: of all layers.
        period: layers beyond the first repeat after so many.
    """

    path: str
    count: int
    period: int

    @property
    def depth(self) -> int:
        """The fewest layers that have all that the model has: the first, two periods, and an end like its own."""
        return 2 * self.period + 2 + (self.count - 2) % self.period


def find_layers(model: "nn.Module") -> str | None:
    """Path of a model's list of layers; None if there is none, or there are several as long as each other."""
    from torch import nn

    counts = {path: len(item) for path, item in model.named_modules() if isinstance(item, nn.ModuleList)}
    longest = [path for path, count in counts.items() if count == max(counts.values()) > 1]
    return longest[0] if len(longest) == 1 else None


def are_all_layers(model: "nn.Module", path: str) -> bool:
    """False if transformers' setting checkpoints other layers than those of a list, too."""
    own = [
        module
        for module in model.modules()
        if any(kind.__name__ == _SET_TO_BE_CHECKPOINTED for kind in type(module).__mro__)
    ]
    return not own or own == list(model.get_submodule(path).children())


def find_equal_layers(model: "nn.Module") -> EqualLayers | None:
    """The equal layers of a model; None if there are none, or all of them are needed to tell what they do."""
    path = find_layers(model)
    if path is None:
        return None
    kinds = [hash(tuple(_description(layer))) for layer in model.get_submodule(path).children()]
    for period in range(1, len(kinds)):
        found = EqualLayers(path=path, count=len(kinds), period=period)
        if found.depth >= found.count:
            return None
        if kinds[1:-period] == kinds[1 + period :]:
            return found
    return None


def _description(layer: "nn.Module") -> Iterator[Any]:
    """Everything that a layer's step depends on, beside its place: modules, sizes, dtypes, and settings."""
    for path, module in layer.named_modules():
        yield path, type(module)
        for name, value in vars(module).items():
            if name not in _OWN_INDEX and isinstance(value, (bool, int, float, str, tuple, type(None))):
                yield name, repr(value)
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            yield name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad


def shorten(model: "nn.Module", layers: EqualLayers) -> None:
    """Leave only the first layers of a model, as many as tell what all do."""
    kept = model.get_submodule(layers.path)
    del kept[layers.depth :]  # type: ignore[operator]  # of a ModuleList
