"""Nested lists, tuples and dicts of tensors (`torch.utils._pytree`).

Without it, inputs and outputs of models can't be taken apart. The order of leaves is the one in which AOTAutograd
numbers a graph's inputs and outputs, so that no other library can stand in for it.
"""

from typing import Any

import torch
from torch.utils._pytree import keystr as keystr
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils._pytree import tree_map_with_path as tree_map_with_path
from torch.utils._pytree import tree_structure as tree_structure
from torch.utils._pytree import tree_unflatten as tree_unflatten


def tensors_among(structure: Any) -> list[torch.Tensor]:
    """The tensors in nested arguments or results, in the order of leaves."""
    return [item for item in tree_leaves(structure) if isinstance(item, torch.Tensor)]
