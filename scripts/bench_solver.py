"""Measure the solver on the published instances, beside what was published, and write a dated report.

    python scripts/bench_solver.py INSTANCES_FOLDER --judge check_schedule.py --seeds 0 1

The folder holds NAME.json instances and published.json ({name: {budget in GiB: [objective, bound]}}). Every
schedule is checked by the judge, a script that is told the instance, the schedule and the budget. Objectives
are in the instance's latency unit. Baselines are solved once for each point; they store, recompute and
compress as they do, and run each step with the fastest algorithm that fits of those that differ in nothing else.
"""

import argparse
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from instances import instance_profile
from solve_instance import GIB, instance_steps

from monetlite.core.choices import Choices
from monetlite.core.costs import Profile
from monetlite.core.errors import IllegalSchedule
from monetlite.core.graph import Implementation
from monetlite.core.options import SolvingOptions
from monetlite.core.simulate import simulate
from monetlite.core.steps import Step, plain_steps
from monetlite.solving import baselines, solve_profile
from monetlite.solving.annealing.flat_problem import flatten
from monetlite.solving.annealing.greedy import Greedy
from monetlite.solving.annealing.search import search
from monetlite.solving.incumbent import Incumbent
from monetlite.solving.problem import Problem


def judged(judge: Path, instance: Path, steps: list[tuple[Any, str]], budget_gib: float) -> float:
    """The objective that the judge computes; RuntimeError with its words if it refuses the schedule."""
    with tempfile.TemporaryDirectory() as folder:
        schedule = Path(folder) / "schedule.json"
        schedule.write_text(json.dumps({"steps": steps}), encoding="utf-8")
        command = [sys.executable, str(judge), str(instance), str(schedule), "--budget-gib", str(budget_gib)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.search(r"latency=([0-9.e+-]+)", done.stdout)
    if done.returncode != 0 or found is None:
        raise RuntimeError(f"{instance.name} at {budget_gib} GiB: {done.stdout.strip()} {done.stderr.strip()}")
    return float(found[1])


def same_values(one: Implementation, other: Implementation) -> bool:
    """True if two implementations read, write and overwrite the same."""
    return (set(one.reads), one.writes, one.overwrites) == (set(other.reads), other.writes, other.overwrites)


def with_algorithms(restricted: Profile, profile: Profile) -> Profile:
    """A restricted profile, and what differs from the defaults in nothing but its algorithm."""
    offered = {id(item) for operator in restricted.graph.operators for item in operator.implementations}
    for operator in profile.graph.operators:
        default = operator.implementations[0]
        offered |= {id(item) for item in operator.implementations if same_values(default, item)}
    both = profile.restricted(lambda item: id(item) in offered)
    pairs = zip(both.graph.operators, restricted.graph.operators, strict=True)
    operators = tuple(replace(operator, rerunnable=limited.rerunnable) for operator, limited in pairs)
    return replace(both, graph=replace(both.graph, operators=operators))


def with_fitting_algorithms(profile: Profile, steps: Sequence[Step], budget_bytes: int) -> tuple[Step, ...]:
    """The same steps, each with the fastest implementation that fits of those that differ in nothing else."""
    memory_bytes = simulate(profile, steps).memory_bytes
    ran: set[int] = set()
    chosen: list[Step] = []
    for at, (operator, choice) in enumerate(steps):
        costs = [cost.of_run(again=operator in ran) for cost in profile.costs[operator]]
        implementations = profile.graph.operators[operator].implementations
        ran.add(operator)

        room_bytes = budget_bytes - memory_bytes[at] + costs[choice][1]
        same = [
            (max(0, costs[other][1] - room_bytes), costs[other][0], other)
            for other in range(len(costs))
            if same_values(implementations[choice], implementations[other])
        ]
        chosen.append((operator, min(same)[2]))
    return tuple(chosen)


def baseline_objectives(
    profile: Profile, budget_bytes: int, seconds: float, unit_ms: float
) -> dict[str, float | None]:
    """What each baseline reaches within the budget; None where nothing that fits was found."""

    def fits(steps: tuple[Step, ...] | None) -> float | None:
        try:
            if steps is None:
                return None
            steps = with_fitting_algorithms(profile, steps, budget_bytes)
            return simulate(profile, steps, budget_bytes).latency_ms / unit_ms
        except IllegalSchedule:
            return None

    objectives = {
        "store all": fits(plain_steps(profile.graph)),
        "sqrt(n)": fits(baselines.sqrt_checkpointing(profile)),
        "segments": fits(baselines.segment_checkpointing(profile)),
        "greedy": fits(Greedy(flatten(Problem.of(profile)), budget_bytes).best()),
    }
    for name, restricted in (
        ("Checkmate", with_algorithms(baselines.restrict_checkmate(profile), profile)),
        ("Gist", with_algorithms(baselines.restrict_gist(profile), profile)),
    ):
        found = Incumbent(Problem.of(restricted), budget_bytes)
        search(found, seconds=seconds)
        steps = found.steps
        objectives[name] = fits(steps and Choices.of_steps(restricted.graph, steps).steps(profile.graph))
    return objectives


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Every point in turn."""
    published = json.loads((arguments.instances / "published.json").read_text(encoding="utf-8"))
    for name, budgets in published.items():
        path = arguments.instances / f"{name}.json"
        if name == "about" or (arguments.only and name not in arguments.only):
            continue
        instance = json.loads(path.read_text(encoding="utf-8"))
        profile = instance_profile(instance)
        unit_ms = float(instance.get("latency_unit_ms", 1.0))
        for budget, (objective, bound) in budgets.items():
            budget_bytes = int(float(budget) * GIB)
            reference = (
                baseline_objectives(profile, budget_bytes, arguments.baseline_seconds, unit_ms)
                if arguments.baseline_seconds > 0
                else {}
            )
            for seed in arguments.seeds:
                began = time.monotonic()
                options = SolvingOptions(time_limit=arguments.time_limit, gap=0.0, seed=seed)
                solution = solve_profile(profile, budget_bytes, options)
                seconds = time.monotonic() - began
                reached = None
                if solution.steps is not None:
                    steps = instance_steps(instance, solution.steps)
                    reached = judged(arguments.judge, path, steps, float(budget))
                sys.stderr.write(f"{name} {budget} GiB seed {seed}: {reached} (published {objective})\n")
                yield {
                    "instance": name,
                    "budget_gib": float(budget),
                    "seed": seed,
                    "status": str(solution.status),
                    "objective": reached,
                    "bound": solution.lower_bound_ms / unit_ms,
                    "seconds": round(seconds, 1),
                    "published_objective": objective,
                    "published_bound": bound,
                    "baselines": reference,
                }


def table(points: list[dict[str, Any]]) -> str:
    """The points as a markdown table."""
    names = list(points[0]["baselines"]) if points else []
    heading = [
        "instance",
        "GiB",
        "seed",
        "objective",
        "bound",
        "gap",
        "seconds",
        "published",
        "its bound",
        "ratio",
    ]
    lines = ["| " + " | ".join(heading + names) + " |", "|" + " --- |" * len(heading + names)]
    for point in points:
        objective, bound, published = point["objective"], point["bound"], point["published_objective"]
        cells = [point["instance"], f"{point['budget_gib']:g}", str(point["seed"])]
        if objective is None:
            cells += ["none", f"{bound:.0f}", ""]
        else:
            cells += [f"{objective:.0f}", f"{bound:.0f}", f"{1 - bound / objective:.2%}"]
        cells += [f"{point['seconds']:.1f}", str(published), str(point["published_bound"])]
        cells.append("" if objective is None else f"{objective / published:.4f}")
        cells += ["over budget" if value is None else f"{value:.0f}" for value in point["baselines"].values()]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def summary(points: list[dict[str, Any]]) -> list[str]:
    """For each instance and budget, the median objective over seeds and the worst, over the published one."""
    lines = [
        "| instance | GiB | seeds | median / published | worst / published | largest gap |",
        "|" + " --- |" * 6,
    ]
    groups: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for point in points:
        groups.setdefault((point["instance"], point["budget_gib"]), []).append(point)
    for (name, budget), group in groups.items():
        reached = [math.inf if point["objective"] is None else point["objective"] for point in group]
        published = group[0]["published_objective"]
        gap = max(1 - point["bound"] / objective for point, objective in zip(group, reached, strict=True))
        lines.append(
            f"| {name} | {budget:g} | {len(group)} | {statistics.median(reached) / published:.4f} "
            f"| {max(reached) / published:.4f} | {gap:.2%} |"
        )
    return lines


def hardware() -> str:
    """The processor, as the system names it, and how many of it there are."""
    model = platform.processor() or platform.machine()
    information = Path("/proc/cpuinfo")
    if information.exists():
        found = re.search(r"model name\s*:\s*(.+)", information.read_text(encoding="utf-8"))
        model = found[1] if found else model
    system = f"{platform.system()} {platform.release()}"
    return f"{model}, {os.cpu_count()} CPUs, {system}, Python {platform.python_version()}"


def commit() -> str:
    """The commit of the working tree, marked where files that it tracks were changed."""
    here = Path(__file__).parent
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=here,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("instances", type=Path)
    parser.add_argument("--judge", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[], help="names of instances (default: all)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds for each point (default 60)")
    parser.add_argument(
        "--baseline-seconds", type=float, default=10.0, help="for each of Checkmate and Gist; 0: none"
    )
    parser.add_argument("--output", type=Path, default=Path("docs/benchmarks"), help="folder for the report")
    arguments = parser.parse_args()
    now = datetime.now(UTC)
    about = {
        "date": now.isoformat(timespec="seconds"),
        "hardware": hardware(),
        "commit": commit(),
        "time_limit_seconds": arguments.time_limit,
    }
    arguments.output.mkdir(parents=True, exist_ok=True)
    stem = arguments.output / f"solver_{now:%Y-%m-%d_%H%M}"
    points: list[dict[str, Any]] = []
    for point in measure(arguments):
        # Written after every point: an hour's work is not lost with its last minute.
        points.append(point)
        stem.with_suffix(".json").write_text(json.dumps({**about, "points": points}, indent=1), encoding="utf-8")
        lines = [f"# Solver on the published instances, {now:%Y-%m-%d}", ""]
        lines += [f"- {key.replace('_', ' ')}: {value}" for key, value in about.items()]
        lines += ["", *summary(points), "", table(points), ""]
        stem.with_suffix(".md").write_text("\n".join(lines), encoding="utf-8")
    sys.stdout.write(f"{stem.with_suffix('.md')}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
