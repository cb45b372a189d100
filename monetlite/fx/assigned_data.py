"""Tensors whose `.data` a model assigns, as MoCo's average of weights does: `p.data = m * p.data + ...`.

TorchDynamo records that `p` takes over the other tensor's storage, which AOTAutograd has no program for.
Where nothing else in the step reads the old or the new elements, they are copied into the storage that there is.
"""

from typing import Any

import torch
from torch import fx

from monetlite.fx.torch_internals.torch_dispatch import storage_key
from monetlite.fx.torch_internals.torch_dynamo import ASSIGN_DATA, DATA_OF, given_tensor, lowers_change_count


def copy_assigned_data(program: fx.GraphModule) -> None:
    """Have assignments to `.data` in a graph of TorchDynamo's copy the elements, in place.

    Some are left as they are, for AOTAutograd to refuse: those of another shape or layout than the tensor's, and
    those to a tensor that the step reads before.
    """
    graph = program.graph
    for node in [node for node in graph.nodes if node.target in ASSIGN_DATA]:
        arguments: Any = node.args
        tensor, assigned = arguments
        if _is_alike(tensor, assigned) and _is_unseen(graph, node):
            with graph.inserting_before(node):
                graph.call_method("copy_", (graph.call_function(DATA_OF, (tensor,)), assigned))
            for user in filter(lowers_change_count, list(node.users)):
                graph.erase_node(user)  # copying into `.data` raises no count
            node.replace_all_uses_with(tensor)
            graph.erase_node(node)
            program.recompile()


def _is_alike(tensor: fx.Node, assigned: fx.Node) -> bool:
    given, made = given_tensor(tensor), assigned.meta.get("example_value")
    if given is None or not isinstance(made, torch.Tensor) or made.layout is not torch.strided:
        return False
    sizes = (*made.shape, *made.stride())
    fixed = all(isinstance(size, int) for size in sizes)
    same = fixed and sizes == (*given.shape, *given.stride())
    return same and (made.dtype, made.device) == (given.dtype, given.device)


def _is_unseen(graph: fx.Graph, node: fx.Node) -> bool:
    """True if the tensor is only read by its `.data` before, and nothing else has the old or the new elements."""
    arguments: Any = node.args
    tensor, assigned = arguments
    before = list(graph.nodes)
    before = before[: before.index(node)]
    earlier = set(before)
    readers = [user for user in tensor.users if user in earlier]
    if any(user.target not in (DATA_OF, *ASSIGN_DATA) for user in readers):
        return False
    old = {_storage(user) for user in readers if user.target is DATA_OF}
    new = _storage(assigned)
    if new in old:
        return False
    sharing = [item for item in before if item is not tensor and _storage(item) in {*old, new}]
    given = any(item.op in ("placeholder", "get_attr") for item in sharing)
    return not given and all(user is node or user in earlier for item in sharing for user in item.users)


def _storage(node: fx.Node) -> int | None:
    example = node.meta.get("example_value")
    return storage_key(example) if isinstance(example, torch.Tensor) else None
