"""Measure how long the solver takes to be useful as graphs grow, and write a dated report.

    python scripts/bench_scaling.py --layers 13 64 140 280 --chains 1000
    python scripts/bench_scaling.py --layers --chains --profiles gpt2-xl.json llama-1b.json --shares 0.8 0.6 0.4

Made-up transformers and chains (`synthetic_steps`) of up to 10,000 operators, or profiles that `monetlite measure
--operators` wrote, with exact implementations, at shares of what plain training needs beyond weights. It says the
seconds until the first schedule that fits, until one as fast as the best baseline (checkpointing of every module,
every second, every fourth, ...; greedy dropping), until one within 1% of what is found in the end, and the memory
that solving takes. Each is solved in a process of its own.
"""

import argparse
import itertools
import json
import math
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench_solver import commit, hardware
from synthetic_steps import chain_step, transformer_step

from monetlite.core.costs import Profile, load_profile
from monetlite.core.errors import IllegalSchedule
from monetlite.core.options import SolvingOptions
from monetlite.core.simulate import simulate
from monetlite.core.steps import plain_steps
from monetlite.solving import baselines, solve_profile
from monetlite.solving.annealing.flat_problem import flatten
from monetlite.solving.annealing.greedy import Greedy
from monetlite.solving.incumbent import Solution
from monetlite.solving.problem import Problem

MADE_UP: dict[str, Callable[[int], Profile]] = {"transformer": transformer_step, "chain": chain_step}


def point(kind: str, what: int | Path, share: float, time_limit: float, seed: int) -> dict[str, Any]:
    """Solve one graph; times are seconds after the solve began."""
    profile = load_profile(what).within(0.0) if isinstance(what, Path) else MADE_UP[kind](what)
    plain = simulate(profile, plain_steps(profile.graph))
    resident_bytes = profile.graph.resident.total
    budget_bytes = int(resident_bytes + share * (plain.peak_bytes - resident_bytes))
    best_baseline_ms = math.inf
    for steps in (
        baselines.segment_checkpointing(profile),
        *baselines.checkpointing_settings(profile),
        Greedy(flatten(Problem.of(profile)), budget_bytes).best(),
    ):
        try:
            if steps is not None:
                best_baseline_ms = min(best_baseline_ms, simulate(profile, steps, budget_bytes).latency_ms)
        except IllegalSchedule:
            continue
    history: list[tuple[float, float]] = []

    def note(state: Solution) -> None:
        if state.latency_ms is not None and (not history or state.latency_ms < history[-1][1]):
            history.append((state.seconds, state.latency_ms))

    began = time.monotonic()
    solution = solve_profile(profile, budget_bytes, SolvingOptions(time_limit=time_limit, seed=seed), progress=note)
    seconds = time.monotonic() - began
    final_ms = math.inf if solution.latency_ms is None else solution.latency_ms

    def until(latency_ms: float) -> float | None:
        return next((round(at, 2) for at, reached_ms in history if reached_ms <= latency_ms * (1 + 1e-9)), None)

    return {
        "graph": what.stem if isinstance(what, Path) else profile.graph.name,
        "share": share,
        "budget": f"{budget_bytes / 1e9:.3g} GB",
        "operators": len(profile.graph.operators),
        "status": str(solution.status),
        "first_s": until(math.inf),
        "baseline_s": until(best_baseline_ms),
        "within_1_percent_s": until(1.01 * final_ms),
        "seconds": round(seconds, 1),
        "overhead": None if solution.latency_ms is None else final_ms / plain.latency_ms - 1,
        "best_baseline": best_baseline_ms / plain.latency_ms - 1 if math.isfinite(best_baseline_ms) else None,
        "gap": None if solution.latency_ms is None else 1 - solution.lower_bound_ms / final_ms,
        "memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 2**30,
    }


def growth(points: list[dict[str, Any]], key: str) -> float | None:
    """The exponent p of seconds ~ operators^p, by least squares on logarithms."""
    pairs = [(math.log(p["operators"]), math.log(max(p[key], 0.01))) for p in points if p[key] is not None]
    if len(pairs) < 3:
        return None
    mean_x, mean_y = (sum(column) / len(pairs) for column in zip(*pairs, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in pairs)
    return sum((x - mean_x) * (y - mean_y) for x, y in pairs) / spread if spread > 0 else None


def table(points: list[dict[str, Any]]) -> str:
    """The points as a markdown table."""
    heading = [
        "graph",
        "budget",
        "operators",
        "first, s",
        "as good as baselines, s",
        "within 1% of the end, s",
        "in all, s",
        "overhead",
        "best baseline",
        "gap",
        "memory, GiB",
    ]
    lines = ["| " + " | ".join(heading) + " |", "|" + " --- |" * len(heading)]
    for item in points:
        cells = [item["graph"], f"{item['share']:.0%}, {item['budget']}", str(item["operators"])]
        cells += [
            "never" if item[key] is None else f"{item[key]:.2f}"
            for key in ("first_s", "baseline_s", "within_1_percent_s", "seconds")
        ]
        cells += [
            "nothing fits" if item[key] is None else f"{item[key]:.2%}"
            for key in ("overhead", "best_baseline", "gap")
        ]
        lines.append("| " + " | ".join([*cells, f"{item['memory_gib']:.2f}"]) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="*", default=[13, 64, 140, 280])
    parser.add_argument("--chains", type=int, nargs="*", default=[1000], help="lengths of chains to solve as well")
    parser.add_argument(
        "--profiles", type=Path, nargs="*", default=[], help="files of measured graphs to solve as well"
    )
    parser.add_argument(
        "--shares", type=float, nargs="+", default=[0.5], help="of what plain training needs beyond weights"
    )
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds for each graph (default 30)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("docs/benchmarks"), help="folder for the report")
    arguments = parser.parse_args()
    graphs: list[tuple[str, int | Path]] = [("transformer", layers) for layers in arguments.layers]
    graphs += [("chain", length) for length in arguments.chains]
    graphs += [("measured", file) for file in arguments.profiles]
    context = multiprocessing.get_context("spawn")
    points: list[dict[str, Any]] = []
    for (kind, what), share in itertools.product(graphs, arguments.shares):
        with context.Pool(1) as pool:
            parameters = (kind, what, share, arguments.time_limit, arguments.seed)
            points.append(pool.apply(point, parameters))
        sys.stderr.write(f"{points[-1]}\n")
    now = datetime.now(UTC)
    about = {
        "date": now.isoformat(timespec="seconds"),
        "hardware": hardware(),
        "commit": commit(),
        "time limit, seconds": arguments.time_limit,
        "budget": "what is resident, and a share of the rest of plain training's peak",
    }
    transformers = [item for item in points if item["graph"].startswith("transformer")]
    for key, words in (("first_s", "first schedule"), ("within_1_percent_s", "within 1% of the end")):
        exponent = growth(transformers, key)
        if exponent is not None:
            about[f"growth, seconds until {words}"] = f"operators to the power of {exponent:.2f}"
    arguments.output.mkdir(parents=True, exist_ok=True)
    stem = arguments.output / f"scaling_{now:%Y-%m-%d}"
    stem.with_suffix(".json").write_text(json.dumps({**about, "points": points}, indent=1), encoding="utf-8")
    lines = [f"# Solve time against operators, {now:%Y-%m-%d}", ""]
    lines += [f"- {key}: {value}" for key, value in about.items()]
    lines += ["", table(points), ""]
    stem.with_suffix(".md").write_text("\n".join(lines), encoding="utf-8")
    sys.stdout.write(f"{stem.with_suffix('.md')}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
