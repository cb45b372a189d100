"""Row chains: operators that treat each row of a sequence by itself, run as one operator, in tiles of rows.

A language model's MLPs, projections and normalisations compute each token's result from that token alone. What they
make on the way is often the largest that a layer holds. Run some rows at a time, forward and backward, it is there
for those rows only; the backward pass makes it again from the chain's inputs. Sums over rows (gradients of weights)
are added tile by tile, in another order than plain training's. For MLPs of long sequences this is TiledMLP (Bekman
et al., Arctic Long Sequence Training, arXiv:2506.13996).

A chain is data: the steps of a captured graph, with the operators that plain training runs.
`monetlite.tracing.row_chains` finds them.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from monetlite.core.graph import Call, Implementation, TensorRef, ValueKind
from monetlite.core.options import REORDERED_SUMS
from monetlite.fx.torch_internals.torch_dispatch import named_operator, unchecked
from monetlite.operators.elementwise import over_operand
from monetlite.operators.implementations import (
    MIN_TILE_ROWS,
    KernelRuns,
    TracedKernel,
    alternatives_for,
    function,
    slices,
)
from monetlite.operators.strides import item_bytes
from monetlite.operators.tile_parts import added_product, first_part, made_up, runs, summed_product, turned
from monetlite.operators.traits import traits_of

TILES, PRODUCT_TILES = (2, 4, 8), (4,)
"""Tiles of chains that make everything again, and of those that keep their products."""
PRODUCTS = ("aten.mm.default", "aten.addmm.default")
"""Of a row and a matrix."""
OUTER, SUM = "outer", "sum"
"""Sums over all rows: of the outer products of two rows, and of a row's elements."""
ROW, WHOLE, WIDENED, DTYPE = "row", "whole", "widened", "dtype"
"""Operands of a step: a slot of the chain; something that all rows share; a slot's single column, so many times; a
dtype by name."""


@dataclass(frozen=True)
class ChainStep:
    """One step of a chain.

    Attributes:
        slot: number of its result. Slots below the number of rows are theirs: the step makes such a row again.
        target: ATen overload, `OUTER` or `SUM`.
        args, kwargs: with operands as ("row", slot), ("whole", position), ("widened", slot, width) and
            ("dtype", name).
        width, dtype: of a row of the result.
    """

    slot: int
    target: str
    args: Any
    kwargs: Any
    width: int
    dtype: str

    @property
    def sums(self) -> bool:
        """True if the result is of all rows together."""
        return self.target in (OUTER, SUM)

    @property
    def operands(self) -> list[int]:
        """Slots that it reads."""
        given = [*self.args, *(value for _, value in self.kwargs)]
        return [item[1] for item in given if _is_operand(item, ROW) or _is_operand(item, WIDENED)]

    @property
    def kept(self) -> bool:
        """True for what takes long to make again, or is small: products and statistics."""
        return self.target in PRODUCTS or self.width == 1


def _is_operand(item: Any, kind: str) -> bool:
    return isinstance(item, list | tuple) and len(item) > 1 and item[0] == kind


@dataclass(frozen=True)
class _Launch:
    """A step as a tile runs it.

    Attributes:
        step: it.
        dying: slots that nothing reads after it.
        over: position of an operand that its result is written over.
    """

    step: ChainStep
    dying: list[int]
    over: int | None

    @cached_property
    def call(self) -> tuple[Callable[..., Tensor] | None, list[Any], dict[str, Any]]:
        """The operator, which sums have none of, and the step's operands, with dtypes as torch's."""
        target, kwargs = self.step.target, {name: _resolved(item) for name, item in self.step.kwargs}
        if self.over is not None:
            target, keyword = over_operand(target, self.over)
            kwargs |= {keyword: self.step.args[self.over]} if keyword else {}
        run = None if self.step.sums else unchecked(named_operator(target))
        return run, list(map(_resolved, self.step.args)), kwargs


def _resolved(item: Any) -> Any:
    return getattr(torch, item[1]) if _is_operand(item, DTYPE) else item


def _needed(steps: Sequence[Any], given: Sequence[Any], results: Sequence[Any]) -> list[_Launch]:
    """The launches of the steps that results need, in order."""
    wanted = {slot for slot, *_ in results if slot is not None}
    chosen: list[ChainStep] = []
    for step in (ChainStep(*item) for item in reversed(steps)):
        if step.slot in wanted and (step.slot >= len(given) or given[step.slot] is None):
            chosen.append(step)
            wanted.update(step.operands)
    last = {slot for slot, *_ in results}
    dying: list[list[int]] = []
    for step in chosen:
        operands = set(step.operands)
        is_input = {slot for slot in operands if slot < len(given) and given[slot] is not None}
        dying.append(sorted(operands - last - is_input))
        last |= operands
    made: dict[int, tuple[int, str]] = {}
    planned: list[_Launch] = []
    for step, slots in zip(chosen[::-1], dying[::-1], strict=True):
        planned.append(_Launch(step, slots, _over(step, slots, made)))
        made[step.slot] = (step.width, step.dtype)
    return planned


def _over(step: ChainStep, dying: Sequence[int], made: dict[int, tuple[int, str]]) -> int | None:
    """Position of an operand of a step that its result may be written over."""
    if step.target.rpartition(".")[2] not in traits_of(step.target).in_place:
        return None
    for position in (0, 1) if traits_of(step.target).commutative else (0,):
        operand: Any = step.args[position] if position < len(step.args) else None
        if _is_operand(operand, ROW) and operand[1] in dying and made.get(operand[1]) == (step.width, step.dtype):
            return position
    return None


_launches_of: dict[tuple[Any, ...], tuple[Any, Any, list[_Launch]]] = {}
"""Launches of chains, by the identities of their steps and results and the rows that are given.

With steps and results, so that no others take their identities. Equality would not do: 0.0 equals -0.0.
"""
_MOST_CHAINS = 1024


def _launches_for(steps: Sequence[Any], given: Sequence[Tensor | None], results: Sequence[Any]) -> list[_Launch]:
    """The launches of a chain, which are the same in each training step."""
    key = (id(steps), id(results), *(row is None for row in given))
    if found := _launches_of.get(key):
        return found[2]
    if len(_launches_of) >= _MOST_CHAINS:
        _launches_of.clear()
    launches = _needed(steps, given, results)
    _launches_of[key] = (steps, results, launches)
    return launches


def _tile_rows(rows: Sequence[Any], tiles: int) -> int:
    """Rows of a tile, by the specifications of the rows that are given."""
    count: int = math.prod(next(row for row in rows if row is not None).spec.shape[:-1])
    return -(-count // tiles)


def _row_bytes(launches: Sequence[_Launch], returned: Collection[int]) -> int:
    """Bytes that launches hold for one row, at most, beside the slots that are returned as they are made."""
    sizes: dict[int, int] = {}
    live = most = 0
    for launch in launches:
        step, dying = launch.step, launch.dying
        if not step.sums:
            sizes[step.slot] = step.width * item_bytes(step.dtype)
            taken = None if launch.over is None else step.args[launch.over][1]
            live += sizes[step.slot] - (0 if taken is None else sizes.get(taken, 0))
            most = max(most, live)
            dying = [slot for slot in dying if slot != taken]
        live -= sum(sizes.get(slot, 0) for slot in dying)
    return most - sum(sizes.get(slot, 0) for slot in returned)


def _kernels(call: Call) -> Iterator[KernelRuns]:
    """The kernels of a chain: those of its steps, sums over tiles, and copies of a tile's results."""
    rows, wholes, steps, results, _, tiles, _ = cast(Any, call.args)
    count = _tile_rows(rows, tiles)
    slots = {at: made_up(row.spec.dtype, count, row.spec.shape[-1]) for at, row in enumerate(rows) if row}

    def operand(item: Any) -> Any:
        if _is_operand(item, WIDENED):
            spec = slots[item[1]].spec
            return replace(slots[item[1]], spec=replace(spec, shape=(count, item[2]), stride=(1, 0)))
        if _is_operand(item, WHOLE):
            return wholes[item[1]]
        return slots[item[1]] if _is_operand(item, ROW) else item

    for step in (launch.step for launch in _needed(steps, rows, results)):
        args = [operand(item) for item in step.args]
        if step.target == OUTER:
            left, right = args
            yield from summed_product(turned(left), right, tiles)
        elif step.target == SUM:
            made = made_up(step.dtype, 1, step.width)
            yield runs(tiles, "aten.sum.dim_IntList", *args, made=made)
        else:
            made = slots[step.slot] = made_up(step.dtype, count, step.width)
            yield runs(tiles, step.target, *args, made=made)
    for slot, _, shape in results if tiles > 1 else ():
        if slot is not None and shape is None:
            yield runs(tiles, "aten.clone.default", slots[slot], made=slots[slot])


def _tile_bytes(call: Call) -> int:
    """Bytes that the steps of a tile hold at a time, and sums of 16-bit products in float32."""
    rows, _, steps, results, _, tiles, over = cast(Any, call.args)
    needed = _needed(steps, rows, results)
    # Those of several tiles are copied.
    returned = {item[0] for at, item in enumerate(results) if tiles == 1 and (over is None or at != over[0])}
    narrow = {item.step.slot for item in needed if item.step.sums and item_bytes(item.step.dtype) < 4}
    sums: int = sum(math.prod(shape) for slot, _, shape in results if slot in narrow and tiles > 1)
    return _row_bytes(needed, returned) * _tile_rows(rows, tiles) + 4 * sums


@function("row_chain", workspace_bytes=_tile_bytes, kernels=_kernels)
def row_chain(
    rows: Sequence[Tensor | None],
    wholes: Sequence[Tensor],
    steps: Sequence[Any],
    results: Sequence[Any],
    own: int,
    tiles: int,
    over: tuple[int, int] | None,
) -> tuple[Tensor | None, ...]:
    """Run a chain of row-wise operators, some rows at a time.

    Args:
        rows: of shape (..., width), contiguous; None for those that the steps make again.
        wholes: what all rows share: matrices, weights, biases.
        steps: the fields of each `ChainStep`.
        results: of each result, its slot, or None if it isn't wanted; the row whose leading dimensions it has, or
            None if it has one; its shape if it is a sum.
        own: number of results that are the chain's; those after them are made on the way, for its backward pass.
        tiles: number of tiles.
        over: (position of a result, row whose memory it takes), or None.

    Returns:
        The results, in order; None for those that aren't wanted.
    """
    flat = [None if row is None else row.reshape(-1, row.shape[-1]) for row in rows]
    first = next(row for row in flat if row is not None)
    launches = _launches_for(steps, rows, results)
    count = first.shape[0]
    sums: dict[int, Tensor] = {}
    dtypes = {item.step.slot: getattr(torch, item.step.dtype) for item in launches if item.step.sums}
    made: dict[int, Any] = {} if over is None else {over[0]: flat[over[1]]}
    vectors = [item.reshape(-1) if item.dim() and item.dim() != 2 else item for item in wholes]
    for some in slices(count, -(-count // tiles)):
        slots = {at: row[some] for at, row in enumerate(flat) if row is not None}

        def operand(item: Any, slots: dict[int, Tensor] = slots) -> Any:
            if not isinstance(item, list | tuple) or len(item) < 2:
                return item
            kind, of, *rest = item
            if kind == ROW:
                return slots[of]
            return slots[of].expand(-1, rest[0]) if kind == WIDENED else vectors[of]

        for launch in launches:
            run, given, named = launch.call
            args = [operand(item) for item in given]
            kwargs = {name: operand(item) for name, item in named.items()}
            if run is None:
                _add(sums, launch.step, args, tiles)
            else:
                slots[launch.step.slot] = run(*args, **kwargs)
            del args, kwargs
            for slot in launch.dying:
                slots.pop(slot, None)
        for position, (slot, _, shape) in enumerate(results):
            if slot is None or shape is not None:
                continue
            if tiles == 1 and position not in made:
                made[position] = slots[slot]
                continue
            if position not in made:
                made[position] = slots[slot].new_empty((count, slots[slot].shape[1]))
            made[position][some].copy_(slots[slot])
        del slots, operand  # the next tile takes its place
    found: list[Tensor | None] = []
    for position, (slot, like, shape) in enumerate(results):
        if slot is None:
            found.append(None)
        elif shape is not None:
            found.append(sums[slot].to(dtypes[slot]).view(shape))
        else:
            beside = made[position] if like is None else rows[like]
            assert beside is not None
            found.append(made[position].view(*beside.shape[:-1], made[position].shape[-1]))
    return tuple(found)


def _add(sums: dict[int, Tensor], step: ChainStep, operands: Sequence[Tensor], tiles: int) -> None:
    """Add a tile's part of a sum over all rows."""
    total = sums.get(step.slot)
    if step.target == OUTER:
        left, right = operands
        sums[step.slot] = added_product(total, left.t(), right, tiles)
    else:
        part = operands[0].sum(0)
        sums[step.slot] = first_part(part, tiles) if total is None else total.add_(part)


@alternatives_for("monetlite.row_chain")
def in_tiles(kernel: TracedKernel) -> Iterator[Implementation]:
    """The chain with less kept of what is made on the way, in tiles, and over a gradient that comes in."""
    rows, wholes, steps, results, own, _, _ = kernel.args
    by_slot = {item[0]: ChainStep(*item) for item in steps}
    again = {slot: step for slot, step in by_slot.items() if slot < len(rows)}
    whole = products = light = rows, results
    if again:
        products = _without(rows, {slot for slot, step in again.items() if not step.kept}), results
        light = _without(rows, set(again)), results
    elif own < len(results):
        made = {at: by_slot[item[0]] for at, item in enumerate(results) if at >= own}
        products = rows, _unwanted(results, {at for at, step in made.items() if not step.kept})
        light = rows, _unwanted(results, set(made))
    ways = [("", whole, 1), ("products", products, 1)]
    ways += [(f"products_tiles_{tiles}", products, tiles) for tiles in PRODUCT_TILES if products is not whole]
    ways += [(f"tiles_{tiles}", light, tiles) for tiles in TILES]
    seen: set[Any] = set()
    count = math.prod(next(row for row in rows if row is not None).spec.shape[:-1])
    for name, (given, wanted), tiles in ways:
        key = (given, wanted, tiles)
        if key in seen or (tiles > 1 and count // tiles < MIN_TILE_ROWS):
            continue
        seen.add(key)
        args = (given, wholes, steps, wanted, own, tiles, None)
        outputs = tuple(
            output if item[0] is not None else None
            for output, item in zip(kernel.call.outputs, wanted, strict=True)
        )
        if name:
            yield _offered(kernel, name, args, outputs)
        for over, value in _overwritable(kernel, given, wanted, again):
            own_args = (*args[:-1], over)
            item = _offered(kernel, "_".join(filter(None, (name, "inplace"))), own_args, outputs)
            yield replace(item, overwrites=(value,))


def _without(rows: Any, left_out: set[int]) -> Any:
    return tuple(None if at in left_out else row for at, row in enumerate(rows))


def _unwanted(results: Any, left_out: set[int]) -> Any:
    return tuple((None, *item[1:]) if at in left_out else item for at, item in enumerate(results))


def _offered(kernel: TracedKernel, name: str, args: Any, outputs: Any) -> Implementation:
    tolerance = REORDERED_SUMS if args[5] > 1 else 0.0
    return kernel.implement(name, args=args, outputs=outputs, tolerance=tolerance)


def _overwritable(
    kernel: TracedKernel, rows: Any, results: Any, again: Collection[int]
) -> Iterator[tuple[tuple[int, int], int]]:
    """A result of rows and a gradient that comes in, whose memory it may take: (over, value)."""
    for at, row in enumerate(rows):
        if not isinstance(row, TensorRef) or row.value is None or at in again:
            continue
        if kernel.values[row.value].kind is not ValueKind.GRADIENT:
            continue
        for position, (slot, _, shape) in enumerate(results):
            if slot is not None and shape is None and (overwrites := kernel.over(row, position)):
                yield (position, at), overwrites[0]
                return
