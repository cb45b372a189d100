"""What the page says in words: the figures that people decide by, each beside what it was found with."""

from dataclasses import dataclass

from monetlite.core.graph import CHANNELS_LAST, TensorSpec
from monetlite.core.units import format_bytes, format_ms
from monetlite.reporting.html.page_steps import Pair, Run
from monetlite.reporting.memory import Holding
from monetlite.reporting.text_solve import cost_source


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure in large type, and what it is to be compared with."""

    label: str
    value: str
    note: str


def title_of(pair: Pair) -> str:
    """The model, its batch and the budget."""
    batch = f", batch {pair.schedule.source.batch}" if pair.schedule.source else ""
    return f"{pair.schedule.name}{batch}, within {format_bytes(pair.schedule.budget_bytes)}"


def costs_of(pair: Pair) -> str:
    """Where the page's figures come from, in words."""
    profile = pair.scheduled.profile
    return cost_source(profile.device, profile.kind, profile.environment)


def introduction(pair: Pair) -> str:
    """What the page is of, where its figures come from, and how the schedule was found."""
    schedule = pair.schedule
    return (
        "One training step by its schedule, and as plain training runs it. "
        f"Memory and latency are {costs_of(pair)}. "
        f"Solved in {schedule.seconds:.1f} s by {schedule.solver}: {schedule.status}."
    )


def figures(pair: Pair) -> list[Figure]:
    """Budget, peak, step time and gap."""
    schedule, scheduled, plain = pair.schedule, pair.scheduled.timeline, pair.plain.timeline
    plain_peak = format_bytes(plain.peak_bytes)
    spare = schedule.budget_bytes - scheduled.peak_bytes
    within = f"{format_bytes(spare)} to spare" if spare >= 0 else f"exceeded by {format_bytes(-spare)}"
    return [
        Figure(label="Budget", value=format_bytes(schedule.budget_bytes), note=within),
        Figure(
            label="Peak",
            value=format_bytes(scheduled.peak_bytes),
            note=f"{scheduled.peak_bytes / plain.peak_bytes:.0%} of plain training's {plain_peak}",
        ),
        Figure(
            label="Step time",
            value=format_ms(scheduled.latency_ms),
            note=f"{pair.overhead:+.1%} over plain training's {format_ms(plain.latency_ms)}, {costs_of(pair)}",
        ),
        _gap(pair),
    ]


def _gap(pair: Pair) -> Figure:
    bound_ms = pair.schedule.lower_bound_ms
    if bound_ms <= 0:
        return Figure(label="Gap", value="unknown", note="no bound on the step time is proven")
    note = f"no schedule within the budget is faster than {format_ms(bound_ms)}{_as_solved(pair)}"
    return Figure(label="Gap", value=f"{pair.schedule.gap:.1%}", note=note)


def details(pair: Pair) -> list[tuple[str, str]]:
    """Everything else about a schedule, as (what, in words)."""
    schedule, profile = pair.schedule, pair.scheduled.profile
    inputs = ", ".join(f"{name} {_layout(spec)}" for name, spec in schedule.inputs.items())
    environment = ", ".join(f"{name} {value}" for name, value in sorted(profile.environment.items()))
    training = [
        f"{schedule.optimizer} state counted" if schedule.optimizer else "no optimizer state counted",
        "gradients of earlier batches counted" if schedule.accumulate else "",
        f"autocast to {schedule.autocast}" if schedule.autocast else "",
        "images in channels-last" if schedule.layout == CHANNELS_LAST else "",
    ]
    exact = "the same bits as the captured step" if not schedule.tolerance else f"within {schedule.tolerance:g}"
    return [
        ("Inputs", inputs or "none"),
        ("Costs", costs_of(pair) + (f" ({environment})" if environment else "")),
        ("Training", ", ".join(item for item in training if item)),
        ("Results", exact),
        ("Peak at", f"{pair.scheduled.peak_operator}; plain training: {pair.plain.peak_operator}"),
        ("Fingerprint", schedule.fingerprint),
    ]


def at_peaks(pair: Pair) -> list[tuple[str, str, str]]:
    """(held for, scheduled, plain) at the peak of each: what a page without a script shows instead of pictures."""

    def at_peak(run: Run, holding: Holding) -> int:
        return run.breakdown.bytes_of[holding][run.timeline.peak_step]

    rows = [
        (holding.value, format_bytes(at_peak(pair.scheduled, holding)), format_bytes(at_peak(pair.plain, holding)))
        for holding in Holding
    ]
    runs = (pair.scheduled, pair.plain)
    peak, plain_peak = (format_bytes(run.timeline.peak_bytes) for run in runs)
    step, plain_step = (format_ms(run.timeline.latency_ms) for run in runs)
    return [
        *rows,
        ("in all", peak, plain_peak),
        ("at operator", pair.scheduled.peak_operator, pair.plain.peak_operator),
        ("step time", step, plain_step),
    ]


def _as_solved(pair: Pair) -> str:
    """What the solver's promises hold for, where that is not what the page shows."""
    solved = cost_source(pair.schedule.device, pair.schedule.kind, pair.schedule.environment)
    return "" if solved == costs_of(pair) else f" (costs {solved})"


def _layout(spec: TensorSpec) -> str:
    return f"{'×'.join(map(str, spec.shape)) or 'scalar'} {spec.dtype}"


__all__ = ["Figure", "at_peaks", "costs_of", "details", "figures", "introduction", "title_of"]
