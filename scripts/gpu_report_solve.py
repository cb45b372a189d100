"""Schedules of a GPU's report, at estimated costs or at those that it measured."""

import argparse
import tempfile
import zipfile

from gpu_report_models import SUBJECTS
from gpu_report_subjects import budgets_of, built, layouts_of, path_of, say, tolerance_of

import monetlite
from monetlite.core.costs import Profile
from monetlite.core.schedule import Schedule
from monetlite.core.simulate import simulate
from monetlite.core.steps import plain_steps
from monetlite.core.units import parse_budget

MARGIN = 0.01
"""Of a budget, what a schedule leaves to the prediction's error."""
PROFILES = "profiles.zip"
"""Measured profiles in a folder of results."""


def profiles_of(args: argparse.Namespace, name: str) -> list[Profile]:
    """A model's profiles: measured ones of a folder, or estimated for a named device."""
    found = []
    for layout in layouts_of(name, args):
        if args.profiles is None:
            model, inputs = built(name, args, "meta")
            graph = monetlite.trace(model, inputs, layout=layout, device=args.device)
            found.append(monetlite.profile(graph, args.device, tolerance=tolerance_of(name, args)))
            continue
        with zipfile.ZipFile(args.profiles / PROFILES) as archive, tempfile.TemporaryDirectory() as folder:
            if f"{name}.{layout}.json" in archive.namelist():
                found.append(monetlite.load_profile(archive.extract(f"{name}.{layout}.json", folder)))
    return found


def solve(args: argparse.Namespace) -> int:
    """A schedule for each model and budget that there is one for. What is there already stays."""
    from monetlite.core.errors import InfeasibleBudget, MonetliteError
    from monetlite.core.options import SolvingOptions
    from monetlite.planning.layouts import solve_layouts

    args.output.mkdir(parents=True, exist_ok=True)
    broken = False
    for name in args.model or SUBJECTS:
        # From the smallest on: each begins from what was found for less.
        paths = {budget: path_of(args.output, name, budget) for budget in reversed(budgets_of(name, args.small))}
        if all(path.exists() for path in paths.values()):
            continue
        try:
            profiles = profiles_of(args, name)
        except MonetliteError as error:
            say(f"{name}: {error}")
            broken = True
            continue
        if not profiles:
            say(f"{name}: no profile in {args.profiles}")
            continue
        found: list[Schedule] = []
        for budget, path in paths.items():
            if path.exists():
                found.append(monetlite.load_schedule(path))
                continue
            plain = simulate(profiles[0], plain_steps(profiles[0].graph))
            try:
                schedule = solve_layouts(
                    profiles,
                    int(parse_budget(budget, plain.peak_bytes) * (1 - args.margin)),
                    SolvingOptions(
                        tolerance=tolerance_of(name, args),
                        reserved=args.of == "reserved" and profiles[0].device != "cpu" and not args.small,
                        time_limit=args.time_limit,
                    ),
                    starts=found,
                )
            except InfeasibleBudget as error:
                say(f"{name} within {budget}: {error}")
                continue
            found.append(schedule)
            schedule.save(path)
            say(f"{name} within {budget}: {schedule.overhead:+.1%}, gap {schedule.gap:.1%}")
    return int(broken)
