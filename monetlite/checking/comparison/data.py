"""What a comparison measured: frozen data that tables, pictures and JSON are made from."""

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum


class Peer(StrEnum):
    """A way to train within less memory, by the name that `--peers` knows it by."""

    PLAIN = "plain"
    CHECKPOINT = "checkpoint"
    SEGMENTS = "segments"
    SELECTIVE = "selective"
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
    Peer.AOT_EAGER: "torch.compile, aot_eager",
    Peer.INDUCTOR: "torch.compile, Inductor",
    Peer.CHECKMATE: "Checkmate mode",
    Peer.GIST: "Gist mode",
    Peer.MONETLITE: "monetlite",
}
"""How they are called in tables."""

BY_MONETLITE = (Peer.CHECKMATE, Peer.GIST, Peer.MONETLITE)
"""What runs by a schedule, in monetlite's own runtime."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One way to train in one setting, measured.

    Attributes:
        peer, setting: what it is, and with what setting, in words.
        label: the same in a word or two, for pictures.
        asked_bytes: the budget it was given; None where it takes none.
        peak_bytes: measured peak of the step, resident memory included.
        reserved_bytes: on CUDA, what the caching allocator held at most; None on the CPU.
        releases: on CUDA, how often in its steps the allocator gave memory back to have what was asked for; None on
            the CPU.
        times_ms: measured steps, taken in turn with every other way.
        gradient_difference: the largest of any gradient from plain training's; None where that didn't run.
        faults: in words, what the step leaves otherwise than plain training does.
        failure: why there are no figures; empty if it ran.
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
        return f"{TITLES[self.peer]}: {self.setting}" if self.setting else TITLES[self.peer]

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
        """Whether it ran, with a measured peak of at most so many bytes."""
        return not self.failure and self.peak_bytes is not None and self.peak_bytes <= budget_bytes

    def told_apart(self, other: "Run") -> bool:
        """Whether the middle halves of two ways' step times don't overlap; of one step each nothing can be told."""
        (low, high), (least, most) = self.middle_half_ms, other.middle_half_ms
        return min(len(self.times_ms), len(other.times_ms)) > 1 and (high < least or most < low)


@dataclass(frozen=True, kw_only=True)
class Duel:
    """A peer's run, beside monetlite's fastest at an equal or smaller measured peak.

    `ours` is None where no schedule of monetlite's has such a peak.
    """

    peer: Run
    ours: Run | None

    @property
    def faster(self) -> bool:
        """Whether monetlite's median step is the faster one."""
        return self.ours is not None and self.ours.step_ms < self.peer.step_ms

    @property
    def clear(self) -> bool:
        """Whether the middle halves of both ways' step times don't overlap."""
        return self.ours is None or self.ours.told_apart(self.peer)


@dataclass(frozen=True, kw_only=True)
class Standing:
    """How things stand at one budget.

    Attributes:
        budget: as it was asked for. budget_bytes: in bytes.
        ours: monetlite's fastest run within it; None where nothing of it fits.
        duels: with each peer that fits, in its fastest setting. Checkmate and Gist are peers, whoever runs them.
        too_large: of each peer that ran and doesn't fit with any setting, the run with the smallest peak.
    """

    budget: str
    budget_bytes: int
    ours: Run | None
    duels: tuple[Duel, ...]
    too_large: tuple[Run, ...]

    @property
    def faster(self) -> bool:
        """Whether monetlite is faster than every peer that fits, at an equal or smaller measured peak."""
        return self.ours is not None and all(duel.faster for duel in self.duels)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One model on one machine: every way to train it, measured in one process.

    Attributes:
        model: its name. inputs: their shapes and dtypes, in words.
        device: `cpu` or `cuda`. environment: the hardware and the versions that figures depend on.
        repeats: timed steps of each. time_limit: seconds for each solve. tolerance, autocast: as for `solve`.
        runs: what the tables show, plain training first.
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
    runs: tuple[Run, ...]
    tried: tuple[Run, ...]
    duels: tuple[Duel, ...]
    standings: tuple[Standing, ...]

    @property
    def plain(self) -> Run:
        return self.runs[0]

    def ratio(self, run: Run) -> float | None:
        """Step time over plain training's, medians; None where one of them did not run."""
        return run.step_ms / self.plain.step_ms if run.times_ms and self.plain.times_ms else None

    def spread(self, run: Run) -> tuple[float, float] | None:
        """The fastest and the slowest step, over plain training's median."""
        if self.ratio(run) is None:
            return None
        return min(run.times_ms) / self.plain.step_ms, max(run.times_ms) / self.plain.step_ms

    def of(self, peer: Peer) -> Iterator[Run]:
        """The runs of one way that the tables show."""
        return (run for run in self.runs if run.peer is peer)


__all__ = ["BY_MONETLITE", "TITLES", "Comparison", "Duel", "Peer", "Run", "Standing"]
