"""Nested lists, tuples and dicts of tensors (`torch.utils._pytree`).

Without it, inputs and outputs of models can't be taken apart. The order of leaves is the one in which AOTAutograd
numbers a graph's inputs and outputs, so that no other library can stand in for it.
"""

from torch.utils._pytree import (
    keystr,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_map_with_path,
    tree_structure,
    tree_unflatten,
)

__all__ = [
    "keystr",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_map_with_path",
    "tree_structure",
    "tree_unflatten",
]
