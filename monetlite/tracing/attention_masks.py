"""Attention masks of transformers models, made in a capture as plain training makes them.

transformers looks at values: attention without padding gets no mask, and positions are searched for packed
sequences. A capture can't look at values. It would make a mask for any case: other kernels would run than in plain
training, without flash attention, and take more memory.

A mask that is known to be of ones has strides of zero (`with_known_masks`). So its layout says what it is, and
whatever is kept by layouts is kept for each kind of mask: programs, schedules, guards.

Models that are given no mask often make one of ones. That is known from the capture, unless the model writes to it.
"""

import contextlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from monetlite.core.graph import TensorSpec
from monetlite.fx.torch_internals.torch_dynamo import calls_changed
from monetlite.tracing.step_inputs import Arguments

_MASKS = ("attention_mask", "decoder_attention_mask", "encoder_attention_mask")
"""Arguments that say which tokens are padding."""
_LEAVE_OUT = (
    "_ignore_causal_mask_sdpa",
    "_ignore_bidirectional_mask_sdpa",
    "create_recurrent_attention_mask",
)
"""Functions of transformers that find out if a mask is of ones. Then they go on as without it."""
_NONE_OF_ONES = ("_prepare_4d_attention_mask_for_sdpa",)
"""Functions of transformers that make None of a mask of ones."""
_ASKING = ("is_tracing", "is_torchdynamo_compiling")
"""Functions by which the others ask whether they may look at a mask. Older versions ask without a mask, too."""


def is_known(mask: torch.Tensor | TensorSpec) -> bool:
    """True for a mask of ones, by its layout."""
    stride = mask.stride() if isinstance(mask, torch.Tensor) else mask.stride
    return tuple(stride) == (0, 0)


def masks_known(model: nn.Module) -> bool:
    """True if transformers makes masks in this model, so that it matters whether they are known."""
    return bool(_masking()) and any(
        type(module).__module__.startswith("transformers.") for module in model.modules()
    )


def with_known_masks(model: nn.Module, call: Arguments) -> Arguments:
    """A call whose masks of ones have strides of zero, and whose other masks don't.

    Looking at a mask waits for its device, as plain training does.
    """
    names = [*inspect.signature(model.forward).parameters]
    args = tuple(
        _known(item) if at < len(names) and names[at] in _MASKS else item for at, item in enumerate(call.args)
    )
    kwargs = {name: _known(item) if name in _MASKS else item for name, item in call.kwargs.items()}
    return Arguments(args, kwargs)


def _known(mask: Any) -> Any:
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or mask.is_meta or mask.requires_grad:
        return mask
    if not bool((mask == 1).all()):
        return mask.contiguous() if is_known(mask) else mask
    return mask.new_empty(0).set_(mask.untyped_storage(), mask.storage_offset(), mask.shape, (0, 0))


def keeps_cache(model: nn.Module) -> bool:
    """True if a transformers model keeps keys and values by default."""
    wanted = bool(getattr(getattr(model, "config", None), "use_cache", False))
    return wanted and "use_cache" in inspect.signature(model.forward).parameters


def masks_as_plain(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> AbstractContextManager[Any]:
    """Have a capture of a call make the masks that plain training makes, for the time of a block.

    Packed sequences are looked for in positions that are given where there is neither a mask nor a cache.
    """
    if not _masking():
        return contextlib.nullcontext()
    with contextlib.suppress(TypeError):
        given = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
        kwargs = {**given, **kwargs}
    looks = kwargs.get("position_ids") is not None and not (keeps_cache(model) and "use_cache" not in kwargs)
    results: dict[Callable[..., Any], Any] = {}
    if not looks:
        results |= dict.fromkeys(_functions("find_packed_sequence_indices"))
    # TorchDynamo says True in any capture in torch 2.11.
    results |= dict.fromkeys(_functions("is_torchdynamo_exporting"), False)
    return calls_changed(
        results, _functions(*_LEAVE_OUT), none_of_ones=_functions(*_NONE_OF_ONES), asking=_functions(*_ASKING)
    )


def _functions(*names: str) -> list[Callable[..., Any]]:
    """Functions of these names among those of transformers that make masks."""
    return [item for owner in _masking() for name in names if (item := getattr(owner, name, None)) is not None]


def _masking() -> list[Any]:
    """The modules and classes of transformers that make masks, as far as models have them."""
    modules = [sys.modules.get(f"transformers.{name}") for name in ("masking_utils", "modeling_attn_mask_utils")]
    owners = [item for module in modules for item in (module, getattr(module, "AttentionMaskConverter", None))]
    return [item for item in owners if item is not None]
