"""Results of a comparison, and the verdict at each budget. Tables, pictures and JSON are made from them."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from monetlite.core.errors import ModelError
from monetlite.core.spelling import close_matches


class Peer(StrEnum):
    """A way to train within less memory, by the name that `--peers` knows it by."""

    PLAIN = "plain"
    CHECKPOINT = "checkpoint"
    SEGMENTS = "segments"
    SELECTIVE = "selective"
    TILED_LOSS = "tiled_loss"
    AUTO_SAC = "auto_sac"
    AOT_EAGER = "aot_eager"
    INDUCTOR = "inductor"
    CHECKMATE = "checkmate"
    GIST = "gist"
    MONETLITE = "monetlite"


TITLES: Mapping[Peer, str] = {
    Peer.PLAIN: "plain PyTorch",
    Peer.CHECKPOINT: "checkpoint",
    Peer.SEGMENTS: "checkpoint_sequential",
    Peer.SELECTIVE: "selective checkpoint",
    Peer.TILED_LOSS: "tiled loss",
    Peer.AUTO_SAC: "auto-SAC",
    Peer.AOT_EAGER: "torch.compile, aot_eager",
    Peer.INDUCTOR: "torch.compile, Inductor",
    Peer.CHECKMATE: "Checkmate mode",
    Peer.GIST: "Gist mode",
    Peer.MONETLITE: "monetlite",
}
"""Names in tables."""

BY_MONETLITE = (Peer.CHECKMATE, Peer.GIST, Peer.MONETLITE)
"""Peers that run by a schedule, in monetlite's own runtime."""

PEERS = tuple(peer for peer in Peer if peer not in (Peer.PLAIN, Peer.MONETLITE))


def named_peers(names: Iterable[str]) -> list[Peer]:
    """Peers by their names, in the order of tables.

    Raises:
        ModelError: there is no such peer.
    """
    wanted = [name.strip() for name in names]
    if unknown := [name for name in wanted if name not in PEERS]:
        near = close_matches(unknown[0], PEERS)
        raise ModelError(f"there is no peer {unknown[0]!r}; there are {', '.join(PEERS)}{near}")
    return [peer for peer in PEERS if peer in wanted]


def title_of(peer: Peer, setting: str) -> str:
    """A peer in a setting, as tables name it."""
    return f"{TITLES[peer]}: {setting}" if setting else TITLES[peer]


@dataclass(frozen=True, kw_only=True)
class PeerRun:
    """One way to train in one setting, measured.

    Attributes:
        setting: in words. label: peer and setting in a word or two, for pictures.
        asked_bytes: the budget it was given; None where it takes none.
        peak_bytes: measured peak of the step, resident memory included.
        reserved_bytes: most that the CUDA allocator held; None on the CPU.
        releases: mean number of times in a step that the CUDA allocator gave memory back; None on the CPU.
        times_ms: measured steps, taken in turn with every other way.
        gradient_difference: the largest of any gradient from plain training's; None where that didn't run.
        faults: results of the step that are not plain training's, in words.
        failure: reason why there are no figures; empty if it ran.
    """

    peer: Peer
    setting: str = ""
    label: str = ""
    asked_bytes: int | None = None
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    releases: float | None = None
    times_ms: tuple[float, ...] = ()
    gradient_difference: float | None = None
    faults: tuple[str, ...] = ()
    failure: str = ""

    @property
    def title(self) -> str:
        return title_of(self.peer, self.setting)

    @property
    def step_ms(self) -> float:
        """Median step time in ms; infinite for what did not run."""
        return statistics.median(self.times_ms) if self.times_ms else float("inf")

    @property
    def middle_half_ms(self) -> tuple[float, float]:
        """The quartiles of its step times in ms; infinite for what did not run."""
        if len(self.times_ms) < 2:
            return self.step_ms, self.step_ms
        low, _, high = statistics.quantiles(self.times_ms, n=4, method="inclusive")
        return low, high

    def within(self, budget_bytes: int) -> bool:
        """Tell whether it ran, with a measured peak of at most so many bytes."""
        return not self.failure and self.peak_bytes is not None and self.peak_bytes <= budget_bytes

    def told_apart(self, other: "PeerRun") -> bool:
        """Tell whether the middle halves of two runs' step times are apart. One step each tells nothing."""
        (low, high), (least, most) = self.middle_half_ms, other.middle_half_ms
        return min(len(self.times_ms), len(other.times_ms)) > 1 and (high < least or most < low)


@dataclass(frozen=True, kw_only=True)
class Duel:
    """A peer's run, beside monetlite's fastest at an equal or smaller measured peak.

    `ours` is None where no schedule of monetlite's has such a peak.
    """

    peer: PeerRun
    ours: PeerRun | None

    @property
    def faster(self) -> bool:
        """True if monetlite's median step is the faster one."""
        return self.ours is not None and self.ours.step_ms < self.peer.step_ms

    @property
    def clear(self) -> bool:
        """True if the middle halves of both runs' step times are apart."""
        return self.ours is None or self.ours.told_apart(self.peer)


@dataclass(frozen=True, kw_only=True)
class Standing:
    """The verdict at one budget.

    Attributes:
        budget: as it was asked for. budget_bytes: in bytes.
        ours: monetlite's fastest run within it; None where nothing of it fits.
        duels: with each peer that fits, in its fastest setting. Checkmate and Gist are peers, whoever runs them.
        too_large: of each peer that ran and doesn't fit with any setting, the run with the smallest peak.
    """

    budget: str
    budget_bytes: int
    ours: PeerRun | None
    duels: tuple[Duel, ...]
    too_large: tuple[PeerRun, ...]

    @property
    def faster(self) -> bool:
        """True if monetlite is faster than every peer that fits, at an equal or smaller measured peak."""
        return self.ours is not None and all(duel.faster for duel in self.duels)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One model on one machine: every way to train it, measured in one process.

    Attributes:
        model: its name. inputs: their shapes and dtypes, in words.
        device: `cpu` or `cuda`. environment: the hardware and the versions that figures depend on.
        repeats: timed steps of each. time_limit: seconds for each solve. tolerance, autocast: as for `solve`.
        runs: those in the tables, plain training first.
        tried: settings of peers that others beat at every budget; their times are of a few steps only.
        duels: every run of a peer that tables show, beside monetlite.
        standings: the verdict at each budget, from the largest to the smallest.
    """

    model: str
    inputs: str
    device: str
    environment: Mapping[str, str]
    repeats: int
    time_limit: float
    tolerance: float
    autocast: str
    runs: tuple[PeerRun, ...]
    tried: tuple[PeerRun, ...]
    duels: tuple[Duel, ...]
    standings: tuple[Standing, ...]

    @property
    def plain(self) -> PeerRun:
        return self.runs[0]

    def ratio(self, run: PeerRun) -> float | None:
        """Step time over plain training's, medians; None where one of them did not run."""
        return run.step_ms / self.plain.step_ms if run.times_ms and self.plain.times_ms else None

    def spread(self, run: PeerRun) -> tuple[float, float] | None:
        """The fastest and the slowest step, over plain training's median."""
        if self.ratio(run) is None:
            return None
        return min(run.times_ms) / self.plain.step_ms, max(run.times_ms) / self.plain.step_ms


def fastest_within(runs: Sequence[PeerRun], budgets_bytes: Iterable[int]) -> list[PeerRun]:
    """The fastest of one peer's runs within each budget; the one with the smallest peak if none fits any."""
    ran = [run for run in runs if not run.failure]
    found = [run for budget_bytes in budgets_bytes if (run := _fastest(ran, budget_bytes)) is not None]
    return found or [min(ran, key=_peak_bytes)] if ran else []


def standings(budgets: Mapping[str, int], runs: Sequence[PeerRun]) -> tuple[Standing, ...]:
    """The verdict at each budget, from the largest to the smallest."""
    return tuple(
        _standing(budget, budget_bytes, runs)
        for budget, budget_bytes in sorted(budgets.items(), key=lambda item: -item[1])
    )


def duels(runs: Sequence[PeerRun]) -> tuple[Duel, ...]:
    """Every run of a peer beside monetlite's fastest at an equal or smaller measured peak."""
    ours = [run for run in runs if run.peer is Peer.MONETLITE and run.times_ms]
    theirs = [run for run in runs if run.peer not in (Peer.PLAIN, Peer.MONETLITE) and run.times_ms]
    return tuple(Duel(peer=run, ours=_fastest(ours, _peak_bytes(run))) for run in theirs)


def _standing(budget: str, budget_bytes: int, runs: Sequence[PeerRun]) -> Standing:
    fought = {duel.peer: duel for duel in duels(runs)}
    fitting: list[Duel] = []
    too_large: list[PeerRun] = []
    for peer in Peer:
        theirs = [run for run in fought if run.peer is peer]
        best = _fastest(theirs, budget_bytes)
        if best is not None:
            fitting.append(fought[best])
        elif theirs:
            too_large.append(min(theirs, key=_peak_bytes))
    return Standing(
        budget=budget,
        budget_bytes=budget_bytes,
        ours=_fastest((run for run in runs if run.peer is Peer.MONETLITE and run.times_ms), budget_bytes),
        duels=tuple(fitting),
        too_large=tuple(too_large),
    )


def _fastest(runs: Iterable[PeerRun], budget_bytes: int) -> PeerRun | None:
    return min((run for run in runs if run.within(budget_bytes)), key=lambda run: run.step_ms, default=None)


def _peak_bytes(run: PeerRun) -> int:
    return run.peak_bytes or 0
