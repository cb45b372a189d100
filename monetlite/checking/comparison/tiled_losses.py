"""Head and cross-entropy of a language model in tiles of rows, in plain PyTorch, as TRL, Liger and axolotl do it.

Loss and gradients of a tile are made in the forward pass, so that the logits are never whole. A step of the model
tells its head and loss: an `F.linear`, and the `F.cross_entropy` that takes its results as they are or in another
dtype.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from monetlite.checking.comparison.bench import Contender, Unsupported, copy_of
from monetlite.checking.comparison.peer_runs import Peer
from monetlite.checking.comparison.peers import by_blocks, selective
from monetlite.checking.trainee import Trainee

TILES = (8, 32)
"""Settings: numbers of tiles. 8 is the default of torchtune and axolotl."""
_CASTS = (torch.Tensor.float, torch.Tensor.to)


def tiled(plain: Trainee) -> list[Contender]:
    """Each number of tiles, alone and with checkpointing beside it, as people use it.

    Raises:
        Unsupported: no cross-entropy of this model takes what a linear layer has made.
    """
    seen = _LossInTiles()
    plain.of(_within(seen, copy_of(plain.model))).step()
    plain.clear()
    found = [name for name, parameter in plain.model.named_parameters() if parameter is seen.head]
    if not found:
        raise Unsupported("no cross-entropy in this model takes the results of a linear layer as they are")
    others: list[Contender | None] = [None]
    with contextlib.suppress(Unsupported):
        others += [*by_blocks(plain, (1, 2)), *selective(plain)]
    return [_tiled(found[0], tiles, other) for tiles in TILES for other in others]


def _tiled(head: str, tiles: int, other: Contender | None) -> Contender:
    def prepare(model: nn.Module) -> nn.Module:
        prepared = model if other is None else other.prepare(model)
        return _within(_LossInTiles(prepared.get_parameter(head), tiles), prepared)

    words = f"{tiles} tiles" if other is None else f"{tiles} tiles, {other.label}"
    return Contender(peer=Peer.TILED_LOSS, setting=words, label=words, prepare=prepare)


def _within(mode: TorchFunctionMode, model: nn.Module) -> nn.Module:
    """The model, whose forward pass runs within a mode from now on."""
    forward = model.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return forward(*args, **kwargs)

    model.forward = run
    return model


class _LossInTiles(TorchFunctionMode):
    """Runs a head and its loss in tiles. The logits, which others pass on, are a single zero in memory.

    Without a head it runs nothing otherwise: afterwards `head` is the weight whose products a cross-entropy took.
    """

    def __init__(self, head: torch.Tensor | None = None, tiles: int = 0) -> None:
        super().__init__()
        self.head, self._tiles = head, tiles
        self._linear: tuple[Any, ...] = ()
        self._logits: list[torch.Tensor] = []

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        def run(first: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = function(first, *args[1:], **(kwargs or {}))
            return result

        if function is F.linear and (not self._tiles or args[1] is self.head):
            self._linear, self._logits = tuple(args), []
            return self._passed_on(run, args[0], (*args[0].shape[:-1], len(args[1])))
        if function in _CASTS and self._are_logits(args[0]):
            return self._passed_on(run, args[0], args[0].shape)
        if function is F.cross_entropy and self._are_logits(args[0]) and self._rows_are_in_order(args[0]):
            self.head = self._linear[1]
            if self._tiles:
                return self._loss(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))

    def _passed_on(
        self, run: Callable[[torch.Tensor], torch.Tensor], first: torch.Tensor, shape: Any
    ) -> torch.Tensor:
        """The logits as a function makes them, or a tensor of their shape and dtype in their place."""
        if self._tiles:
            row = run(first.detach().flatten(0, -2)[:1])
            self._logits.append(row.new_zeros(()).expand(shape))
        else:
            self._logits.append(run(first))
        return self._logits[-1]

    def _are_logits(self, tensor: torch.Tensor) -> bool:
        """True for a view of all logits, which has their storage."""
        address = tensor.untyped_storage().data_ptr()
        return any(
            address == item.untyped_storage().data_ptr() and tensor.numel() == item.numel() for item in self._logits
        )

    def _rows_are_in_order(self, logits: torch.Tensor) -> bool:
        """True if the logits of a position, which are those of one row of the linear layer, follow in its order."""
        return self._tiles > 0 or logits.movedim(1, -1).is_contiguous()

    def _loss(
        self,
        logits: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | None = None,
        size_average: None = None,
        ignore_index: int = -100,
        reduce: None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> torch.Tensor:
        """The arguments are those of `F.cross_entropy`."""
        if weight is not None or label_smoothing or reduction not in ("mean", "sum"):
            raise Unsupported("its cross-entropy is weighted, smoothed, or not reduced")
        x, head, bias = (*self._linear, None)[:3]
        self._linear, self._logits = (), []  # they would stay in memory until the next step
        count = (target != ignore_index).sum() if reduction == "mean" else 1
        loss = _TiledLoss.apply(  # type: ignore[no-untyped-call]  # torch has no types for it
            x.flatten(0, -2), head, bias, target.flatten(), ignore_index, self._tiles
        )
        total: torch.Tensor = loss / count
        return total.to(logits.dtype)


class _TiledLoss(torch.autograd.Function):
    """Sum of the cross-entropies of `F.linear(x, weight, bias)`; x of shape (rows, width), target of (rows,)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        ignored: int,
        tiles: int,
    ) -> torch.Tensor:
        dtype = F.linear(x[:1], weight, bias).dtype
        of_x = torch.empty_like(x)
        of_weight = torch.zeros_like(weight, dtype=dtype) if weight.requires_grad else None
        of_bias = torch.zeros_like(bias, dtype=dtype) if bias is not None and bias.requires_grad else None
        loss = torch.zeros((), device=x.device)
        size = -(-len(x) // tiles)
        for rows, labels, gradient in zip(*(torch.split(item, size) for item in (x, target, of_x)), strict=True):
            logits = F.linear(rows, weight, bias).requires_grad_()
            with torch.enable_grad():
                part = F.cross_entropy(logits.float(), labels, ignore_index=ignored, reduction="sum")
            (slope,) = torch.autograd.grad(part, logits)
            loss += part.detach()
            gradient.copy_(slope @ weight)
            if of_weight is not None:
                of_weight.addmm_(slope.T, rows.to(dtype))
            if of_bias is not None:
                of_bias += slope.sum(0)
        ctx.save_for_backward(of_x, of_weight, of_bias)
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        made = (None if item is None else item.mul_(gradient) for item in ctx.saved_tensors)
        return (*made, None, None, None)
