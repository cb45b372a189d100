"""One model, one machine, one run: plain training, what people use beside monetlite, and monetlite."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from monetlite.checking.comparison import peers as others
from monetlite.checking.comparison.bench import Bench, Contender, Entrant, Unsupported, environment, reason
from monetlite.checking.comparison.peer_runs import (
    TITLES,
    Comparison,
    Peer,
    PeerRun,
    duels,
    fastest_within,
    standings,
)
from monetlite.checking.trainee import Trainee, default_loss
from monetlite.core.costs import Profile
from monetlite.core.errors import BudgetError, DeviceError, InfeasibleBudget, ModelError
from monetlite.core.interrupts import interrupts_kept
from monetlite.core.options import DEFAULT_IMPLEMENTATIONS, SolvingOptions
from monetlite.core.schedule import Schedule
from monetlite.core.simulate import simulate
from monetlite.core.steps import plain_steps
from monetlite.core.units import format_bytes, parse_budget
from monetlite.fx.torch_internals import torch_pytree as pytree
from monetlite.operators.random import forked_state
from monetlite.planning.budgets import solve_budget
from monetlite.planning.layouts import layouts_to_try, solve_layouts
from monetlite.planning.pricing import profile
from monetlite.runtime import MONeTWrapper
from monetlite.solving.baselines import restrict_gist
from monetlite.tracing import split_inputs, trace
from monetlite.tracing.step_inputs import Arguments, Inputs, device_of

BUDGETS = ("70%", "50%", "40%")
TRIAL_REPEATS = 3
"""Timed steps of each setting of a peer with several, to find the fastest ones."""
NEAR = 0.995
"""A schedule for this share of a budget stands for one for the budget."""
RETRIES = 2
"""Number of times that a schedule whose measured peak is over the budget is solved for again, for less."""

FAMILIES: dict[Peer, Callable[[Trainee], list[Contender]]] = {
    Peer.CHECKPOINT: others.every_block,
    Peer.SEGMENTS: others.segments,
    Peer.SELECTIVE: others.selective,
    Peer.AOT_EAGER: others.aot_eager,
    Peer.INDUCTOR: others.inductor,
}
PEERS = (*FAMILIES, Peer.CHECKMATE, Peer.GIST)


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
) -> Comparison:
    """Train steps of a model plainly, by what people use today, and by monetlite, and measure them in one run.

    Everything runs on copies: the model is not changed. A way to train that fails, out of memory or otherwise, is
    a run with its reason.

    Args:
        model: in training mode.
        example_inputs: as for `trace`.
        budgets: for monetlite, and to hold peers to: as for `solve`; percentages are of plain training's measured
            peak (its predicted one where it does not fit into memory).
        peers: the other methods: `checkpoint`, `segments`, `selective`, `aot_eager`, `inductor`, `checkmate` and
            `gist`.
        device: `"cpu"` or `"cuda"`; by default where the model is.
        autocast: the dtype to train under `torch.autocast` to, as `"bfloat16"`.
        tolerance: of monetlite's schedules, as for `solve`.
        time_limit: seconds of solving for each schedule.
        repeats: timed steps of each, taken in turn.
        seed: of the random numbers of the steps that are compared, and of solving.
        loss: makes a scalar of the model's output; by default as for `verify`.
        name: of the model, for reports; by default its class.
        progress: called with a line about each piece of work.

    Raises:
        BudgetError: a budget can't be read, or there is none.
        ModelError: an unknown peer, a tolerance that is not a fraction, or no repeats.
        DeviceError: the device is not there.
        TraceError, ProfileError: monetlite can't plan for this model.
    """
    asked = list(dict.fromkeys(str(budget) for budget in budgets))
    if not asked:
        raise BudgetError("no budget was given; write some, as 70%,50% or 6GB")
    for budget in asked:
        parse_budget(budget, plain_peak_bytes=2**40)
    if repeats < 1:
        raise ModelError(f"{repeats} timed steps measure nothing; take at least 1")
    chosen = _peers(peers)
    args, kwargs = split_inputs(example_inputs)
    device = device or device_of(model, (args, kwargs))
    if device not in ("cpu", "cuda"):
        raise DeviceError(f"device {device!r}: steps are measured on 'cpu' or 'cuda'")
    say = progress or (lambda _: None)
    layouts = layouts_to_try(None, tolerance)
    with forked_state(device):
        where = environment(device)
        bench = Bench(model, args, kwargs, loss or default_loss, device, autocast=autocast, seed=seed)
        say("tracing the model and measuring its operators")
        profiles = [_price(bench, layout, tolerance) for layout in layouts]
        say(f"measuring {TITLES[Peer.PLAIN]}")
        plain = bench.enter(Contender(peer=Peer.PLAIN))
        plain_bytes = plain.run.peak_bytes or simulate(profiles[0], plain_steps(profiles[0].graph)).peak_bytes
        limits = {budget: parse_budget(budget, plain_bytes) for budget in asked}
        options = SolvingOptions(tolerance=tolerance, time_limit=time_limit, seed=seed)
        planner = Planner(profiles=profiles, options=options)
        contest = _Contest(bench=bench, planner=planner, budgets_bytes=sorted(set(limits.values())), say=say)
        contest.shown.append(plain)
        for peer in chosen:
            contest.add_peer(peer, min(TRIAL_REPEATS, repeats))
        contest.add_monetlite()
        running = [item for item in contest.shown if not item.run.failure]
        say(f"timing {len(running)} ways to train, {repeats} steps of each, in turn")
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


@dataclass(frozen=True, kw_only=True)
class Planner:
    """Solves for schedules of one step.

    Attributes:
        profiles: of the step in every layout that may be chosen, the first as plain training runs it.
        options: of monetlite's schedules; the others have its time limit and seed.
    """

    profiles: Sequence[Profile]
    options: SolvingOptions

    def solve(self, peer: Peer, budget_bytes: int, starts: Iterable[Schedule] = ()) -> Schedule:
        """The fastest schedule that a method can choose.

        Checkmate stores and recomputes, every operator running as it was traced. Gist has compact intermediates
        that lose nothing, and no recomputation.

        Raises:
            Unsupported: nothing fits.
        """
        plain, exact = self.profiles[0], replace(self.options, tolerance=0.0)
        try:
            with interrupts_kept():
                match peer:
                    case Peer.CHECKMATE:
                        return solve_budget(
                            plain, budget_bytes, replace(exact, implementations=DEFAULT_IMPLEMENTATIONS)
                        )
                    case Peer.GIST:
                        restricted = restrict_gist(plain.within(0.0)).profile
                        schedule = solve_budget(restricted, budget_bytes, exact)
                        graph = plain.graph  # the schedule serves this one, of which less may be chosen there
                        return replace(schedule, fingerprint=graph.fingerprint, structure=graph.structure)
                return solve_layouts(self.profiles, budget_bytes, self.options, starts=starts)
        except InfeasibleBudget as error:
            least = (
                f"; the smallest peak reached is {format_bytes(error.reached_bytes)}" if error.reached_bytes else ""
            )
            raise Unsupported(f"no schedule within it{least}") from error


def scheduled(
    peer: Peer, schedule: Schedule, asked_bytes: int, *, compiled: bool = False, with_defaults: bool = False
) -> Contender:
    """A model that trains by a schedule, for a budget that the schedule's own may be a little below.

    Args:
        peer: whose schedule it is. schedule: its schedule. asked_bytes: the budget.
        compiled: run it by Inductor, which rounds as Inductor does.
        with_defaults: say in the setting that the schedule has only default implementations.
    """
    return Contender(
        peer=peer,
        setting=_budget_setting(asked_bytes, compiled=compiled, with_defaults=with_defaults),
        label=f"{TITLES[peer]}, compiled" if compiled else "",
        prepare=lambda model: MONeTWrapper(model, schedule, compile=compiled),
        asked_bytes=asked_bytes,
        limit_bytes=None if schedule.reserved_bytes is None else max(asked_bytes, schedule.reserved_bytes),
    )


def _budget_setting(budget_bytes: int, *, compiled: bool = False, with_defaults: bool = False) -> str:
    """The setting of a schedule for a budget, in words."""
    words = [f"budget {format_bytes(budget_bytes)}"]
    return ", ".join([*words, *["default implementations"] * with_defaults, *["compiled"] * compiled])


@dataclass(kw_only=True)
class _Contest:
    """Ways to train that take part or have failed, and settings that were tried and left out."""

    bench: Bench
    planner: Planner
    budgets_bytes: list[int]
    say: Callable[[str], None]
    shown: list[Entrant] = field(default_factory=list)
    tried: list[PeerRun] = field(default_factory=list)
    restricted: list[Schedule] = field(default_factory=list)
    """Checkmate's and Gist's schedules, which monetlite may choose, too: its search begins from those that fit."""

    def add_peer(self, peer: Peer, trial_repeats: int) -> None:
        """Measure a peer in every setting that it has, and let those take part that are best within a budget."""
        if peer in (Peer.CHECKMATE, Peer.GIST):
            for budget_bytes in reversed(self.budgets_bytes):
                try:
                    entrant, schedule = self._scheduled(peer, budget_bytes)
                except Unsupported as error:
                    self.shown.append(
                        _refused(peer, budget_bytes, error, less=budget_bytes > self.budgets_bytes[0])
                    )
                    break
                self.shown.append(entrant)
                self.restricted += [schedule] if schedule else []
            return
        try:
            contenders = FAMILIES[peer](self.bench.plain)
        except Exception as error:
            self.shown.append(Entrant(run=PeerRun(peer=peer, failure=reason(error))))
            return
        entered = []
        for contender in contenders:
            self.say(f"measuring {TITLES[peer]}: {contender.setting}")
            entered.append(self.bench.enter(contender))
        failed = [item.run for item in entered if item.run.failure]
        best = [item for item in entered if not item.run.failure]
        if len(entered) > 1 and best:
            self.say(f"timing {len(best)} settings of {TITLES[peer]}")
            trials = self.bench.time(best, trial_repeats)
            fastest = fastest_within(trials, self.budgets_bytes)
            best = [item for item, trial in zip(best, trials, strict=True) if trial in fastest]
            self.tried += [trial for trial in trials if trial not in fastest and not trial.failure]
            failed += [trial for trial in trials if trial.failure]
        if best:
            self.shown += best
            self.tried += failed
        else:
            setting = failed[0].setting if len(failed) == 1 else "every setting"
            self.shown.append(Entrant(run=replace(failed[0], setting=setting)))

    def add_monetlite(self) -> None:
        """Solve within each budget, and within each peer's measured peak, from the smallest to the largest.

        Where Inductor takes part, schedules within its peaks run compiled by it, too.
        """
        rivals = [item.run for item in self.shown if not item.run.failure and item.run.peer is not Peer.PLAIN]
        peaks = {run.peak_bytes or 0 for run in rivals}
        found: list[tuple[int, Schedule]] = []
        added: list[Entrant] = []
        refused: list[Entrant] = []
        for budget_bytes in sorted({*self.budgets_bytes, *peaks}):
            if found and found[-1][0] >= NEAR * budget_bytes:
                continue
            starts = [schedule for _, schedule in found[-2:]]
            starts += [schedule for schedule in self.restricted if schedule.peak_bytes <= budget_bytes]
            try:
                entrant, schedule = self._scheduled(Peer.MONETLITE, budget_bytes, starts)
            except Unsupported as error:
                refused.append(_refused(Peer.MONETLITE, budget_bytes, error, less=bool(refused)))
                continue
            added.append(entrant)
            if schedule is not None:
                found.append((budget_bytes, schedule))
        for budget_bytes in sorted({run.peak_bytes or 0 for run in rivals if run.peer is Peer.INDUCTOR}):
            starts = [schedule for within, schedule in found if within <= budget_bytes]
            added += self._compiled(budget_bytes, starts)
        self.shown += [*reversed(added), *refused[-1:]]

    def _compiled(self, budget_bytes: int, starts: Sequence[Schedule]) -> Iterator[Entrant]:
        """Schedules within a budget, compiled by Inductor: of all implementations, and of those that it fuses best.

        One that fails is set aside.
        """
        for with_defaults in (False, True):
            try:
                entrant, _ = self._scheduled(
                    Peer.MONETLITE, budget_bytes, starts, compiled=True, with_defaults=with_defaults
                )
            except Unsupported as error:
                setting = _budget_setting(budget_bytes, compiled=True, with_defaults=with_defaults)
                entrant = _failed(Peer.MONETLITE, setting, budget_bytes, error)
            if entrant.run.failure:
                self.tried.append(entrant.run)
            else:
                yield entrant

    def _scheduled(
        self,
        peer: Peer,
        budget_bytes: int,
        starts: Sequence[Schedule] = (),
        *,
        compiled: bool = False,
        with_defaults: bool = False,
    ) -> tuple[Entrant, Schedule | None]:
        """Solve within a budget and measure; again for less, where the measured peak is more than the budget.

        Raises:
            Unsupported: no schedule fits.
        """
        within_bytes = budget_bytes
        found: tuple[Entrant, Schedule] | None = None
        for attempt in range(RETRIES + 1):
            self.say(f"solving for {TITLES[peer]} within {format_bytes(within_bytes)}")
            try:
                method = Peer.CHECKMATE if with_defaults else peer
                schedule = self.planner.solve(method, within_bytes, starts)
            except Unsupported:
                if found is None:
                    raise
                return found  # over the budget, as its figures say; nothing takes less
            except Exception as error:
                setting = _budget_setting(budget_bytes, compiled=compiled, with_defaults=with_defaults)
                return _failed(peer, setting, budget_bytes, error), None
            contender = scheduled(peer, schedule, budget_bytes, compiled=compiled, with_defaults=with_defaults)
            entrant = self.bench.enter(contender)
            if entrant.run.failure:
                return entrant, None
            found = entrant, schedule
            excess_bytes = (entrant.run.peak_bytes or 0) - budget_bytes
            if excess_bytes <= 0:
                break
            # A compiled step's peak does not fall by as much as the schedule's does.
            within_bytes = schedule.peak_bytes - (attempt + 1) * excess_bytes
        return entrant, schedule


def _refused(peer: Peer, budget_bytes: int, error: Unsupported, *, less: bool) -> Entrant:
    """The entry of a budget that nothing fits, and with `less` of all below it that were asked for."""
    return _failed(peer, f"{_budget_setting(budget_bytes)}{' and less' if less else ''}", budget_bytes, error)


def _failed(peer: Peer, setting: str, budget_bytes: int, error: Exception) -> Entrant:
    return Entrant(run=PeerRun(peer=peer, setting=setting, asked_bytes=budget_bytes, failure=reason(error)))


def _peers(names: Iterable[str]) -> list[Peer]:
    """Peers by their names, in the order of tables.

    Raises:
        ModelError: there is no such peer.
    """
    known = [str(peer) for peer in PEERS]
    wanted = [name.strip() for name in names]
    if unknown := [name for name in wanted if name not in known]:
        raise ModelError(f"there is no peer {unknown[0]!r}; there are {', '.join(known)}")
    return [peer for peer in PEERS if peer in wanted]


def _price(bench: Bench, layout: str, tolerance: float) -> Profile:
    plain, autocast = bench.plain, bench.autocast
    dtype = getattr(torch, autocast or "bfloat16")
    with torch.autocast(bench.device, dtype, enabled=bool(autocast)):
        graph = trace(plain.model, Arguments(plain.args, plain.kwargs), layout=layout)
    return profile(graph, bench.device, tolerance=tolerance)


def _described(args: Sequence[object], kwargs: dict[str, object]) -> str:
    """Inputs in words: `16×3×160×160 float32`."""
    tensors = [item for item in pytree.tree_leaves((args, kwargs)) if isinstance(item, torch.Tensor)]
    return ", ".join(
        f"{'×'.join(map(str, item.shape))} {str(item.dtype).removeprefix('torch.')}".strip() for item in tensors
    )
