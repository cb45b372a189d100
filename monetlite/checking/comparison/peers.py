"""Other ways to train within less memory: what people use today beside monetlite.

Each function makes the contenders of one peer, one for each setting, from plain training. A contender's `prepare`
applies the setting to a copy of the model, with which it goes.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from typing import Any, cast

import torch
from torch import fx, nn
from torch.autograd.graph import save_on_cpu
from torch.fx.passes.split_module import split_module
from torch.utils.checkpoint import checkpoint_sequential

from monetlite.checking.comparison.bench import Contender, Unsupported, copy_of
from monetlite.checking.comparison.checkpoint_blocks import Forward, checkpointed, selective_contexts, wrap_blocks
from monetlite.checking.comparison.peer_runs import Peer
from monetlite.checking.trainee import Trainee
from monetlite.core.errors import first_line
from monetlite.fx.torch_internals.torch_aot import aot_settings
from monetlite.fx.torch_internals.torch_inductor import inductor_backend, partitioning_backend
from monetlite.operators.traits import aten_name, family_of, operation_formula

EVERY = (1, 2, 3, 4)
"""Settings of checkpointing: every block, or every second to fourth."""
SHARES = (1.0, 0.7, 0.5, 0.3, 0.1)
"""Settings of torch.compile's `activation_memory_budget`: 1 is its own choice, 0 checkpoints everything."""
MIN_PIECES = 4
"""A model that falls into fewer pieces is not a sequence."""
MAX_COUNTS = 7
"""Number of segment counts that are tried."""
_ENABLE = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
"""Names of transformers' method, the newer one first."""
_ORDINALS = {1: "", 2: "every second of ", 3: "every third of ", 4: "every fourth of "}
_ASSIGNING = ("iadd", "isub", "imul", "itruediv", "imatmul", "ifloordiv", "ipow")

CompilerBackend = Callable[[fx.GraphModule, list[torch.Tensor]], Any]
Saving = Callable[[str, int], bool]
"""Tells whether an operator's result is saved, by its name and the number of matrix products that the block ran."""


def _saves_products(name: str, _: int) -> bool:
    return operation_formula(name) is not None


def _saves_attention(name: str, _: int) -> bool:
    return family_of(name) == "attention"


def _saves_every_second_product(name: str, products: int) -> bool:
    return _saves_products(name, products) and not (_is_product(name) and products % 2 == 0)


POLICIES: Mapping[str, Saving] = {
    "products saved": _saves_products,
    "attention saved": _saves_attention,
    "every second product saved": _saves_every_second_product,
}
"""Settings of selective checkpointing. Attention and convolutions count as products; of matrix products, the last
saves every second one, as torchtitan does."""


def by_blocks(plain: Trainee, every: Iterable[int] = EVERY) -> list[Contender]:
    """`torch.utils.checkpoint` around every n-th block, by the model's own method where it is one of transformers'.

    On a GPU, also with what blocks read in main memory until they run again. A setting with as many checkpoints as
    one before is left out.
    """
    found: dict[int, Contender] = {}
    for count in every:
        contender, checkpoints = _checkpointing(Peer.CHECKPOINT, plain.model, {}, count)
        found.setdefault(checkpoints, contender)
    if plain.device == "cuda":
        found[0], _ = _checkpointing(Peer.CHECKPOINT, plain.model, {}, offload=True)
    return list(found.values())


def selective(plain: Trainee) -> list[Contender]:
    """Selective checkpointing of every block, by each policy that decides as no other does in this model.

    A saved result may not be overwritten. Where layers overwrite what they read, both are tried: the model as it
    is, and with those layers told not to.
    """
    ran = _operators_of_blocks(plain)
    policies: dict[tuple[bool, ...], str] = {}
    for policy, saves in POLICIES.items():
        policies.setdefault(tuple(decision for names in ran for decision in _decisions(saves, names)), policy)
    chosen = [policy for decisions, policy in policies.items() if any(decisions)]
    if not chosen:
        raise Unsupported("no block of this model has a matrix product, a convolution or attention to save")
    found = []
    for policy in chosen:
        options = {"context_fn": functools.partial(_selecting, POLICIES[policy])}
        contender, _ = _checkpointing(Peer.SELECTIVE, plain.model, options)
        found.append(replace(contender, setting=policy, label=policy))
    if any(vars(module).get("inplace") for module in plain.model.modules()):
        found += [_with_nothing_in_place(contender) for contender in found]
    return found


def _with_nothing_in_place(contender: Contender) -> Contender:
    def prepare(model: nn.Module) -> nn.Module:
        for module in model.modules():
            if "inplace" in vars(module):
                vars(module)["inplace"] = False
        return contender.prepare(model)

    return replace(contender, setting=f"{contender.setting}, nothing in place", prepare=prepare)


def _selecting(saves: Saving) -> Any:
    """Contexts of a checkpoint that saves results by a policy."""
    products = {False: 0, True: 0}

    def decide(operator: str, again: bool) -> bool:
        products[again] += _is_product(operator)
        return saves(operator, products[again])

    return selective_contexts(decide)


def _is_product(name: str) -> bool:
    return aten_name(name) in ("mm", "addmm")


def _decisions(saves: Saving, names: Sequence[str]) -> list[bool]:
    products = itertools.accumulate(map(_is_product, names), initial=0)
    return [saves(name, count) for name, count in zip(names, itertools.islice(products, 1, None), strict=True)]


def _operators_of_blocks(plain: Trainee) -> list[list[str]]:
    """Names of the operators that each block runs in a step."""
    ran: list[list[str]] = []

    def noting() -> Any:
        names: list[str] = []
        ran.append(names)

        def note(operator: str, again: bool) -> bool:
            names.extend([operator] * (not again))
            return False

        return selective_contexts(note)

    contender, _ = _checkpointing(Peer.SELECTIVE, plain.model, {"context_fn": noting})
    plain.of(contender.prepare(copy_of(plain.model))).step()
    plain.clear()
    return ran


def _checkpointing(
    peer: Peer, model: nn.Module, options: dict[str, Any], every: int = 1, *, offload: bool = False
) -> tuple[Contender, int]:
    """A contender that checkpoints every n-th block, and the number of its checkpoints."""
    enable = functools.partial(_enable, options={"use_reentrant": False, **options}, every=every, offload=offload)
    setting, checkpoints = enable(copy_of(model))

    def prepare(model: nn.Module) -> nn.Module:
        enable(model)
        return model

    label = f"{peer} 1 in {every}" if every > 1 else f"{peer}, offload" if offload else str(peer)
    return Contender(peer=peer, setting=setting, label=label, prepare=prepare), checkpoints


def _enable(model: nn.Module, options: dict[str, Any], every: int, offload: bool) -> tuple[str, int]:
    """Checkpoint blocks of a model; returns what was done in words, and the number of checkpoints."""
    suffix = ", offload" if offload else ""
    if getattr(model, "supports_gradient_checkpointing", False):
        method = getattr(model, next(name for name in _ENABLE if hasattr(model, name)))
        further = {"every_n_layers": every, "offload": offload} if every > 1 or offload else {}
        if not further.keys() <= signature(method).parameters.keys():
            raise Unsupported(f"this version of transformers has no {' and '.join(further)}")
        method(options, **further)
        flagged = sum(getattr(module, "gradient_checkpointing", False) is True for module in model.modules())
        return f"every_n_layers={every}{suffix}", flagged
    numbers, checkpoints = itertools.count(), 0

    def around(forward: Forward) -> Forward:
        nonlocal checkpoints
        if next(numbers) % every:
            return forward
        checkpoints += 1
        run = checkpointed(forward, options)
        return _offloading(run) if offload else run

    wrapped = wrap_blocks(model, around)
    if not wrapped:
        raise Unsupported("there is nothing to wrap: no kind of module occurs more than once")
    return f"{_ORDINALS[every]}{wrapped}{suffix}", checkpoints


def _offloading(forward: Forward) -> Forward:
    def run(*args: Any, **kwargs: Any) -> Any:
        with save_on_cpu(pin_memory=True):
            return forward(*args, **kwargs)

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
        raise Unsupported(
            f"torch.fx, which would cut the model into a sequence, can't trace it: {first_line(error)}"
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
