"""What `monetlite solve` prints: the figures people decide by."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from monetlite.allocator import least_limit, reserve
from monetlite.core.choices import DEFAULT
from monetlite.core.costs import Profile
from monetlite.core.graph import CHANNELS_LAST
from monetlite.core.schedule import Schedule
from monetlite.core.simulate import Timeline
from monetlite.core.units import format_bytes, format_ms
from monetlite.planning.pipeline import unplanned_loss


def cost_source(device: str, kind: str, environment: Mapping[str, str]) -> str:
    """Where costs come from, in words: `estimated for a100-40gb` or `measured on NAME`."""
    if kind == "estimated":
        return f"estimated for {device}"
    return f"measured on {environment.get('device', device)}"


def schedule_facts(schedule: Schedule, output: str | None = None) -> dict[str, Any]:
    """The figures of a schedule, for `--json`: bytes, milliseconds, and fractions."""
    return {
        "model": schedule.name,
        "operators": schedule.operators,
        "fingerprint": schedule.fingerprint,
        "costs": schedule.kind,
        "device": schedule.device,
        "optimizer": schedule.optimizer,
        "accumulate": schedule.accumulate,
        "tolerance": schedule.tolerance,
        "layout": schedule.layout,
        "autocast": schedule.autocast,
        "budget_bytes": schedule.budget_bytes,
        "peak_bytes": schedule.peak_bytes,
        "reserved_bytes": schedule.reserved_bytes,
        "latency_ms": schedule.latency_ms,
        "plain_peak_bytes": schedule.plain_peak_bytes,
        "plain_latency_ms": schedule.plain_latency_ms,
        "overhead": schedule.overhead,
        "lower_bound_ms": schedule.lower_bound_ms,
        "gap": schedule.gap,
        "status": str(schedule.status),
        "smallest_proven_bytes": schedule.smallest_proven_bytes,
        "smallest_reached_bytes": schedule.smallest_reached_bytes,
        "stored_values": len(schedule.choices.stored),
        "recomputed_runs": sum(len(runs) for runs in schedule.choices.before.values()),
        "solver": schedule.solver,
        "seconds": schedule.seconds,
        "output": output,
    }


def print_schedule(console: Console, profile: Profile, schedule: Schedule, timeline: Timeline, output: str) -> None:
    """Print what a solve found."""
    graph = profile.graph
    source = cost_source(schedule.device, schedule.kind, schedule.environment)
    peak_operator = graph.operators[timeline.steps[timeline.peak_step][0]].name
    resident = graph.resident
    kept = [f"{format_bytes(resident.parameters)} weights", f"{format_bytes(resident.inputs)} inputs"]
    if resident.buffers:
        kept.insert(1, f"{format_bytes(resident.buffers)} buffers")
    if resident.optimizer:
        kept.append(f"{format_bytes(resident.optimizer)} {schedule.optimizer} state")
    autocast = f", under autocast to {schedule.autocast}" if schedule.autocast else ""
    if resident.gradients:
        kept.append(f"{format_bytes(resident.gradients)} gradients of earlier batches")
    if resident.libraries:
        kept.append(f"{format_bytes(resident.libraries)} cuBLAS workspaces")
    reached = schedule.smallest_reached_bytes
    smallest = f"at least {format_bytes(schedule.smallest_proven_bytes)}"
    if reached is not None and reached <= schedule.smallest_proven_bytes:
        smallest = f"{format_bytes(reached)} (proven)"
    elif reached is not None:
        smallest = f"{format_bytes(reached)} reached, {format_bytes(schedule.smallest_proven_bytes)} proven"
    runs = sum(len(runs) for runs in schedule.choices.before.values())

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row(
        "graph",
        f"{graph.traced_count} operators, {len(graph.values)} values{autocast}; always in memory: "
        + ", ".join(kept),
    )
    table.add_row("costs", source)
    table.add_row(
        "plain training",
        f"peak {format_bytes(schedule.plain_peak_bytes)}, step {format_ms(schedule.plain_latency_ms)}",
    )
    table.add_row(
        "schedule",
        f"peak {format_bytes(schedule.peak_bytes)} of {format_bytes(schedule.budget_bytes)} (at {peak_operator}), "
        f"step {format_ms(schedule.latency_ms)}",
    )
    if found := reserved_facts(profile, schedule):
        table.add_row("on the GPU", _reserved(schedule, found))
    if outside := unplanned_loss(graph, schedule.budget_bytes):
        table.add_row("the loss", outside)
    table.add_row(
        "overhead",
        f"{schedule.overhead:+.1%} step time; {len(schedule.choices.stored)} values stored, "
        f"{runs} runs beyond the forward pass",
    )
    layout = ", images in channels-last" if schedule.layout == CHANNELS_LAST else ""
    exact = "the same bits as the captured step" if not schedule.tolerance else f"within {schedule.tolerance:g}"
    table.add_row("implementations", f"{_other_ways(schedule)} runs not by the default one; {exact}{layout}")
    table.add_row(
        "bound",
        f"no schedule within the budget is faster than {format_ms(schedule.lower_bound_ms)} "
        f"(gap {schedule.gap:.1%}, {schedule.status})",
    )
    table.add_row("smallest budget", smallest)
    table.add_row("solved", f"in {schedule.seconds:.1f} s by {schedule.solver}")
    table.add_row("written", output)
    console.print(table)


def reserved_facts(profile: Profile, schedule: Schedule) -> dict[str, int] | None:
    """What torch's CUDA allocator takes from the GPU for a schedule, predicted, in bytes; None for costs of a CPU.

    By its default settings, with expandable segments, and the least that it can be limited to. For a schedule that
    was solved for reserved memory also how often in a step it gives memory back to the GPU, limited to the budget.
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


def _reserved(schedule: Schedule, found: Mapping[str, int]) -> str:
    default, least = (format_bytes(found[name]) for name in ("default_bytes", "least_limit_bytes"))
    if schedule.reserved_bytes is None:
        # A limit goes with expandable segments, whose pages are large beside a small step.
        smaller = f", {least} at least" if found["least_limit_bytes"] < found["default_bytes"] else ""
        return f"{default} reserved by torch's default settings{smaller}; --reserved keeps it in the budget"
    budget = f"monetlite.limit_reserved({schedule.budget_bytes})"
    back = f", and gives free pages back {found['releases']}× a step" if found["releases"] else ""
    return f"{least} reserved is enough, in a script that calls {budget}{back}; {default} otherwise"


def _other_ways(schedule: Schedule) -> int:
    """How many runs are not by an operator's default implementation."""
    again = sum(how != DEFAULT for runs in schedule.choices.before.values() for _, how in runs)
    return len(schedule.choices.implementations) + again
