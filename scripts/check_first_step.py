"""The first training step within a budget: how long it takes beyond capturing, and what its plan is worth.

    python scripts/check_first_step.py [--model NAME ...] [--percent 70] [--time-limit 15] [--output FILE.md]

For each model: the time that TorchDynamo and AOTAutograd take to capture it, a plain step, the first call within the
budget, the overhead of the first plan, of the plan taken in the end, and of the plan that waiting finds. All steps
until planning is over are compared with plain training's. The budget is a part of plain training's peak, or the first
that fits in steps of 10%.

Capture is timed twice: "graph" ends with the step's graph, "aot_eager" is what torch.compile with that backend adds
to its first step, guards and the making of the backward program included.
"""

import argparse
import copy
import time
from typing import Any

import torch
from check_models import MODELS
from table_report import add_output, write_table

import monetlite
from monetlite.checking.trainee import default_loss
from monetlite.core.errors import InfeasibleBudget
from monetlite.core.schedule import Schedule
from monetlite.runtime.in_place import training_of
from monetlite.tracing import split_inputs
from monetlite.tracing.capture import capture

MAX_STEPS, MAX_SECONDS = 2000, 240.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--percent", type=int, default=70, help="budget, of plain training's peak")
    parser.add_argument("--time-limit", type=float, default=15)
    add_output(parser)
    args = parser.parse_args()
    write_table(
        "The first step",
        f"Budget {args.percent}% of plain training's peak or the first that fits, time limit {args.time_limit:g} s. "
        "Seconds; beyond: of the first call, beyond capture and a plain step, for both captures. Steps: at which "
        "better plans were taken, and planning was over.",
        "| model | budget | graph | aot_eager | plain step | first call | beyond | first plan | taken | steps | waiting "
        "| differences |",
        (row(name, args.percent, args.time_limit) for name in args.model),
        args.output,
    )


def row(name: str, percent: int, time_limit: float) -> str:
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain, inputs = MODELS[name]()
    call, keywords = split_inputs(inputs)
    model, captured = copy.deepcopy(plain), copy.deepcopy(plain)
    step(plain, call, keywords)
    plain_seconds = step(plain, call, keywords)
    for _ in range(2):  # the first one imports and remembers what the first call finds done
        began = time.perf_counter()
        capture(captured, call, keywords)
        graph_seconds = time.perf_counter() - began
        torch._dynamo.reset()
        eager = torch.compile(copy.deepcopy(captured), backend="aot_eager")
        eager_seconds = step(eager, call, keywords) - step(eager, call, keywords)
        torch._dynamo.reset()
    plain.load_state_dict(captured.state_dict())
    while True:
        monetlite.within(model, budget=f"{percent}%", time_limit=time_limit)
        try:
            first_seconds = step(model, call, keywords)
            break
        except InfeasibleBudget:
            percent += 10
            monetlite.release(model)
            torch._dynamo.reset()
    first, taken_at = planned(model), []
    step(plain, call, keywords)
    worst, taken, began = difference(model, plain), first, time.perf_counter()
    for number in range(2, MAX_STEPS):
        for of in (plain, model):
            step(of, call, keywords, seed=number)
        worst = max(worst, difference(model, plain))
        if planned(model) is not taken:
            taken = planned(model)
            taken_at.append(str(number))
        if training_of(model).schedules.search.schedule is None or time.perf_counter() - began > MAX_SECONDS:
            break
    waited = monetlite.optimize(captured, inputs, f"{percent}%", time_limit=time_limit)
    beyond = [first_seconds - plain_seconds - seconds for seconds in (graph_seconds, eager_seconds)]
    return (
        f"| {name} | {percent}% | {graph_seconds:.1f} | {eager_seconds:.1f} | {plain_seconds:.2f} | {first_seconds:.1f} "
        f"| {beyond[0]:.1f}, {beyond[1]:.1f} | {first.overhead:+.1%} | {taken.overhead:+.1%} "
        f"| {', '.join(taken_at) or '—'}; {number} | {waited.overhead:+.1%} | {worst:.0e} |"
    )


def planned(model: Any) -> Schedule:
    """The schedule that a model trains by."""
    schedule = monetlite.schedule_of(model)
    assert schedule is not None
    return schedule


def step(model: Any, call: tuple[Any, ...], keywords: dict[str, Any], seed: int = 1) -> float:
    """Run a training step from a seed; the seconds it took."""
    model.zero_grad()
    torch.manual_seed(seed)
    began = time.perf_counter()
    loss = default_loss(model(*call, **keywords))
    loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
    return time.perf_counter() - began


def difference(model: Any, plain: Any) -> float:
    """The largest difference of a gradient from plain training's, of the largest of its tensor."""
    return max(
        float((one.grad - other.grad).abs().max() / other.grad.abs().max().clamp(min=1e-30))
        for one, other in zip(model.parameters(), plain.parameters(), strict=True)
        if other.grad is not None
    )


if __name__ == "__main__":
    main()
