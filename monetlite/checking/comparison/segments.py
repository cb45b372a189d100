"""√n checkpointing: `torch.utils.checkpoint.checkpoint_sequential`, and a search over how many segments to make.

It takes a sequence of functions. A model is cut into one where torch.fx finds that a single tensor passes from
what comes before to what comes after.
"""

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import fx, nn
from torch.fx.passes.split_module import split_module
from torch.utils.checkpoint import checkpoint_sequential

from monetlite.checking.comparison.contenders import Contender, Task, Unsupported, copy_of
from monetlite.checking.comparison.data import Peer

FEWEST_PIECES = 4
"""A model that falls into fewer than that is not a sequence."""
MOST_COUNTS = 7
"""How many segment counts are tried."""


def segments(task: Task) -> list[Contender]:
    """`checkpoint_sequential` with √n segments, and with counts around that."""
    if len(task.args) != 1 or task.kwargs or not isinstance(task.args[0], torch.Tensor):
        raise Unsupported(
            "it takes a sequence of modules with one tensor between them; this model has other inputs"
        )
    pieces = len(cut(copy_of(task.model)))
    if pieces < FEWEST_PIECES:
        raise Unsupported(
            f"it takes a sequence of modules; this model falls into {pieces} (what is read again later crosses "
            "every other cut)"
        )
    return [_contender(count, pieces) for count in counts(pieces)]


def counts(pieces: int) -> list[int]:
    """Numbers of segments to try for so many pieces: √n, and others from two to as many as there are."""
    root = round(math.sqrt(pieces))
    ratio = (pieces / 2) ** (1 / (MOST_COUNTS - 2))
    spread = {round(2 * ratio**power) for power in range(MOST_COUNTS - 1)}
    return sorted({root, *spread} & set(range(2, pieces + 1)))


def cut(model: nn.Module) -> list[Callable[..., Any]]:
    """A model's forward pass as functions to call in turn, each on what the one before returned.

    Raises:
        Unsupported: torch.fx can't trace the model.
    """
    try:
        traced = fx.symbolic_trace(model)
    except Exception as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise Unsupported(
            f"torch.fx, which would cut the model into a sequence, can't trace it: {reason}"
        ) from error
    piece_of: dict[fx.Node, int] = {}
    piece, crossing = 0, set(traced.graph.find_nodes(op="placeholder"))
    if len(crossing) != 1:
        raise Unsupported(
            "it takes a sequence of modules with one tensor between them; this model has other inputs"
        )
    for node in traced.graph.nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        if len(crossing) == 1 and piece_of and not _in_place(traced, node):
            piece += 1
        piece_of[node] = piece
        done = piece_of.keys() | crossing
        crossing = {
            item
            for item in (*crossing, node)
            if any(user not in done or user.op == "output" for user in item.users)
        }
    parts = split_module(traced, model, piece_of.__getitem__)
    return list(parts.children())


def _in_place(traced: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a node may overwrite what it reads, which the segment before has to keep."""
    if node.op == "call_module":
        return bool(getattr(traced.get_submodule(str(node.target)), "inplace", False))
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    assigns = name.startswith("i") and name[1:] in _OPERATORS
    return bool(node.kwargs.get("inplace")) or assigns or name.endswith("_")


_OPERATORS = ("add", "sub", "mul", "truediv", "matmul", "floordiv", "pow")


def _contender(count: int, pieces: int) -> Contender:
    def prepare(model: nn.Module) -> nn.Module:
        functions, run = cut(model), cast(Any, checkpoint_sequential)  # torch has no types for it
        model.forward = lambda x: run(functions, count, x, use_reentrant=False)
        return model

    root = ", √n" if count == round(math.sqrt(pieces)) else ""
    setting, label = f"{count} segments of {pieces} pieces{root}", f"{count} segments"
    return Contender(peer=Peer.SEGMENTS, setting=setting, label=label, prepare=prepare)


__all__ = ["counts", "cut", "segments"]
