"""Tensors of every shape, layout and content, and modules around a layer that hand them to it."""

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from harness import Captured, Seen
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from torch import nn

from monetlite.core.graph import TensorSpec
from monetlite.operators import cross_entropy, normalization, packing, pooling

SPECIAL = (
    *(0.0, -0.0, 1.0, -1.0, 3.0, -3.0, 6.0, 0.5),
    *(1e-40, -1e-40, 3e38, -3e38),
    *(math.inf, -math.inf, math.nan),
)

BEFORE = ("contiguous", "dense", "transposed", "sliced", "offset", "expanded", "channels_last")
AFTER = ("plain", "transposed", "sliced", "sum", "channels_last")

ANY = ("normal", "special", "zeros", "same", "huge", "tiny", "scattered", "integers", "one nan", "one infinity")
"""Contents for what promises the same bits."""
MODERATE = ("normal", "zeros", "same", "shifted", "integers", "one nan", "one infinity")
"""Contents without products that leave float32, for what promises a tolerance."""

FLOATS = (torch.float32, torch.bfloat16, torch.float64, torch.float16)

MOSTLY_FLOAT32 = (*[torch.float32] * 6, torch.bfloat16, torch.float64)
RARELY = st.sampled_from([False] * 5 + [True])


def fill(shape: tuple[int, ...], dtype: torch.dtype, kind: str, seed: int) -> torch.Tensor:
    """A contiguous tensor with contents of a kind."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(shape, generator=generator, dtype=torch.float64)
    flat = numbers.view(-1)
    if kind == "special" and flat.numel():
        # Every third number, so that they come in every lane of the vectorised loops.
        some = torch.randint(0, len(SPECIAL), (len(flat[::3]),), generator=generator)
        flat[::3] = torch.tensor(SPECIAL, dtype=torch.float64)[some]
    elif kind == "zeros":
        flat.sign_().mul_(0)
    elif kind == "same":
        flat.fill_(1.25)
    elif kind == "huge":
        flat.mul_(1e30)
    elif kind == "tiny":
        flat.mul_(1e-40)
    elif kind == "shifted":
        flat.add_(300)
    elif kind == "scattered":
        flat.mul_(10 ** (40 * torch.rand(flat.shape, generator=generator) - 20).double())
    elif kind == "integers":
        flat.round_()
    elif kind.startswith("one ") and flat.numel():
        at = int(torch.randint(0, flat.numel(), (1,), generator=generator))
        flat[at] = {"nan": math.nan, "infinity": math.inf}[kind.removeprefix("one ")]
    return numbers.to(dtype)


def tangents(kind: str, seed: int) -> Callable[[TensorSpec], torch.Tensor]:
    """Gradients of a module's outputs with contents of a kind."""

    def make(spec: TensorSpec) -> torch.Tensor:
        made = torch.empty_strided(spec.shape, spec.stride, dtype=getattr(torch, spec.dtype))
        return made.copy_(fill(spec.shape, made.dtype, kind, seed + 1))

    return make


def leaf(shape: tuple[int, ...], dtype: torch.dtype, before: str, kind: str, seed: int) -> torch.Tensor:
    """The input that `Between` makes a tensor of some shape and layout of."""
    *rest, last = shape
    if before == "transposed":
        return fill((*rest[:-1], last, rest[-1]), dtype, kind, seed)
    if before == "dense":
        return fill((*rest[:-1], last, rest[-1]), dtype, kind, seed).transpose(-1, -2)
    if before == "sliced":
        return fill((*rest, 2 * last), dtype, kind, seed)
    if before == "offset":
        return fill((shape[0] + 1, *shape[1:]), dtype, kind, seed)
    if before == "expanded":
        return fill((1, *shape[1:]), dtype, kind, seed)
    made = fill(shape, dtype, kind, seed)
    return made.contiguous(memory_format=torch.channels_last) if before == "channels_last" else made


class Between(nn.Module):
    """A layer whose input dies there and whose gradient is nobody else's, laid out as asked for where it fits."""

    def __init__(self, layer: Callable[..., torch.Tensor], before: str, after: str, rows: int = 1) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))
        self.layer, self.before, self.after, self.rows = layer, before, after, rows

    def forward(self, x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        x = x * self.factor
        if self.before == "transposed":
            x = x.transpose(-1, -2)
        elif self.before == "sliced":
            x = x[..., ::2]
        elif self.before == "offset":
            x = x[1:]
        elif self.before == "expanded":
            x = x.expand(self.rows, *x.shape[1:])
        y = self.layer(x, *rest)
        if self.after == "transposed" and y.dim() > 1:
            y = y.transpose(-1, -2)
        elif self.after == "sliced" and y.dim():
            y = y[..., ::2]
        elif self.after == "sum":
            y = y.sum()
        elif self.after == "channels_last" and y.dim() == 4:
            y = y.contiguous(memory_format=torch.channels_last)
        return y * 1.0


@dataclass(frozen=True)
class Contents:
    """What a layer's input and the gradient of its output hold, whether loops go in small pieces, and on how many
    threads kernels run.
    """

    kind: str = "normal"
    gradient: str = "normal"
    seed: int = 1
    in_pieces: bool = False
    threads: int = 2


@dataclass(frozen=True)
class Case:
    """A layer's input, what is around the layer, and all that is tried there."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    before: str
    after: str
    contents: tuple[Contents, ...]

    @property
    def seed(self) -> int:
        return self.contents[0].seed

    def capture(self, layer: Callable[..., torch.Tensor], *rest: torch.Tensor) -> Captured:
        return Captured(
            Between(layer, self.before, self.after, self.shape[0]), self._input(self.contents[0]), *rest
        )

    def check(self, layer: Callable[..., torch.Tensor], *rest: torch.Tensor, extreme: bool = False) -> Seen:
        """Run every implementation around a layer beside the default one."""
        captured, seen = self.capture(layer, *rest), Seen()
        for item in self.contents:
            captured.replace_input(0, self._input(item))
            with pytest.MonkeyPatch.context() as patch, running_on(item.threads):
                if item.in_pieces:
                    work_in_small_pieces(patch)
                captured.check(tangents(item.gradient, item.seed), seen, seed=item.seed, extreme=extreme)
        return seen

    def _input(self, item: Contents) -> torch.Tensor:
        return leaf(self.shape, self.dtype, self.before, item.kind, item.seed)


def plain(
    shape: tuple[int, ...],
    *,
    dtype: torch.dtype = torch.float32,
    before: str = "contiguous",
    after: str = "plain",
    kinds: tuple[str, ...] = ("normal",),
    **contents: Any,
) -> Case:
    """A case in the usual layout, with an input of each kind."""
    each = tuple(Contents(kind=kind, **contents) for kind in kinds)
    return Case(shape=shape, dtype=dtype, before=before, after=after, contents=each)


@st.composite
def cases(
    draw: Any,
    shapes: st.SearchStrategy[tuple[int, ...]],
    *,
    dtypes: tuple[torch.dtype, ...] = FLOATS,
    kinds: tuple[str, ...] = ANY,
) -> Case:
    """A shape, a type and a layout, with six contents: capturing takes far longer than running."""
    shape = draw(shapes)
    before = [BEFORE[0]] * 6 + [item for item in BEFORE[1:] if _fits(item, shape)]
    after = [AFTER[0]] * 6 + [item for item in AFTER[1:] if _fits(item, shape)]
    contents = st.builds(
        Contents,
        kind=st.sampled_from(kinds),
        gradient=st.sampled_from(kinds),
        seed=st.integers(0, 1000),
        in_pieces=st.booleans(),
        threads=st.sampled_from([1] * 5 + [2]),
    )
    return Case(
        shape=shape,
        dtype=draw(st.sampled_from(dtypes)),
        before=draw(st.sampled_from(before)),
        after=draw(st.sampled_from(after)),
        contents=tuple(draw(st.lists(contents, min_size=6, max_size=6))),
    )


def _fits(layout: str, shape: tuple[int, ...]) -> bool:
    if layout == "channels_last":
        return len(shape) == 4
    return len(shape) > 1 or layout not in ("transposed", "dense")


@contextlib.contextmanager
def running_on(threads: int) -> Iterator[None]:
    """One thread is faster for small tensors, but sums may be split otherwise on two."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def work_in_small_pieces(patch: pytest.MonkeyPatch) -> None:
    """Make loops that go piece by piece go round several times on small tensors."""
    patch.setattr(packing, "PIECE_ELEMENTS", {"cpu": 64})
    patch.setattr(pooling, "CHUNK_ELEMENTS", {"cpu": 50})
    patch.setattr(normalization, "MIN_PIECE_BYTES", 100)
    patch.setattr(normalization, "MAX_PIECE_BYTES", {"cpu": 600})
    patch.setattr(cross_entropy, "CHUNK_ELEMENTS", {"cpu": 20})


def drawn(max_examples: int) -> settings:
    """The same examples in every run, a fifth of them without MONETLITE_THOROUGH.

    They are small, and a capture takes long, so a failure is not reduced further.
    """
    return settings(
        max_examples=max_examples if "MONETLITE_THOROUGH" in os.environ else max(1, max_examples // 5),
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
