"""Solve a solver instance (`remat-instance/1`) and write the schedule in the instance's own ids.

python scripts/solve_instance.py INSTANCE.json --budget-gib 6 --time-limit 60 --seed 0 --output SCHEDULE.json
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from instances import instance_profile

from monetlite.core.options import SolvingOptions
from monetlite.core.steps import Step
from monetlite.solving import solve_profile

GIB = 2**30


def instance_steps(instance: dict[str, Any], steps: Sequence[Step]) -> list[tuple[Any, str]]:
    """Steps as [operator id, implementation name], by the instance's ids."""
    operators = instance["operators"]
    return [
        (operators[index]["id"], operators[index]["implementations"][choice]["name"]) for index, choice in steps
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("instance", type=Path)
    parser.add_argument("--budget-gib", type=float, required=True)
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds (default 60)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    instance = json.loads(arguments.instance.read_text(encoding="utf-8"))
    profile = instance_profile(instance)
    budget_bytes = int(arguments.budget_gib * GIB)
    options = SolvingOptions(time_limit=arguments.time_limit, gap=0.0, seed=arguments.seed)
    solution = solve_profile(profile, budget_bytes, options)
    if solution.steps is None or solution.latency_ms is None:
        sys.stderr.write(
            f"{solution.status}: no schedule within {arguments.budget_gib} GiB "
            f"(nothing fits below {solution.smallest_proven_bytes / GIB:.4f} GiB)\n"
        )
        return 1
    unit_ms = float(instance.get("latency_unit_ms", 1.0))
    result = {
        "status": str(solution.status),
        "objective": solution.latency_ms / unit_ms,
        "lower_bound": solution.lower_bound_ms / unit_ms,
        "budget_bytes": budget_bytes,
        "peak_bytes": solution.peak_bytes,
        "seconds": solution.seconds,
        "steps": instance_steps(instance, solution.steps),
    }
    arguments.output.write_text(json.dumps(result), encoding="utf-8")
    sys.stdout.write(
        f"{solution.status} objective={result['objective']:.0f} bound={result['lower_bound']:.0f} "
        f"seconds={solution.seconds:.1f}\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
