"""Other ways to train within less memory: what people use today beside monetlite.

Each function makes the contenders of one peer, one for each setting, from plain training.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import fx, nn
from torch.fx.passes.split_module import split_module
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from monetlite.checking.comparison.bench import Contender, Unsupported, copy_of
from monetlite.checking.comparison.peer_runs import Peer
from monetlite.checking.trainee import Trainee
from monetlite.fx.torch_internals import torch_pytree as pytree
from monetlite.fx.torch_internals.torch_aot import aot_settings
from monetlite.fx.torch_internals.torch_inductor import inductor_backend, partitioning_backend
from monetlite.operators.traits import operation_formula

SHARES = (1.0, 0.7, 0.5, 0.3, 0.1)
"""Settings of torch.compile's `activation_memory_budget`: 1 is its own choice, 0 checkpoints everything."""
MIN_PIECES = 4
"""A model that falls into fewer pieces is not a sequence."""
MAX_COUNTS = 7
"""Number of segment counts that are tried."""
_ENABLE = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
"""Transformers' name of its method, from version 6 on and before."""
_ASSIGNING = ("iadd", "isub", "imul", "itruediv", "imatmul", "ifloordiv", "ipow")

Forward = Callable[..., Any]
CompilerBackend = Callable[[fx.GraphModule, list[torch.Tensor]], Any]


def every_block(plain: Trainee) -> list[Contender]:
    """`torch.utils.checkpoint` around every block, by the model's own method where it is one of transformers'."""
    return [_checkpointing(Peer.CHECKPOINT, plain.model, {})]


def selective(plain: Trainee) -> list[Contender]:
    """Selective activation checkpointing of every block: matrix products, convolutions and attention are kept.

    A saved result may not be overwritten. Where layers overwrite what they read, both are tried: the model as it
    is, and with those layers told not to.
    """
    options = {"context_fn": functools.partial(create_selective_checkpoint_contexts, _kept_or_recomputed)}
    contender = _checkpointing(Peer.SELECTIVE, plain.model, options)
    if not any(vars(module).get("inplace") for module in plain.model.modules()):
        return [contender]

    def nothing_in_place(model: nn.Module) -> nn.Module:
        for module in model.modules():
            if "inplace" in vars(module):
                vars(module)["inplace"] = False
        return contender.prepare(model)

    other = replace(contender, setting=f"{contender.setting}, nothing in place", prepare=nothing_in_place)
    return [contender, other]


def _kept_or_recomputed(context: object, operator: Any, *args: object, **kwargs: object) -> CheckpointPolicy:
    counted = operation_formula(str(operator)) is not None
    return CheckpointPolicy.MUST_SAVE if counted else CheckpointPolicy.PREFER_RECOMPUTE


def _checkpointing(peer: Peer, model: nn.Module, options: dict[str, Any]) -> Contender:
    arguments = {"use_reentrant": False, **options}
    if getattr(model, "supports_gradient_checkpointing", False):
        method = next(name for name in _ENABLE if hasattr(model, name))

        def enable(model: nn.Module) -> nn.Module:
            getattr(model, method)(arguments)
            return model

        return Contender(peer=peer, setting=f"{method}()", label=str(peer), prepare=enable)

    def around(forward: Forward) -> Forward:
        return functools.partial(_checkpointed, forward, arguments)

    def wrap(model: nn.Module) -> nn.Module:
        wrap_blocks(model, around)
        return model

    found = wrap_blocks(copy_of(model), around)
    if not found:
        raise Unsupported("there is nothing to wrap: no kind of module occurs more than once")
    return Contender(peer=peer, setting=found, label=str(peer), prepare=wrap)


def _checkpointed(forward: Forward, options: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Checkpoint a call. Lists of tensors are taken apart: the caller may extend one before the backward pass."""
    leaves, spec = pytree.tree_flatten((args, kwargs))

    def run(*leaves: Any) -> Any:
        positional, named = pytree.tree_unflatten(leaves, spec)
        return forward(*positional, **named)

    return checkpoint(run, *leaves, **options)


def wrap_blocks(model: nn.Module, around: Callable[[Forward], Forward]) -> str:
    """Replace the forward function of every block of a model, and name what was wrapped, as in `16 Bottleneck`.

    A block is an outermost module of a class that occurs more than once (a residual block, a transformer layer),
    inside whatever holds several of those (a stage, an encoder). In an `nn.Sequential` of single layers it is a
    convolution or a matrix with what follows up to the next.

    Args:
        model: changed in place.
        around: makes a block's new forward function of its own.
    """
    occurrences = Counter(type(module) for module in model.modules() if _is_composite(module))
    wrapped: Counter[str] = Counter()

    def visit(module: nn.Module) -> None:
        if type(module) is nn.Sequential and len(module) > 0 and all(_depth(child) == 0 for child in module):
            wrapped.update(_wrap_layers(module, around))
        elif _is_composite(module) and occurrences[type(module)] > 1 and not _holds_blocks(module):
            module.forward = around(module.forward)
            wrapped[type(module).__name__] += 1
        else:
            for child in module.children():
                visit(child)

    visit(model)
    return ", ".join(f"{count} {name}" for name, count in wrapped.most_common())


def _is_composite(module: nn.Module) -> bool:
    """Tell whether a module has modules of its own, and is more than a container of them."""
    container = type(module) is nn.Sequential or isinstance(module, nn.ModuleList | nn.ModuleDict)
    return not container and any(True for _ in module.children())


def _holds_blocks(module: nn.Module) -> bool:
    """Tell whether there are several of one class inside that are more than one layer deep themselves."""
    inside = [child for child in module.modules() if child is not module and _is_composite(child)]
    counts = Counter(map(type, inside))
    return any(counts[type(child)] > 1 and _depth(child) > 1 for child in inside)


def _depth(module: nn.Module) -> int:
    return max((1 + _depth(child) for child in module.children()), default=0)


def _wrap_layers(row: nn.Module, around: Callable[[Forward], Forward]) -> list[str]:
    """Wrap each layer that multiplies by a weight together with what follows; one alone has nothing to drop."""
    groups: list[list[nn.Module]] = [[]]
    for layer in row.children():
        if _multiplies(layer) and any(_multiplies(before) for before in groups[-1]):
            groups.append([])
        groups[-1].append(layer)
    wrapped = [group for group in groups if len(group) > 1 and any(_multiplies(layer) for layer in group)]
    functions = [around(_in_turn(group)) if group in wrapped else _in_turn(group) for group in groups]
    if wrapped:
        row.forward = _in_turn(functions)
    return ["-".join(type(layer).__name__ for layer in group) for group in wrapped]


def _multiplies(layer: nn.Module) -> bool:
    return any(parameter.dim() > 1 for parameter in layer.parameters())


def _in_turn(functions: Sequence[Forward]) -> Forward:
    def run(x: torch.Tensor) -> Any:
        for function in functions:
            x = function(x)
        return x

    return run


def segments(plain: Trainee) -> list[Contender]:
    """√n checkpointing by `checkpoint_sequential`, with √n segments and with counts around that."""
    if len(plain.args) != 1 or plain.kwargs or not isinstance(plain.args[0], torch.Tensor):
        raise _no_sequence("has other inputs")
    pieces = len(cut(copy_of(plain.model)))
    if pieces < MIN_PIECES:
        raise _no_sequence(f"falls into {pieces} (what is read again later crosses every other cut)")
    return [_segmented(count, pieces) for count in counts(pieces)]


def counts(pieces: int) -> list[int]:
    """Numbers of segments to try for so many pieces: √n, and others from two to as many as there are."""
    ratio = (pieces / 2) ** (1 / (MAX_COUNTS - 2))
    spread = {round(2 * ratio**power) for power in range(MAX_COUNTS - 1)}
    return sorted({round(math.sqrt(pieces)), *spread} & set(range(2, pieces + 1)))


def cut(model: nn.Module) -> list[Forward]:
    """A model's forward pass as functions to call in turn, each on the result of the one before.

    It is cut where torch.fx finds that a single tensor passes from what comes before to what comes after.

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
        raise _no_sequence("has other inputs")
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
    return list(split_module(traced, model, piece_of.__getitem__).children())


def _in_place(traced: fx.GraphModule, node: fx.Node) -> bool:
    """Tell whether a node may overwrite what it reads, which the segment before has to keep."""
    if node.op == "call_module":
        return bool(getattr(traced.get_submodule(str(node.target)), "inplace", False))
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return bool(node.kwargs.get("inplace")) or name in _ASSIGNING or name.endswith("_")


def _segmented(count: int, pieces: int) -> Contender:
    def prepare(model: nn.Module) -> nn.Module:
        functions, run = cut(model), cast(Any, checkpoint_sequential)  # torch has no types for it
        model.forward = lambda x: run(functions, count, x, use_reentrant=False)
        return model

    root = ", √n" if count == round(math.sqrt(pieces)) else ""
    setting, label = f"{count} segments of {pieces} pieces{root}", f"{count} segments"
    return Contender(peer=Peer.SEGMENTS, setting=setting, label=label, prepare=prepare)


def _no_sequence(what: str) -> Unsupported:
    return Unsupported(f"it takes a sequence of modules with one tensor between them; this model {what}")


def inductor(_: Trainee, shares: Sequence[float] | None = None) -> list[Contender]:
    """Compiled by Inductor, as `torch.compile(model)` does, within a share of the memory for activations."""
    return [_compiled(Peer.INDUCTOR, share, inductor_backend()) for share in shares or SHARES]


def aot_eager(_: Trainee) -> list[Contender]:
    """The same choice of what to keep, by PyTorch's own kernels: torch's backend `aot_eager_decomp_partition`."""
    return [_compiled(Peer.AOT_EAGER, share, partitioning_backend()) for share in SHARES]


def _compiled(peer: Peer, share: float, compile_graph: CompilerBackend) -> Contender:
    def prepare(model: nn.Module) -> nn.Module:
        # Dynamo hands one program to models of one class with one backend, whatever the settings were that it was
        # compiled with: each contender has a backend of its own.
        def backend(graph: fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
            with aot_settings(activation_memory_budget=share):
                return compile_graph(graph, inputs)

        model.compile(backend=backend, dynamic=False)
        return model

    return Contender(
        peer=peer, setting=f"memory budget {share:g}", label=f"{peer}, budget {share:g}", prepare=prepare
    )
