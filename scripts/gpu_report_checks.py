"""Checks of one way to train: what was measured, and what is held against it."""

from gpu_report_models import SUBJECTS
from gpu_report_rows import Row

from monetlite.checking.comparison.peer_runs import PeerRun
from monetlite.core.schedule import Schedule
from monetlite.core.units import parse_budget

PEAK_WITHIN, RESERVED_WITHIN, LATENCY_WITHIN = 0.02, 0.03, 0.05
"""How far measured figures may be from predicted ones, and reserved memory below the limit, of those."""
SAME_GRADIENTS, REPEATED = 1e-5, 10
"""How far gradients may be where a schedule makes the same bits: that share, or so many times what two plain steps are
apart, whose kernels may add up in no fixed order.
"""


def checked(run: PeerRun, plain: PeerRun, promised: tuple[str, Schedule] | None, of_model: tuple[str, bool]) -> Row:
    """One way to train: what was measured, and what is held against it."""
    plain_ms = plain.step_ms
    found: Row = {
        "failure": run.failure,
        "peak_bytes": run.peak_bytes,
        "reserved_bytes": run.reserved_bytes,
        "releases": run.releases,
        "times_ms": list(run.times_ms),
        "step_ms": run.step_ms if run.times_ms else None,
        "plain_times_ms": list(plain.times_ms),
        "overhead": run.step_ms / plain_ms - 1 if run.times_ms and plain_ms < float("inf") else None,
        "gradient_difference": run.gradient_difference,
        "faults": list(run.faults),
        "checks": [],
    }
    if promised is None:
        return found
    (name, small), (budget, schedule) = of_model, promised
    subject = SUBJECTS[name]
    budget_bytes = parse_budget(budget, schedule.plain_peak_bytes)
    found |= {
        "budget": budget,
        "published": None if small else dict(zip(subject.budgets, subject.published, strict=False)).get(budget),
        "solved_for_bytes": schedule.budget_bytes,
        "predicted_peak_bytes": schedule.peak_bytes,
        "predicted_ms": schedule.latency_ms,
        "predicted_overhead": schedule.overhead,
        "predicted_plain_ms": schedule.plain_latency_ms,
        "predicted_plain_peak_bytes": schedule.plain_peak_bytes,
        "gap": schedule.gap,
        "costs": f"{schedule.kind} on {schedule.environment.get('device', schedule.device)}",
    }

    def check(what: str, value: float | None, most: float) -> None:
        passed = value is not None and value <= most
        found["checks"].append({"what": what, "value": value, "most": most, "passed": passed})

    check("runs, and trains as plain PyTorch does", float(bool(run.failure or run.faults)), 0.0)
    if not run.failure:
        if schedule.tolerance == 0 and run.gradient_difference is not None:
            most = max(SAME_GRADIENTS, REPEATED * (plain.gradient_difference or 0.0))
            check("gradients off by", run.gradient_difference, most)
        check("peak within the budget, bytes", run.peak_bytes, budget_bytes)
        if run.reserved_bytes is not None and schedule.reserved_bytes is not None:
            check(
                "reserved within 3% of the limit, bytes", run.reserved_bytes, budget_bytes * (1 + RESERVED_WITHIN)
            )
        check("predicted peak off by", abs((run.peak_bytes or 0) / schedule.peak_bytes - 1), PEAK_WITHIN)
        if schedule.kind == "measured":
            check("predicted step time off by", abs(run.step_ms / schedule.latency_ms - 1), LATENCY_WITHIN)
            if plain.times_ms:
                off = abs(plain.step_ms / schedule.plain_latency_ms - 1)
                check("predicted plain step time off by", off, LATENCY_WITHIN)
    return found
