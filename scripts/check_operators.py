"""Train each differentiable operator of PyTorch's own samples beside plain training.

    python scripts/check_operators.py [--name OPERATOR ...] [--dtype float32] [--samples 2] [--part 1/2] [--output FILE.md]

The operators are those of `torch.testing._internal` (which needs `pip install expecttest`), with the inputs that
PyTorch tests them on, as functions and in place. Each is a model of its own: inputs are scaled by a parameter, and the
loss is a nonlinear function of all results, so that gradients are of the operator's own formula. It is captured whole
and trained within the smallest budget that a schedule is known for, so that what can be computed again is; or in
pieces. Two steps each. The table has the operators whose loss, gradients (of inputs, too) or generator are not the
same bits as plain training's, those that train in pieces, and those that fail.
"""

import argparse
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from table_report import add_output, write_table
from torch import nn
from torch.testing._internal import common_methods_invocations
from torch.testing._internal.common_methods_invocations import op_db

import monetlite
from monetlite.core.errors import InfeasibleBudget, MonetliteError
from monetlite.core.schedule import Schedule
from monetlite.fx.torch_internals import torch_pytree as pytree
from monetlite.profiling import meters

STEPS = 2
UNTRAINED = "not by PyTorch"
AT_ONCE = "1GB"
"""A budget that every model in pieces keeps to."""


class Model(nn.Module):
    """An operator between scaled inputs and a loss.

    Args:
        operator: called with the inputs of a sample.
        sample: those inputs, in PyTorch's form; its tensors are the model's inputs.
    """

    def __init__(self, operator: Callable[..., Any], sample: Any) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(()))
        self.operator = operator
        self.leaves, self.spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        self.places = [at for at, item in enumerate(self.leaves) if isinstance(item, torch.Tensor)]
        self.inputs = [self.leaves[at].detach() for at in self.places]
        for at in self.places:
            self.leaves[at] = None

    def fresh(self) -> tuple[torch.Tensor, ...]:
        """Inputs of a step, with gradients where they can have some."""
        return tuple(item.clone().requires_grad_(differentiable(item)) for item in self.inputs)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        leaves = list(self.leaves)
        for at, item in zip(self.places, inputs, strict=True):
            leaves[at] = item * self.scale.to(item.dtype) if differentiable(item) else item
        first, args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        loss = self.shift * 1.0
        for item in pytree.tree_leaves(self.operator(first, *args, **kwargs)):
            if isinstance(item, torch.Tensor) and differentiable(item):
                real = torch.view_as_real(item) if item.is_complex() else item
                wave = torch.sin(real.float() * self.scale + self.shift)
                loss = loss + (wave * torch.sigmoid(wave)).sum()
        return loss


def differentiable(item: torch.Tensor) -> bool:
    return item.is_floating_point() or item.is_complex()


def step(trained: Callable[..., torch.Tensor], model: Model) -> list[torch.Tensor | None]:
    """Loss, gradients and the generator's state of a step."""
    torch.manual_seed(7)
    model.zero_grad()
    inputs = model.fresh()
    loss = trained(*inputs)
    loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
    return [loss.detach(), *(item.grad for item in [*model.parameters(), *inputs]), torch.get_rng_state()]


def difference(ours: list[torch.Tensor | None], plain: list[torch.Tensor | None]) -> float:
    """The largest difference, relative to the largest entry of a tensor; NaN is equal to NaN."""
    largest = 0.0
    for mine, theirs in zip(ours, plain, strict=True):
        if mine is None or theirs is None or mine.numel() == 0:
            continue  # an input that nothing depends on has no gradient, or one of zeros
        mine, theirs = (item if item.layout is torch.strided else item.to_dense() for item in (mine, theirs))
        mine, theirs = (torch.view_as_real(item) if item.is_complex() else item for item in (mine, theirs))
        mine, theirs = mine.double(), theirs.double()
        if not torch.equal(mine.isnan(), theirs.isnan()):
            return float("inf")
        apart = (mine.nan_to_num() - theirs.nan_to_num()).abs().max()
        largest = max(largest, float(apart / theirs.nan_to_num().abs().max().clamp(min=1e-30)))
    return largest


def smallest(model: Model) -> Schedule:
    """The schedule of the smallest budget that one is known for."""
    profile = monetlite.profile(monetlite.trace(model, model.fresh()))
    try:
        return monetlite.solve(profile, 1, time_limit=1)
    except InfeasibleBudget as error:
        budgets: list[int | str] = ["100%"] if error.reached_bytes is None else [error.reached_bytes, "100%"]
    for budget in budgets:
        try:
            return monetlite.solve(profile, budget, time_limit=1)
        except InfeasibleBudget:
            continue
    raise AssertionError("plain training fits its own peak")


def check(operator: Callable[..., Any], sample: Any) -> tuple[str, str]:
    """How an operator trains (empty: whole and the same bits), and more in words."""
    model = Model(operator, sample)
    try:
        plain = step(model, model)
    except (RuntimeError, NotImplementedError):
        return UNTRAINED, ""
    try:
        try:
            trained, way, why = monetlite.MONeTWrapper(model, smallest(model)), "", ""
        except MonetliteError as error:
            way, why = "in pieces", str(error).partition("captured in one graph: ")[2] or str(error)
            trained = monetlite.MONeTWrapper(model, budget=AT_ONCE)
        apart = max(difference(step(trained, model), plain) for _ in range(STEPS))
    except Exception as error:  # whatever it is, it is a row
        return "fails", f"{type(error).__name__}: {error}"
    if apart:
        way = f"{way or 'whole'}, {apart:.0e} off"
    return way, why


def cases(args: argparse.Namespace) -> Iterator[tuple[str, Callable[..., Any], Any]]:
    """Names, operators and samples of a part of PyTorch's table."""
    dtype, (part, parts) = getattr(torch, args.dtype), map(int, args.part.split("/"))
    for info in op_db[part - 1 :: parts]:
        name = f"{info.name}.{info.variant_test_name}".removesuffix(".")
        if (args.name and info.name not in args.name) or not info.supports_autograd:
            continue
        if dtype not in info.supported_backward_dtypes("cpu"):  # type: ignore[no-untyped-call]  # torch has no types for it
            continue
        variants: list[tuple[str, Callable[..., Any]]] = [("", info.op)]
        inplace: Callable[..., Any] | None = info.inplace_variant
        if inplace is not None:
            variants.append((", in place", in_place(inplace)))
        for variant, operator in variants:
            torch.manual_seed(0)
            samples = list(info.sample_inputs("cpu", dtype, requires_grad=True))  # type: ignore[no-untyped-call]  # torch has no types for it
            count = min(len(samples), 1 if variant else args.samples)
            for at in range(count):
                yield name + variant, operator, samples[at * (len(samples) - 1) // max(1, count - 1)]


def in_place(operator: Callable[..., Any]) -> Callable[..., Any]:
    return lambda first, *args, **kwargs: operator(first.clone(), *args, **kwargs)


def rows(args: argparse.Namespace) -> Iterator[str]:
    """Rows of what is not plainly the same, and then how many cases there were of each."""
    counts = Counter[str]()
    for name, operator, sample in cases(args):
        way, why = check(operator, sample)
        counts["off" if way.endswith("off") else way or "whole, the same bits"] += 1
        if way not in ("", UNTRAINED):
            yield f"| {name} | {way} | {why.replace('|', ' ')[:90]} |"
        torch.compiler.reset()
    for way, count in counts.most_common():
        yield f"| {count} cases | {way} | |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--name", action="append", help="by default all of them")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--samples", type=int, default=2, help="of each operator; one of each in place")
    parser.add_argument("--part", default="1/1", help="of the table: 1/2 is the first of two")
    add_output(parser)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    meters.MIN_RUNS = meters.MAX_RUNS = 1
    # PyTorch's table seeds operators that draw, by a function that can't be captured. Steps are seeded here.
    vars(common_methods_invocations)["wrapper_set_seed"] = lambda operator, *given, **named: operator(
        *given, **named
    )
    about = (
        f"PyTorch's samples of {args.dtype}, part {args.part}: each operator as a model, in the smallest budget found. "
        "Operators that are not listed are captured whole and train to the same bits."
    )
    write_table(
        "Every operator beside plain training",
        about,
        "| operator | trains | why |",
        rows(args),
        args.output,
        left=3,
    )


if __name__ == "__main__":
    main()
