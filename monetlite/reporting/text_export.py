"""The text of `monetlite export`."""

from rich.console import Console

from monetlite.core.schedule import Schedule
from monetlite.core.units import format_bytes, format_ms
from monetlite.exporting.exported_plan import ExportedPlan
from monetlite.exporting.plan_file import saved_results
from monetlite.reporting.text_tables import figures_table


def print_exported(console: Console, exported: ExportedPlan, schedule: Schedule, output: str) -> None:
    """Print the figures of an exported plan beside those of the schedule and of plain training."""
    found, plain, every = exported.found, exported.plain, exported.every
    rows = [
        ("this plan", found.peak_bytes, found.latency_ms),
        ("the schedule, run by monetlite", schedule.peak_bytes, schedule.latency_ms),
        ("every layer checkpointed", every.peak_bytes, every.latency_ms),
        ("plain training", plain.peak_bytes, plain.latency_ms),
    ]
    cells = [
        (name, format_bytes(peak_bytes), format_ms(ms), f"{ms / plain.latency_ms - 1:+.1%}")
        for name, peak_bytes, ms in rows
    ]
    console.print(figures_table(("", "peak", "step", "over plain"), cells))
    console.print(
        f"{len(found.plan)} of {len(exported.step.blocks)} layers are wrapped, with {saved_results(found)} saved "
        f"in them, within {format_bytes(exported.budget_bytes)}",
        markup=False,
        soft_wrap=True,
    )
    console.print(f"plan written to {output}", markup=False, soft_wrap=True)
