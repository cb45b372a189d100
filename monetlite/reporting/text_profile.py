"""The text of `monetlite profile`: the time and the memory of a step, by operator."""

from collections import Counter, defaultdict
from typing import Any

from rich.console import Console

from monetlite.core.costs import Profile
from monetlite.core.simulate import simulate
from monetlite.core.steps import plain_steps
from monetlite.core.units import format_bytes, format_ms
from monetlite.reporting.analysis import StepAnalysis, cost_source
from monetlite.reporting.text_tables import figures_table

MAX_FAMILIES = 10
_TOLD = "name family phase optional derived rerunnable source"


def profile_facts(profile: Profile) -> dict[str, Any]:
    """A profile as data: every implementation of every operator, in bytes and milliseconds."""
    graph = profile.graph
    plain = simulate(profile, plain_steps(graph))
    return {
        "model": graph.name,
        "fingerprint": graph.fingerprint,
        "costs": str(profile.kind),
        "device": profile.device,
        "environment": dict(profile.environment),
        "plain_peak_bytes": plain.peak_bytes,
        "plain_latency_ms": plain.latency_ms,
        "operators": [
            {
                **{name: getattr(operator, name) for name in _TOLD.split()},
                "writes_bytes": sum(graph.values[value].size_bytes for value in operator.writes),
                "implementations": [
                    {
                        "name": item.name,
                        "tolerance": item.tolerance,
                        "latency_ms": cost.latency_ms,
                        "workspace_bytes": cost.workspace_bytes,
                        "reads": [graph.values[value].name for value in item.reads],
                        "overwrites": [graph.values[value].name for value in item.overwrites],
                    }
                    for item, cost in zip(operator.implementations, costs, strict=True)
                ],
            }
            for operator, costs in zip(graph.operators, profile.costs, strict=True)
        ],
    }


def print_profile(console: Console, profile: Profile, top: int) -> None:
    """Print the step's totals, its operator families, and its most expensive operators."""
    graph = profile.graph
    plain = StepAnalysis(profile=profile, timeline=simulate(profile, plain_steps(graph)))
    console.print(
        f"{graph.traced_count} operators, costs {cost_source(profile)}; plain training: step "
        f"{format_ms(plain.latency_ms)}, peak {format_bytes(plain.peak_bytes)} at {plain.peak_operator}"
    )
    default = [
        (operator, costs[0])
        for operator, costs in zip(graph.operators, profile.costs, strict=True)
        if not operator.derived
    ]
    totals: defaultdict[str, float] = defaultdict(float)
    for operator, cost in default:
        totals[operator.family] += cost.latency_ms
    counts = Counter(operator.family for operator in graph.operators)
    families = [
        (
            family,
            str(counts[family]),
            format_ms(latency_ms),
            f"{latency_ms / plain.latency_ms if plain.latency_ms else 0.0:.1%}",
        )
        for family, latency_ms in sorted(totals.items(), key=lambda item: -item[1])[:MAX_FAMILIES]
    ]
    heads = ("family", "operators", "latency", "share")
    console.print(figures_table(heads, families, left=("family",), title="by family"))
    operators = [
        (
            operator.name,
            format_ms(cost.latency_ms),
            format_bytes(cost.workspace_bytes),
            format_bytes(sum(graph.values[value].size_bytes for value in operator.writes)),
            str(len(operator.implementations)),
        )
        for operator, cost in sorted(default, key=lambda item: -item[1].latency_ms)[:top]
    ]
    columns = ("operator", "latency", "workspace", "writes", "ways")
    console.print(figures_table(columns, operators, left=("operator",), title="most expensive operators"))
