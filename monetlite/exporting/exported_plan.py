"""From a model and a budget to an exported plan: record, price, solve."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from monetlite.checking.trainee import default_loss
from monetlite.core.costs import Cost
from monetlite.core.options import PricingOptions
from monetlite.exporting.checkpoint_search import CheckpointSearch, FoundPlan
from monetlite.exporting.checkpointed_step import PricedStep, checkpointed
from monetlite.exporting.eager_step import EagerStep, record_step
from monetlite.planning.pipeline import price
from monetlite.tracing.step_inputs import Inputs

_CHAIN, _TIMED = 200, 5
"""Operators in the chain that selective contexts are timed on, and how often it runs."""


@dataclass(frozen=True, kw_only=True)
class ExportedPlan:
    """A checkpoint plan of a recorded step, with what is predicted of it and of plain training.

    Attributes:
        step: recorded. found: the plan. plain: nothing wrapped. every: all that can be is wrapped, nothing saved.
        budget_bytes: that it was solved for.
    """

    step: EagerStep
    found: FoundPlan
    plain: FoundPlan
    every: FoundPlan
    budget_bytes: int


def export_plan(
    model: nn.Module,
    example_inputs: Inputs,
    budget_bytes: int,
    pricing: PricingOptions,
    progress: Callable[[int, int], None] | None = None,
) -> ExportedPlan:
    """Find the fastest checkpoint plan of a model within a budget.

    Args:
        model: in training mode; on the meta device it stands for one on `pricing.device`.
        example_inputs: as in `trace`. budget_bytes: peak of the step.
        pricing: device (`cpu` or `cuda`) and what is counted beside the model. progress: as in `profile`.

    Raises:
        TraceError: the step can't be recorded. InfeasibleBudget: no plan fits. ProfileError: as in `profile`.
    """
    step = record_step(model, example_inputs, default_loss, device=pricing.device, outputs=pricing.outputs)
    search = CheckpointSearch(price_step(step, pricing, progress))
    return ExportedPlan(
        step=step,
        found=search.solve(budget_bytes),
        plain=search.plain,
        every=search.every,
        budget_bytes=budget_bytes,
    )


def price_step(
    step: EagerStep, options: PricingOptions, progress: Callable[[int, int], None] | None = None
) -> PricedStep:
    """Measure the calls of a recorded step, and the time that selective contexts take."""
    nothing = [Cost(latency_ms=0.0, workspace_bytes=0)] * len(step.calls)
    graph = checkpointed(PricedStep(step=step, costs=nothing), {}).profile.graph
    priced = price(graph, PricingOptions(device=step.device), progress=progress)
    return PricedStep(
        step=replace(step, resident=priced.graph.resident),
        costs=[cost for (cost,) in priced.costs],
        options=options,
        policy_ms=_policy_ms(),
    )


def _policy_ms() -> float:
    """Time that a selective context takes for one operator, in ms."""

    def chain(tensor: torch.Tensor) -> torch.Tensor:
        for _ in range(_CHAIN):
            tensor = tensor.view(-1)
        return tensor * 1.0

    def contexts() -> Any:
        made = create_selective_checkpoint_contexts  # torch has no types for it
        return made(lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE)  # type: ignore[no-untyped-call]  # torch has no types

    tensor = torch.zeros(8, requires_grad=True)
    taken: dict[bool, list[float]] = {False: [], True: []}
    for selective in (False, True) * _TIMED:
        began = time.perf_counter()
        options: dict[str, Any] = {"context_fn": contexts} if selective else {}
        checkpoint(chain, tensor, use_reentrant=False, **options)
        taken[selective].append(1e3 * (time.perf_counter() - began))
    return max(0.0, statistics.median(taken[True]) - statistics.median(taken[False])) / _CHAIN
