"""Ways to train one model, measured alone one after the other, and timed in turn in the end."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from monetlite.checking.comparison.auto_sac import planned_by_torch
from monetlite.checking.comparison.bench import Bench, Contender, Entrant, reason
from monetlite.checking.comparison.peer_runs import (
    BY_MONETLITE,
    TITLES,
    Peer,
    PeerRun,
    fastest_within,
    title_of,
)
from monetlite.checking.comparison.peers import aot_eager, by_blocks, inductor, segments, selective
from monetlite.checking.comparison.scheduled_peers import scheduled, setting_of, solve_as
from monetlite.checking.comparison.tiled_losses import tiled
from monetlite.checking.trainee import Trainee
from monetlite.core.costs import Profile
from monetlite.core.errors import InfeasibleBudget
from monetlite.core.options import SolvingOptions
from monetlite.core.schedule import Schedule
from monetlite.core.units import format_bytes

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


@dataclass(kw_only=True)
class Contest:
    """Ways to train that take part or have failed, and settings that were tried and left out.

    Monetlite may choose Checkmate's and Gist's schedules (`restricted`), too: its search begins from them.

    Attributes:
        bench: that all are measured on.
        profiles: to solve with; the first is as plain training runs.
        options: of solving.
        budgets_bytes: that monetlite has, and peers are held to; ascending.
        repeats: timed steps of each.
        say: called with what is done next, and the time left.
        finished: called with each run, and the time of one step over plain training's.
        shown: those that tables show, plain training first.
        tried: runs of the settings that are left out.
        pending: settings of the peers that are not done; empty for a peer that trains by schedules.
        to_solve: schedules of monetlite's that are not solved, once its turn has come.
    """

    bench: Bench
    profiles: Sequence[Profile]
    options: SolvingOptions
    budgets_bytes: list[int]
    repeats: int
    say: Callable[[str], None]
    finished: Callable[[PeerRun, float | None], None]
    shown: list[Entrant]
    tried: list[PeerRun] = field(default_factory=list)
    restricted: list[Schedule] = field(default_factory=list)
    pending: dict[Peer, list[Contender]] = field(default_factory=dict)
    to_solve: int = 0

    def run(self, peers: Sequence[Peer]) -> list[PeerRun]:
        """Measure peers, then monetlite, and time those that are shown in turn; the runs in that order."""
        self._show(self.shown[0])
        self.pending = {peer: _settings(peer, self.bench.plain) if peer in METHODS else [] for peer in peers}
        for peer in peers:
            if peer in METHODS:
                self._add_settings(peer)
            else:
                self._add_restricted(peer)
            del self.pending[peer]
        self._add_monetlite()
        running = [item for item in self.shown if not item.run.failure]
        self._tell(f"timing {len(running)} ways to train, {self.repeats} steps of each, in turn")
        return self.bench.time(self.shown, self.repeats)

    def _show(self, entrant: Entrant) -> None:
        """Tell of a run that was measured, with the time of one step."""
        run, plain_ms = entrant.run, self.shown[0].first_ms
        if entrant.first_ms:
            run = replace(run, times_ms=(entrant.first_ms,))
        self.finished(run, entrant.first_ms / plain_ms if entrant.first_ms and plain_ms else None)

    def _enter(self, contender: Contender) -> Entrant:
        """Measure a contender, and tell of it."""
        entrant = self.bench.enter(contender)
        self._show(entrant)
        return entrant

    def _tell(self, text: str) -> None:
        """Tell what is done next, and how long everything takes from here, about."""
        minutes, seconds = divmod(round(self._seconds_left() / 10) * 10, 60)
        left = f"{minutes} min {seconds} s" if minutes else f"{max(10, seconds)} s"
        self.say(f"{text}; about {left} left")

    def _seconds_left(self) -> float:
        """Time from here to the end, by plain training's step and by what is pending."""
        solves = self.to_solve
        if self.pending:
            solves = len(self.budgets_bytes) + len(self.shown) - 1 + len(self.pending)
        entering = {peer: len(settings) or len(self.budgets_bytes) for peer, settings in self.pending.items()}
        entering[Peer.MONETLITE] = solves
        preparing_s = sum(
            count * (self.options.time_limit if peer in BY_MONETLITE else PREPARING_SECONDS.get(peer, 0.0))
            for peer, count in entering.items()
        )
        timed = len(self.shown) + len(self.pending) + solves
        steps = sum(entering.values()) * STEPS_TO_ENTER + timed * self.repeats
        return preparing_s + steps * self.shown[0].first_ms / 1000

    def _add_settings(self, peer: Peer) -> None:
        """Measure a peer in every setting, and let those take part that are best within a budget."""
        entered = []
        for contender in self.pending[peer]:
            self._tell(f"measuring {title_of(peer, contender.setting)}")
            entered.append(self._enter(contender))
        best = [item for item in entered if not item.run.failure]
        failed = [item.run for item in entered if item.run.failure]
        if len(entered) > 1 and best:
            self._tell(f"timing {len(best)} settings of {TITLES[peer]}")
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

    def _add_restricted(self, peer: Peer) -> None:
        """Solve by a method of schedules within each budget, from the largest to the first that nothing fits."""
        for budget_bytes in reversed(self.budgets_bytes):
            entrant = self.solve_and_enter(peer, budget_bytes)
            self.restricted += [entrant.schedule] if entrant.schedule else []
            if entrant.refused:
                self.shown.append(_and_less(entrant) if budget_bytes > self.budgets_bytes[0] else entrant)
                break
            self.shown.append(entrant)

    def _add_monetlite(self) -> None:
        """Solve within each budget, and within each peer's measured peak.

        Where Inductor takes part, schedules within its peaks run compiled by it, too.
        """
        rivals = [item.run for item in self.shown if not item.run.failure and item.run.peer is not Peer.PLAIN]
        budgets = sorted({*self.budgets_bytes, *(run.peak_bytes or 0 for run in rivals)})
        peaks = sorted({run.peak_bytes or 0 for run in rivals if run.peer is Peer.INDUCTOR})
        self.to_solve = len(budgets) + len(peaks)
        solved: dict[int, Schedule] = {}
        added: list[Entrant] = []
        refused: list[Entrant] = []
        for budget_bytes in budgets:
            if not solved or max(solved) < NEAR * budget_bytes:
                starts = list(solved.values())[-2:]
                starts += [schedule for schedule in self.restricted if schedule.peak_bytes <= budget_bytes]
                entrant = self.solve_and_enter(Peer.MONETLITE, budget_bytes, starts)
                (refused if entrant.refused else added).append(entrant)
                if entrant.schedule is not None:
                    solved[budget_bytes] = entrant.schedule
            self.to_solve -= 1
        for budget_bytes in peaks:
            starts = [schedule for within_bytes, schedule in solved.items() if within_bytes <= budget_bytes]
            entrant = self.solve_and_enter(Peer.MONETLITE, budget_bytes, starts, compiled=True)
            if entrant.run.failure:
                self.tried.append(entrant.run)
            else:
                added.append(entrant)
            self.to_solve -= 1
        self.shown += reversed(added)
        if refused:
            self.shown.append(_and_less(refused[-1]) if len(refused) > 1 else refused[0])

    def solve_and_enter(
        self, peer: Peer, budget_bytes: int, starts: Iterable[Schedule] = (), *, compiled: bool = False
    ) -> Entrant:
        """Solve within a budget and measure; again for less, where the measured peak is more than the budget."""
        within_bytes = budget_bytes
        entrant: Entrant | None = None
        for attempt in range(1, RETRIES + 2):
            self._tell(f"solving for {TITLES[peer]} within {format_bytes(within_bytes)}")
            try:
                schedule = solve_as(peer, self.profiles, within_bytes, self.options, starts, compiled=compiled)
            except Exception as error:
                refused = isinstance(error, InfeasibleBudget)
                if refused and entrant is not None:
                    break  # over the budget, as its figures say; nothing takes less
                setting = setting_of(budget_bytes, compiled)
                run = PeerRun(peer=peer, setting=setting, asked_bytes=budget_bytes, failure=_why(error))
                entrant = Entrant(run=run, refused=refused)
                self._show(entrant)
                break
            entrant = self._enter(scheduled(peer, schedule, budget_bytes, compiled=compiled))
            if entrant.run.failure:
                break
            entrant = replace(entrant, schedule=schedule)
            excess_bytes = (entrant.run.peak_bytes or 0) - budget_bytes
            if excess_bytes <= 0:
                break
            within_bytes = schedule.peak_bytes - attempt * excess_bytes
        assert entrant is not None
        return entrant


def _settings(peer: Peer, plain: Trainee) -> list[Contender]:
    """A peer's contenders; a single one that fails, where there are none for this model."""
    try:
        return METHODS[peer](plain)
    except Exception as error:
        why = error

    def fail(model: nn.Module) -> nn.Module:
        raise why

    return [Contender(peer=peer, prepare=fail)]


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
