"""What `monetlite profile` prints: where the time and the memory of a step go."""

from collections import Counter, defaultdict
from typing import Any

from rich.console import Console
from rich.table import Table

from monetlite.core.costs import Profile
from monetlite.core.simulate import simulate
from monetlite.core.steps import plain_steps
from monetlite.core.units import format_bytes, format_ms
from monetlite.reporting.text_solve import cost_source


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
                "name": operator.name,
                "family": operator.family,
                "phase": str(operator.phase),
                "optional": operator.optional,
                "derived": operator.derived,
                "rerunnable": operator.rerunnable,
                "source": operator.source,
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
    plain = simulate(profile, plain_steps(graph))
    source = cost_source(profile.device, profile.kind, profile.environment)
    peak = graph.operators[plain.steps[plain.peak_step][0]].name
    console.print(
        f"{graph.traced_count} operators, costs {source}; plain training: step "
        f"{format_ms(plain.latency_ms)}, peak {format_bytes(plain.peak_bytes)} at {peak}"
    )
    totals: defaultdict[str, float] = defaultdict(float)
    for operator, costs in zip(graph.operators, profile.costs, strict=True):
        if not operator.derived:
            totals[operator.family] += costs[0].latency_ms
    families = Table(title="by family", title_justify="left", box=None, pad_edge=False)
    families.add_column("family")
    families.add_column("operators", justify="right")
    families.add_column("latency", justify="right")
    families.add_column("share", justify="right")
    counts = Counter(operator.family for operator in graph.operators)
    for family, latency_ms in sorted(totals.items(), key=lambda item: -item[1])[:10]:
        share = latency_ms / plain.latency_ms if plain.latency_ms else 0.0
        families.add_row(family, str(counts[family]), format_ms(latency_ms), f"{share:.1%}")
    console.print(families)
    table = Table(title="most expensive operators", title_justify="left", box=None, pad_edge=False)
    table.add_column("operator", overflow="fold")
    table.add_column("latency", justify="right", no_wrap=True)
    table.add_column("workspace", justify="right", no_wrap=True)
    table.add_column("writes", justify="right", no_wrap=True)
    table.add_column("ways", justify="right")
    traced = [index for index, operator in enumerate(graph.operators) if not operator.derived]
    order = sorted(traced, key=lambda index: -profile.costs[index][0].latency_ms)
    for index in order[:top]:
        operator, cost = graph.operators[index], profile.costs[index][0]
        written = sum(graph.values[value].size_bytes for value in operator.writes)
        table.add_row(
            operator.name,
            format_ms(cost.latency_ms),
            format_bytes(cost.workspace_bytes),
            format_bytes(written),
            str(len(operator.implementations)),
        )
    console.print(table)
