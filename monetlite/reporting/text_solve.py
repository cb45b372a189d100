"""The text of `monetlite solve`, and its facts for `--json`."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console

from monetlite.allocator import least_limit, reserve
from monetlite.core.choices import DEFAULT
from monetlite.core.costs import Profile, cost_source
from monetlite.core.devices import CONTEXT_BYTES
from monetlite.core.graph import LAYOUTS_IN_WORDS
from monetlite.core.schedule import Schedule
from monetlite.core.simulate import Timeline
from monetlite.core.units import format_bytes, format_ms
from monetlite.planning.batches import BatchLimit
from monetlite.planning.pipeline import unplanned_loss
from monetlite.reporting.analysis import budget_in_words
from monetlite.reporting.text_tables import facts_table, figures_table

if TYPE_CHECKING:
    from monetlite.planning.tradeoff import Tradeoff  # imports the search

CLOSE, SLOW = 1.25, 1.0
"""Budget over the smallest that was reached, and overhead, up to and from which more memory is advised."""
_TOLD = (
    "operators fingerprint device optimizer accumulate step_in_backward tolerance layout autocast budget_bytes "
    "peak_bytes reserved_bytes latency_ms plain_peak_bytes plain_latency_ms overhead lower_bound_ms gap status "
    "smallest_proven_bytes smallest_reached_bytes solver seconds"
)


def schedule_facts(schedule: Schedule, output: str | None = None) -> dict[str, Any]:
    """The figures of a schedule, for `--json`: bytes, milliseconds, and fractions."""
    return {
        "model": schedule.name,
        "costs": schedule.kind,
        **{name: getattr(schedule, name) for name in _TOLD.split()},
        "stored_values": len(schedule.choices.stored),
        "extra_runs": _extra_runs(schedule),
        "output": output,
    }


def print_schedule(console: Console, profile: Profile, schedule: Schedule, timeline: Timeline, output: str) -> None:
    """Print the figures of a solved schedule."""
    graph = profile.graph
    peak_operator = graph.operators[timeline.steps[timeline.peak_step][0]].name
    resident = graph.resident
    always = {
        "weights": resident.parameters,
        "buffers": resident.buffers,
        "inputs": resident.inputs,
        f"{schedule.optimizer} state": resident.optimizer,
        "gradients of earlier batches": resident.gradients,
        "cuBLAS workspaces": resident.libraries,
    }
    kept = ", ".join(
        f"{format_bytes(size_bytes)} {name}"
        for name, size_bytes in always.items()
        if size_bytes or name in ("weights", "inputs")
    )
    autocast = f", under autocast to {schedule.autocast}" if schedule.autocast else ""
    reserved = reserved_facts(profile, schedule)
    outside = unplanned_loss(graph, schedule.budget_bytes)
    words = LAYOUTS_IN_WORDS[schedule.layout]
    layout = f", {words}" if words else ""
    rows = [
        (
            "graph",
            f"{len(graph.traced)} operators, {len(graph.values)} values{autocast}; always in memory: {kept}",
        ),
        ("costs", cost_source(schedule)),
        *schedule_rows(schedule, f" (at {peak_operator})"),
        *(_gpu_rows(schedule, reserved) if reserved else []),
        *([("the loss", outside)] if outside else []),
        overhead_row(schedule),
        ("implementations", f"{_other_ways(schedule)} runs not by the default one; {exactness(schedule)}{layout}"),
        (
            "bound",
            f"no schedule within the budget is faster than {format_ms(schedule.lower_bound_ms)} "
            f"(gap {schedule.gap:.1%}, {schedule.status})",
        ),
        ("smallest budget", smallest_budget(schedule)),
        ("solved", f"in {schedule.seconds:.1f} s by {schedule.solver}"),
        ("written", output),
    ]
    console.print(facts_table(rows))


def schedule_rows(schedule: Schedule, peak_note: str = "") -> list[tuple[str, str]]:
    """Peak and step time of plain training and of a schedule, in words."""
    return [
        (
            "plain training",
            f"peak {format_bytes(schedule.plain_peak_bytes)}, step {format_ms(schedule.plain_latency_ms)}",
        ),
        (
            "schedule",
            f"peak {format_bytes(schedule.peak_bytes)} of {budget_in_words(schedule)}{peak_note}, "
            f"step {format_ms(schedule.latency_ms)}",
        ),
    ]


def overhead_row(schedule: Schedule) -> tuple[str, str]:
    stored = len(schedule.choices.stored)
    return (
        "overhead",
        f"{schedule.overhead:+.1%} step time; {stored} values stored, {_extra_runs(schedule)} runs beyond the "
        "forward pass",
    )


def exactness(schedule: Schedule) -> str:
    return "the same bits as the captured step" if not schedule.tolerance else f"within {schedule.tolerance:g}"


def _extra_runs(schedule: Schedule) -> int:
    return sum(map(len, schedule.choices.before.values()))


def smallest_budget(schedule: Schedule) -> str:
    """The smallest feasible budget, as far as it is known, and a word on what a budget close to it costs."""
    reached_bytes = schedule.smallest_reached_bytes
    close = reached_bytes and schedule.budget_bytes < CLOSE * reached_bytes and schedule.overhead > SLOW
    advice = "; this close to it, a little more memory may save much time" if close else ""
    return smallest_in_words(schedule) + advice


def smallest_in_words(found: "Schedule | Tradeoff") -> str:
    """The smallest feasible budget, as far as it is known."""
    reached_bytes, proven_bytes = found.smallest_reached_bytes, found.smallest_proven_bytes
    if reached_bytes is None:
        return f"at least {format_bytes(proven_bytes)}"
    if reached_bytes <= proven_bytes:
        return f"{format_bytes(reached_bytes)} (proven)"
    return f"between {format_bytes(proven_bytes)} (proven) and {format_bytes(reached_bytes)} (reached)"


def reserved_facts(profile: Profile, schedule: Schedule) -> dict[str, int] | None:
    """Predicted reserved memory of a schedule, in bytes; None for costs of a CPU.

    By the allocator's default settings, with expandable segments, and the least that it can be limited to. For a
    schedule that was solved for reserved memory also the number of times in a step that it gives memory back to the
    GPU, limited to the budget.
    """
    if profile.device == "cpu":
        return None
    limited = {}
    if schedule.reserved_bytes is not None:
        within = reserve(profile, schedule, expandable=True, limit_bytes=schedule.budget_bytes)
        limited = {"releases": within.releases}
    return limited | {
        "default_bytes": reserve(profile, schedule, expandable=False).peak_bytes,
        "expandable_bytes": reserve(profile, schedule, expandable=True).peak_bytes,
        "least_limit_bytes": least_limit(profile, schedule),
    }


def _gpu_rows(schedule: Schedule, found: Mapping[str, int]) -> list[tuple[str, str]]:
    """Memory of a schedule as tensors, the allocator and nvidia-smi count it."""
    shown_bytes = found["default_bytes" if schedule.reserved_bytes is None else "least_limit_bytes"] + CONTEXT_BYTES
    return [
        ("of tensors", f"{format_bytes(schedule.peak_bytes)}, {cost_source(schedule)}"),
        ("of the allocator", f"{reserved_in_words(schedule, found)}; computed, not measured"),
        (
            "of nvidia-smi",
            f"about {format_bytes(shown_bytes)}: reserved memory, and a CUDA context of some "
            f"{format_bytes(CONTEXT_BYTES)} (a guess; monetlite measure shows it)",
        ),
    ]


def reserved_in_words(schedule: Schedule, found: Mapping[str, int]) -> str:
    default, least = (format_bytes(found[name]) for name in ("default_bytes", "least_limit_bytes"))
    if schedule.reserved_bytes is None:
        # A limit goes with expandable segments, whose pages are large beside a small step.
        smaller = f", {least} at least" if found["least_limit_bytes"] < found["default_bytes"] else ""
        return f"{default} reserved by torch's default settings{smaller}; --reserved keeps it in the budget"
    budget = f"monetlite.limit_reserved({schedule.budget_bytes})"
    back = f", and gives free pages back {found['releases']}× a step" if found["releases"] else ""
    return f"{least} reserved is enough, in a script that calls {budget}{back}; {default} otherwise"


def _other_ways(schedule: Schedule) -> int:
    """Number of runs that are not by an operator's default implementation."""
    again = sum(how != DEFAULT for runs in schedule.choices.before.values() for _, how in runs)
    return len(schedule.choices.implementations) + again


def batches_facts(found: BatchLimit) -> dict[str, Any]:
    """The figures for `--json`: bytes, milliseconds, samples per second."""
    profile = found.profile
    told = "batch peak_bytes reserved_bytes latency_ms samples_per_s overhead"
    return {
        "model": profile.graph.name,
        "device": profile.device,
        "costs": str(profile.kind),
        "budget_bytes": found.budget_bytes,
        "reserved": found.reserved,
        "largest": found.largest,
        "plain_largest": found.plain_largest,
        "multiple_of": found.step,
        "proven_impossible": found.proven_impossible,
        "points": [
            {name: getattr(point, name) for name in told.split()} | {"scheduled": point.schedule is not None}
            for point in found.points
        ],
    }


def print_batches(console: Console, found: BatchLimit, command: str) -> None:
    """The largest batch, a table of those on the way, and the command that solves for it."""
    profile, name = found.profile, found.profile.graph.name
    budget = format_bytes(found.budget_bytes)
    plain = f"plain training: {found.plain_largest}" if found.plain_largest else "plain training fits none"
    if found.step > 1:
        plain += f"; multiples of {found.step}"
    of = f"{budget} of reserved memory" if found.reserved else budget
    console.print(f"{name} within {of}: batch {found.largest} ({plain})", style="bold", markup=False)
    reserved = ("reserved",) if found.reserved else ()
    rows = [
        (
            str(point.batch),
            "plain" if point.schedule is None else "scheduled",
            format_bytes(point.peak_bytes),
            *([] if point.reserved_bytes is None else [format_bytes(point.reserved_bytes)]),
            format_ms(point.latency_ms),
            format_rate(point.samples_per_s),
            "" if point.schedule is None else f"{point.overhead:+.1%}",
        )
        for point in found.points
    ]
    columns = ("batch", "how", "peak", *reserved, "step", "samples/s", "overhead")
    console.print(figures_table(columns, rows, left=("how",)))
    console.print(
        f"\n{_beyond(found)} Costs are {cost_source(profile)}. To train at one of these:\n{command}",
        style="dim",
        markup=False,
        soft_wrap=True,
    )


def _beyond(found: BatchLimit) -> str:
    """The batches beyond the largest, in words: for which none was found, and which are proven not to fit."""
    after, impossible = found.largest + found.step, found.proven_impossible
    if impossible == after:
        return f"No schedule fits a batch of {after} (proven)."
    if impossible is None:
        return f"No schedule was found for a batch of {after}."
    last = impossible - found.step
    between = f"a batch of {after}" if last == after else f"batches of {after} to {last}"
    return f"No schedule was found for {between}; none fits {impossible} (proven)."


def format_rate(samples_per_s: float) -> str:
    return f"{samples_per_s:.3g}" if samples_per_s < 999.5 else f"{samples_per_s:.0f}"
