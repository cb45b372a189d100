"""The sizes of a model's inputs that vary from call to call, so that one program should serve them all."""

import contextlib
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from monetlite.fx.torch_internals import torch_pytree as pytree
from monetlite.fx.torch_internals.torch_symbols import marked_as_varying
from monetlite.runtime.serving import input_signature
from monetlite.tracing.step_inputs import Arguments

Dimensions: TypeAlias = Mapping[int, frozenset[int]]
"""For each leaf of a call's arguments, by position, the dimensions that vary."""
Signature: TypeAlias = tuple[Any, ...]
_MAX_CALLS = 16
"""Different calls of one structure that are remembered."""
_MIN_ODD = 16
_log = logging.getLogger("monetlite")


class CallSizes:
    """Knowledge of the sizes of a model's inputs.

    A dimension varies once it has been of two sizes. The first one, of batches, has to be of three: the last batch
    of an epoch is often smaller.

    Attributes:
        fixed: True if each size has to be captured by itself.
        asked: True while a step is captured whose sizes are asked to vary.
    """

    def __init__(self) -> None:
        self.fixed = self.asked = False
        self._calls: dict[str, list[Signature]] = {}
        self._varying: dict[str, Dimensions] = {}

    def signature(self, call: Arguments, any_number: Collection[type] = ()) -> Signature:
        """The key of a program: all that is known of a call's arguments, but the sizes that vary.

        Args:
            call: the arguments.
            any_number: types of numbers of which programs serve all values.
        """
        exact = _exact(call, any_number)
        return _without_sizes(exact, self._varying_of(exact))

    def signatures(self, call: Arguments, any_number: Collection[type] = ()) -> set[Signature]:
        """The keys of programs that serve a call: with its own sizes, from before they varied, or with any."""
        return {_exact(call, any_number), self.signature(call, any_number)}

    def varying(self, call: Arguments) -> Dimensions:
        """The dimensions of a call's leaves that vary."""
        return self._varying_of(input_signature(*call))

    def _varying_of(self, exact: Signature) -> Dimensions:
        """The same by signature: None, text or a tensor of fewer dimensions may stand where others have varied."""
        found = self._varying.get(exact[-1], {})
        return {
            at: dimensions
            for at, dimensions in found.items()
            if isinstance(exact[at][0], torch.Size) and max(dimensions) < len(exact[at][0])
        }

    def note(self, call: Arguments) -> None:
        """Learn from a call."""
        if self.fixed:
            return
        exact = _exact(call, any_number=(float, int))
        structure, known = exact[-1], self._calls.setdefault(exact[-1], [])
        found = dict(self._varying.get(structure, {}) if known else _guessed(pytree.tree_leaves(tuple(call))))
        others = [dimensions for item in known if (dimensions := _differing(exact, item)) is not None]
        for dimensions in others:
            for at, numbers in dimensions.items():
                batches = sum(0 in item.get(at, ()) for item in others)
                found[at] = found.get(at, frozenset()) | {item for item in numbers if item > 0 or batches > 1}
        self._varying[structure] = {at: numbers for at, numbers in found.items() if numbers}
        if exact not in known:
            known.append(exact)
            del known[:-_MAX_CALLS]

    def fix(self, reason: str) -> None:
        """Have each size captured by itself from here on."""
        _log.info("each size of inputs is captured by itself: %s", reason)
        self.fixed, self._varying = True, {}

    @contextlib.contextmanager
    def asked_to_vary(self, call: Arguments) -> Iterator[bool]:
        """Capture a call's sizes as they vary, for the time of a block; tells whether any does.

        TorchDynamo takes a size of one by itself.
        """
        leaves = pytree.tree_leaves(tuple(call))
        dimensions = [
            (leaves[at], number)
            for at, numbers in self.varying(call).items()
            for number in numbers
            if leaves[at].shape[number] > 1
        ]
        self.asked = bool(dimensions)
        try:
            with marked_as_varying(dimensions):
                yield self.asked
        finally:
            self.asked = False


def _exact(call: Arguments, any_number: Collection[type]) -> Signature:
    return tuple((item[0], "") if item[0] in any_number else item for item in input_signature(*call))


def _guessed(leaves: Sequence[object]) -> Dimensions:
    """The dimensions of a first call that look as if they will vary.

    Batches of tokens are rarely of an odd length where lengths are fixed: they are where each is as long as its
    longest text.
    """
    odd = {
        size
        for leaf in leaves
        if isinstance(leaf, torch.Tensor) and not (leaf.is_floating_point() or leaf.is_complex())
        for size in leaf.shape[1:]
        if size > _MIN_ODD and size % 8
    }
    found = {
        at: frozenset(number for number, size in enumerate(leaf.shape) if number > 0 and size in odd)
        for at, leaf in enumerate(leaves)
        if isinstance(leaf, torch.Tensor)
    }
    return {at: dimensions for at, dimensions in found.items() if dimensions}


def _differing(one: Signature, other: Signature) -> Dimensions | None:
    """The dimensions in which two signatures of one structure differ; None if they differ in more than sizes."""
    found: dict[int, frozenset[int]] = {}
    for at, (mine, its) in enumerate(zip(one, other, strict=True)):
        if mine == its:
            continue
        tensors = all(isinstance(item[0], torch.Size) for item in (mine, its))
        if not tensors or len(mine[0]) != len(its[0]) or mine[2:] != its[2:]:
            return None
        found[at] = frozenset(
            number for number, sizes in enumerate(zip(mine[0], its[0], strict=True)) if len(set(sizes)) > 1
        )
    return found


def _without_sizes(signature: Signature, varying: Dimensions) -> Signature:
    """A signature that says nothing of the sizes of some dimensions."""
    items = list(signature)
    for at, dimensions in varying.items():
        shape, stride, *others = items[at]
        sizes = tuple(-1 if number in dimensions else size for number, size in enumerate(shape))
        contiguous = stride == torch.empty(shape, device="meta").stride()
        items[at] = (sizes, "contiguous" if contiguous else stride, *others)
    return tuple(items)
