"""One model, one machine, one run: plain training, what people use beside monetlite, and monetlite."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from monetlite.checking.comparison.bench import Bench, Contender, environment
from monetlite.checking.comparison.contest import Contest
from monetlite.checking.comparison.peer_runs import (
    PEERS,
    TITLES,
    Comparison,
    Peer,
    PeerRun,
    duels,
    named_peers,
    standings,
)
from monetlite.checking.trainee import default_loss
from monetlite.core.costs import Profile
from monetlite.core.errors import BudgetError, DeviceError, ModelError
from monetlite.core.options import REORDERED_SUMS, SolvingOptions
from monetlite.core.simulate import simulate
from monetlite.core.steps import plain_steps
from monetlite.core.units import check_budget, parse_budget
from monetlite.fx.torch_internals.torch_pytree import tensors_among
from monetlite.operators.random import forked_state
from monetlite.planning.layouts import layouts_to_try
from monetlite.planning.pipeline import profile
from monetlite.tracing import split_inputs, trace_layouts
from monetlite.tracing.step_inputs import Arguments, Inputs, autocast_to, device_of, on_its_gpu, require_module

BUDGETS = ("70%", "50%", "40%")


def compare(
    model: nn.Module,
    example_inputs: Inputs,
    budgets: Iterable[str | int] = BUDGETS,
    *,
    peers: Iterable[str] = PEERS,
    device: str | None = None,
    autocast: str = "",
    tolerance: float = 0.0,
    time_limit: float = 20.0,
    repeats: int = 7,
    seed: int = 0,
    loss: Callable[[Any], torch.Tensor] | None = None,
    name: str | None = None,
    progress: Callable[[str], None] | None = None,
    finished: Callable[[PeerRun, float | None], None] | None = None,
) -> Comparison:
    """Train steps of a model plainly, by what people use today, and by monetlite, and measure them in one run.

    Everything runs on copies: the model is not changed. A way to train that fails, out of memory or otherwise, is
    a run with its reason.

    Args:
        model: in training mode.
        example_inputs: as for `trace`.
        budgets: for monetlite, and to hold peers to: as for `solve`; percentages are of plain training's measured
            peak (its predicted one where it does not fit into memory).
        peers: names of the other methods, those of `--peers`.
        device: `"cpu"` or `"cuda"`; by default where the model is.
        autocast: the dtype to train under `torch.autocast` to, as `"bfloat16"`.
        tolerance: of monetlite's schedules, as for `solve`.
        time_limit: seconds of solving for each schedule.
        repeats: timed steps of each, taken in turn.
        seed: of the random numbers of the steps that are compared, and of solving.
        loss: makes a scalar of the model's output; by default as for `verify`.
        name: of the model, for reports; by default its class.
        progress: called with a line about each piece of work, and the time left, about.
        finished: called with each run as soon as its peak and a single step are measured, and that step's time over
            plain training's. Steps are taken in turn later.

    Raises:
        BudgetError: a budget can't be read, or there is none.
        ModelError: an unknown peer, a tolerance that is not a fraction, or no repeats.
        DeviceError: the device is not there.
        TraceError, ProfileError: monetlite can't plan for this model.
    """
    require_module(model)
    asked = list(dict.fromkeys(str(budget) for budget in budgets))
    if not asked:
        raise BudgetError("no budget was given; write some, as 70%,50% or 6GB")
    for budget in asked:
        check_budget(budget)
    if repeats < 1:
        raise ModelError(f"{repeats} timed steps measure nothing; take at least 1")
    chosen = named_peers(peers)
    args, kwargs = split_inputs(example_inputs)
    device = device or device_of(model, (args, kwargs))
    if device not in ("cpu", "cuda"):
        raise DeviceError(f"device {device!r}: steps are measured on 'cpu' or 'cuda'")
    say = progress or (lambda _: None)
    # Where Inductor takes part, monetlite also compiles regions, within the tolerance of those.
    compiles = Peer.INDUCTOR in chosen
    priced = max(tolerance, REORDERED_SUMS) if compiles else tolerance
    layouts = layouts_to_try(None, priced, compiles)
    with on_its_gpu(model, (args, kwargs)), forked_state(device):
        where = environment(device)
        bench = Bench(model, args, kwargs, loss or default_loss, device, autocast=autocast, seed=seed)
        say("tracing the model and measuring its operators")
        profiles = _profiles(bench, layouts, priced)
        say(f"measuring {TITLES[Peer.PLAIN]}")
        plain = bench.enter(Contender(peer=Peer.PLAIN))
        plain_bytes = plain.run.peak_bytes or simulate(profiles[0], plain_steps(profiles[0].graph)).peak_bytes
        limits = {budget: parse_budget(budget, plain_bytes) for budget in asked}
        contest = Contest(
            bench=bench,
            profiles=profiles,
            options=SolvingOptions(tolerance=tolerance, time_limit=time_limit, seed=seed),
            budgets_bytes=sorted(set(limits.values())),
            repeats=repeats,
            say=say,
            finished=finished or (lambda run, ratio: None),
            shown=[plain],
        )
        runs = contest.run(chosen)
    return Comparison(
        model=name or type(model).__name__,
        inputs=_described(args, kwargs),
        device=device,
        environment=where,
        repeats=repeats,
        time_limit=time_limit,
        tolerance=tolerance,
        autocast=autocast,
        runs=tuple(runs),
        tried=tuple(contest.tried),
        duels=duels(runs),
        standings=standings(limits, runs),
    )


def _profiles(bench: Bench, layouts: Sequence[str], tolerance: float) -> list[Profile]:
    """The measured costs of a bench's model in each layout."""
    with autocast_to(bench.device, bench.autocast):
        graphs = trace_layouts(bench.plain.model, Arguments(bench.plain.args, bench.plain.kwargs), layouts)
    return [profile(graph, bench.device, tolerance=tolerance) for graph in graphs]


def _described(args: Sequence[object], kwargs: dict[str, object]) -> str:
    """Inputs in words: `16×3×160×160 float32`."""
    return ", ".join(
        f"{'×'.join(map(str, item.shape))} {str(item.dtype).removeprefix('torch.')}".strip()
        for item in tensors_among((args, kwargs))
    )
