"""One model, one machine, one run: plain training, what people use beside monetlite, and monetlite."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from monetlite.checking.comparison.auto_sac import planned_by_torch
from monetlite.checking.comparison.bench import Bench, Contender, Entrant, environment, reason
from monetlite.checking.comparison.peer_runs import (
    PEERS,
    TITLES,
    Comparison,
    Peer,
    PeerRun,
    duels,
    fastest_within,
    named_peers,
    standings,
    title_of,
)
from monetlite.checking.comparison.peers import aot_eager, by_blocks, inductor, segments, selective
from monetlite.checking.comparison.tiled_losses import tiled
from monetlite.checking.trainee import Trainee, default_loss
from monetlite.core.costs import Profile
from monetlite.core.errors import BudgetError, DeviceError, InfeasibleBudget, ModelError
from monetlite.core.interrupts import interrupts_kept
from monetlite.core.options import DEFAULT_IMPLEMENTATIONS, REORDERED_SUMS, SolvingOptions
from monetlite.core.schedule import Schedule
from monetlite.core.simulate import simulate
from monetlite.core.steps import plain_steps
from monetlite.core.units import check_budget, format_bytes, parse_budget
from monetlite.fx.torch_internals.torch_pytree import tensors_among
from monetlite.operators.random import forked_state
from monetlite.planning.budgets import solve_budget
from monetlite.planning.layouts import layouts_to_try, solve_layouts
from monetlite.planning.pipeline import profile
from monetlite.runtime import MONeTWrapper
from monetlite.solving.baselines import restrict_gist
from monetlite.tracing import split_inputs, trace_layouts
from monetlite.tracing.step_inputs import Arguments, Inputs, autocast_to, device_of, on_its_gpu, require_module

BUDGETS = ("70%", "50%", "40%")
TRIAL_REPEATS = 3
"""Timed steps of each setting of a peer with several, to find the fastest ones."""
NEAR = 0.995
"""A schedule for this share of a budget stands for one for the budget."""
RETRIES = 2
"""Number of times that a schedule whose measured peak is over the budget is solved for again, for less."""


METHODS: dict[Peer, Callable[[Trainee], list[Contender]]] = {
    Peer.CHECKPOINT: by_blocks,
    Peer.SEGMENTS: segments,
    Peer.SELECTIVE: selective,
    Peer.TILED_LOSS: tiled,
    Peer.AUTO_SAC: planned_by_torch,
    Peer.AOT_EAGER: aot_eager,
    Peer.INDUCTOR: inductor,
}
"""For every peer that doesn't run by a schedule, what makes a contender for each of its settings."""
PREPARING_SECONDS = {Peer.AUTO_SAC: 10.0, Peer.AOT_EAGER: 10.0, Peer.INDUCTOR: 60.0}
"""Time that a setting of a peer takes to prepare, about, where it is long."""
STEPS_TO_ENTER = 8
"""Steps that a contender takes before it is timed, about: to compare, to measure its peak, and some slower ones."""


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
        example = Arguments(bench.plain.args, bench.plain.kwargs)
        with autocast_to(device, autocast):
            graphs = trace_layouts(bench.plain.model, example, layouts)
        profiles = [profile(graph, device, tolerance=priced) for graph in graphs]
        say(f"measuring {TITLES[Peer.PLAIN]}")
        plain = bench.enter(Contender(peer=Peer.PLAIN))
        plain_bytes = plain.run.peak_bytes or simulate(profiles[0], plain_steps(profiles[0].graph)).peak_bytes
        limits = {budget: parse_budget(budget, plain_bytes) for budget in asked}
        options = SolvingOptions(tolerance=tolerance, time_limit=time_limit, seed=seed)
        contest = _Contest(
            bench=bench,
            profiles=profiles,
            options=options,
            budgets_bytes=sorted(set(limits.values())),
            say=say,
            finished=finished or (lambda run, ratio: None),
            shown=[plain],
            repeats=repeats,
        )
        contest.show(plain)
        for peer in chosen:
            contest.pending[peer] = _settings(peer, bench.plain) if peer in METHODS else []
        for peer in chosen:
            contest.add_peer(peer)
        contest.add_monetlite()
        running = [item for item in contest.shown if not item.run.failure]
        contest.tell(f"timing {len(running)} ways to train, {repeats} steps of each, in turn")
        runs = bench.time(contest.shown, repeats)
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


def _settings(peer: Peer, plain: Trainee) -> list[Contender]:
    """A peer's contenders; a single one that fails, where there are none for this model."""
    try:
        return METHODS[peer](plain)
    except Exception as error:
        why = error

    def fail(model: nn.Module) -> nn.Module:
        raise why

    return [Contender(peer=peer, prepare=fail)]


def _solve(
    peer: Peer,
    profiles: Sequence[Profile],
    budget_bytes: int,
    options: SolvingOptions,
    starts: Iterable[Schedule],
    *,
    compiled: bool = False,
) -> Schedule:
    """The fastest schedule that a method can choose, of profiles of which the first is as plain training runs.

    With `compiled`, profiles with compiled regions are among them, and sums may be in another order.

    Checkmate stores and recomputes, every operator running as it was traced. Gist has compact intermediates that
    lose nothing, and no recomputation.
    """
    plain, exact = profiles[0], replace(options, tolerance=0.0)
    with interrupts_kept():
        if peer is Peer.CHECKMATE:
            return solve_budget(plain, budget_bytes, replace(exact, implementations=DEFAULT_IMPLEMENTATIONS))
        if peer is Peer.GIST:
            schedule = solve_budget(restrict_gist(plain.within(0.0)), budget_bytes, exact)
            graph = plain.graph  # the schedule serves this one, of which less may be chosen there
            return replace(schedule, fingerprint=graph.fingerprint, structure=graph.structure)
        if compiled:
            options = replace(options, tolerance=max(options.tolerance, REORDERED_SUMS))
        else:
            allowed = layouts_to_try(None, options.tolerance)
            profiles = [item for item in profiles if item.graph.layout in allowed]
        return solve_layouts(profiles, budget_bytes, options, starts=starts)


def scheduled(peer: Peer, schedule: Schedule, asked_bytes: int, *, compiled: bool = False) -> Contender:
    """A model that trains by a schedule, for a budget that the schedule's own may be a little below.

    Args:
        peer: whose schedule it is. schedule: its schedule. asked_bytes: the budget.
        compiled: its regions may be compiled, which rounds as Inductor does.
    """
    return Contender(
        peer=peer,
        setting=_setting(asked_bytes, compiled),
        label=f"{TITLES[peer]}, compiled" if compiled else "",
        prepare=lambda model: MONeTWrapper(model, schedule),
        asked_bytes=asked_bytes,
        limit_bytes=None if schedule.reserved_bytes is None else max(asked_bytes, schedule.reserved_bytes),
    )


@dataclass(kw_only=True)
class _Contest:
    """Ways to train that take part or have failed, and settings that were tried and left out.

    Monetlite may choose Checkmate's and Gist's schedules (`restricted`), too: its search begins from them.
    """

    bench: Bench
    profiles: Sequence[Profile]
    options: SolvingOptions
    budgets_bytes: list[int]
    say: Callable[[str], None]
    shown: list[Entrant]
    finished: Callable[[PeerRun, float | None], None] = lambda run, ratio: None
    repeats: int = 1
    pending: dict[Peer, list[Contender]] = field(default_factory=dict)
    """Peers that are not done; those that run by schedules have no contenders yet."""
    to_solve: int = 0
    """Schedules of monetlite's that are not solved, once its turn has come."""
    tried: list[PeerRun] = field(default_factory=list)
    restricted: list[Schedule] = field(default_factory=list)

    def show(self, entrant: Entrant) -> None:
        """Tell of a run that was measured, with the time of one step."""
        run, plain_ms = entrant.run, self.shown[0].first_ms
        if entrant.first_ms:
            run = replace(run, times_ms=(entrant.first_ms,))
        self.finished(run, entrant.first_ms / plain_ms if entrant.first_ms and plain_ms else None)

    def enter(self, contender: Contender) -> Entrant:
        """Measure a contender, and tell of it."""
        entrant = self.bench.enter(contender)
        self.show(entrant)
        return entrant

    def tell(self, text: str) -> None:
        """Tell what is done next, and how long everything takes from here, about."""
        minutes, seconds = divmod(round(self.seconds_left() / 10) * 10, 60)
        left = f"{minutes} min {seconds} s" if minutes else f"{max(10, seconds)} s"
        self.say(f"{text}; about {left} left")

    def seconds_left(self) -> float:
        """Time from here to the end, by plain training's step and by what is pending."""
        step_s = self.shown[0].first_ms / 1000
        by_solving = sum(peer not in METHODS for peer in self.pending) * len(self.budgets_bytes)
        settings = {peer: len(contenders) for peer, contenders in self.pending.items()}
        preparing_s = sum(PREPARING_SECONDS.get(peer, 0.0) * count for peer, count in settings.items())
        solves = self.to_solve
        if self.pending:
            solves = len(self.budgets_bytes) + len(self.shown) - 1 + len(self.pending)
        entering = sum(settings.values()) + by_solving + solves
        timing = (len(self.shown) + len(self.pending) + solves) * self.repeats
        return (
            (solves + by_solving) * self.options.time_limit
            + preparing_s
            + ((entering * STEPS_TO_ENTER + timing) * step_s)
        )

    def add_peer(self, peer: Peer) -> None:
        """Measure a peer in every setting that it has, and let those take part that are best within a budget."""
        if contenders := self.pending[peer]:
            self._add_settings(contenders)
        else:
            self._add_restricted(peer)
        del self.pending[peer]

    def _add_restricted(self, peer: Peer) -> None:
        """Solve by a method of schedules within each budget, from the largest to the first that nothing fits."""
        for budget_bytes in reversed(self.budgets_bytes):
            entrant = self._scheduled(peer, budget_bytes)
            self.restricted += [entrant.schedule] if entrant.schedule else []
            if entrant.refused:
                self.shown.append(_and_less(entrant) if budget_bytes > self.budgets_bytes[0] else entrant)
                break
            self.shown.append(entrant)

    def _add_settings(self, contenders: Sequence[Contender]) -> None:
        entered = []
        for contender in contenders:
            self.tell(f"measuring {title_of(contender.peer, contender.setting)}")
            entered.append(self.enter(contender))
        best = [item for item in entered if not item.run.failure]
        failed = [item.run for item in entered if item.run.failure]
        if len(entered) > 1 and best:
            self.tell(f"timing {len(best)} settings of {TITLES[contenders[0].peer]}")
            trials = self.bench.time(best, min(TRIAL_REPEATS, self.repeats))
            fastest = fastest_within(trials, self.budgets_bytes)
            best = [item for item, trial in zip(best, trials, strict=True) if trial in fastest]
            self.tried += [trial for trial in trials if trial not in fastest and not trial.failure]
            failed += [trial for trial in trials if trial.failure]
        if best:
            self.shown += best
            self.tried += failed
        else:
            setting = failed[0].setting if len(failed) == 1 else "every setting"
            why = "; ".join(dict.fromkeys(run.failure for run in failed))
            self.shown.append(Entrant(run=replace(failed[0], setting=setting, failure=why)))

    def add_monetlite(self) -> None:
        """Solve within each budget, and within each peer's measured peak, from the smallest to the largest.

        Where Inductor takes part, schedules within its peaks run compiled by it, too.
        """
        rivals = [item.run for item in self.shown if not item.run.failure and item.run.peer is not Peer.PLAIN]
        peaks = {run.peak_bytes or 0 for run in rivals}
        found: list[tuple[int, Schedule]] = []
        added: list[Entrant] = []
        refused: list[Entrant] = []
        asked = sorted({*self.budgets_bytes, *peaks})
        compiled = sorted({run.peak_bytes or 0 for run in rivals if run.peer is Peer.INDUCTOR})
        for number, budget_bytes in enumerate(asked):
            self.to_solve = len(asked) - number + len(compiled)
            if found and found[-1][0] >= NEAR * budget_bytes:
                continue
            starts = [schedule for _, schedule in found[-2:]]
            starts += [schedule for schedule in self.restricted if schedule.peak_bytes <= budget_bytes]
            entrant = self._scheduled(Peer.MONETLITE, budget_bytes, starts)
            if entrant.refused:
                refused.append(_and_less(entrant) if refused else entrant)
                continue
            added.append(entrant)
            if entrant.schedule is not None:
                found.append((budget_bytes, entrant.schedule))
        for number, budget_bytes in enumerate(compiled):
            self.to_solve = len(compiled) - number
            starts = [schedule for within, schedule in found if within <= budget_bytes]
            entrant = self._scheduled(Peer.MONETLITE, budget_bytes, starts, compiled=True)
            if entrant.run.failure:
                self.tried.append(entrant.run)
            else:
                added.append(entrant)
        self.to_solve = 0
        self.shown += [*reversed(added), *refused[-1:]]

    def _scheduled(
        self,
        peer: Peer,
        budget_bytes: int,
        starts: Sequence[Schedule] = (),
        *,
        compiled: bool = False,
    ) -> Entrant:
        """Solve within a budget and measure; again for less, where the measured peak is more than the budget."""
        within_bytes = budget_bytes
        entrant: Entrant | None = None
        for attempt in range(RETRIES + 1):
            self.tell(f"solving for {TITLES[peer]} within {format_bytes(within_bytes)}")
            try:
                schedule = _solve(peer, self.profiles, within_bytes, self.options, starts, compiled=compiled)
            except Exception as error:
                refused = isinstance(error, InfeasibleBudget)
                if refused and entrant is not None:
                    break  # over the budget, as its figures say; nothing takes less
                setting = _setting(budget_bytes, compiled)
                run = PeerRun(peer=peer, setting=setting, asked_bytes=budget_bytes, failure=_why(error))
                entrant = Entrant(run=run, refused=refused)
                self.show(entrant)
                return entrant
            contender = scheduled(peer, schedule, budget_bytes, compiled=compiled)
            entrant = self.enter(contender)
            if entrant.run.failure:
                break
            entrant = replace(entrant, schedule=schedule)
            excess_bytes = (entrant.run.peak_bytes or 0) - budget_bytes
            if excess_bytes <= 0:
                break
            within_bytes = schedule.peak_bytes - (attempt + 1) * excess_bytes
        assert entrant is not None
        return entrant


def _setting(budget_bytes: int, compiled: bool) -> str:
    return f"budget {format_bytes(budget_bytes)}{', compiled' if compiled else ''}"


def _and_less(entrant: Entrant) -> Entrant:
    """The entry of a budget that nothing fits, for all below it that were asked for, too."""
    return replace(entrant, run=replace(entrant.run, setting=f"{entrant.run.setting} and less"))


def _why(error: Exception) -> str:
    """The reason why there is no schedule, in a line."""
    if not isinstance(error, InfeasibleBudget):
        return reason(error)
    reached_bytes = error.reached_bytes
    least = f"; the smallest peak reached is {format_bytes(reached_bytes)}" if reached_bytes else ""
    return f"no schedule within it{least}"


def _described(args: Sequence[object], kwargs: dict[str, object]) -> str:
    """Inputs in words: `16×3×160×160 float32`."""
    return ", ".join(
        f"{'×'.join(map(str, item.shape))} {str(item.dtype).removeprefix('torch.')}".strip()
        for item in tensors_among((args, kwargs))
    )
