"""Nested lists, tuples and dicts of tensors (`torch.utils._pytree`).

Without it, inputs and outputs of models can't be taken apart. The order of leaves is the one in which AOTAutograd
numbers a graph's inputs and outputs, so that no other library can stand in for it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import SequenceKey, tree_flatten_with_path
from torch.utils._pytree import keystr as keystr
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils._pytree import tree_structure as tree_structure
from torch.utils._pytree import tree_unflatten as tree_unflatten


def tensors_among(structure: Any) -> list[torch.Tensor]:
    """The tensors in nested arguments or results, in the order of leaves."""
    return [item for item in tree_leaves(structure) if isinstance(item, torch.Tensor)]


def tree_map_with_path(
    function: Callable[[tuple[Any, ...], Any], Any], tree: Any, path: tuple[Any, ...] = ()
) -> Any:
    """Call a function with the path of each leaf and the leaf, and put what it returns in the leaf's place.

    Torch's own refuses containers that were registered without names for what they hold, as the outputs of
    transformers 4 were. Here, places stand for the names.
    """

    def is_within(item: Any) -> bool:
        return item is not tree

    items, structure = tree_flatten(tree, is_within)
    if len(items) == 1 and items[0] is tree:
        return function(path, tree)
    try:
        keys = [key for (key,), _ in tree_flatten_with_path(tree, is_within)[0]]
    except ValueError:
        keys = [SequenceKey(at) for at in range(len(items))]
    return tree_unflatten(
        [tree_map_with_path(function, item, (*path, key)) for item, key in zip(items, keys, strict=True)], structure
    )
