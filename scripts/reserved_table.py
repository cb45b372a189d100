"""What torch's CUDA allocator takes from the GPU for the schedules that come along, computed.

    python scripts/reserved_table.py [--model NAME ...] [--output FILE.md]

Nothing is solved and nothing runs: each schedule's requests go through the allocator on paper
(`monetlite.allocator`), by its default settings, with expandable segments, and within the least limit that it runs
in. `releases`: how often in a step memory goes back to the GPU to stay within that limit, and within 5% more.
"""

import argparse
import datetime
from pathlib import Path

from monetlite.allocator import least_limit, reserve
from monetlite.checking.comparison.bench import environment
from monetlite.core.costs import Profile
from monetlite.core.schedule import Schedule
from monetlite.core.simulate import simulate
from monetlite.core.steps import Step, plain_steps
from monetlite.zoo.check import Checker
from monetlite.zoo.collection import ZooEntry, shipped

MODELS = ("resnet50", "googlenet", "mobilenet_v2", "unet", "vgg16", "hf:gpt2", "hf:bert", "hf:vit")


def row(entry: ZooEntry, what: str, profile: Profile, schedule: Schedule | tuple[Step, ...]) -> str:
    """A line of the table, printed as well."""
    peak = simulate(profile, schedule).peak_bytes
    least = least_limit(profile, schedule)
    default, expandable = (reserve(profile, schedule, expandable=how).peak_bytes / peak for how in (False, True))
    releases = [
        reserve(profile, schedule, expandable=True, limit_bytes=limit).releases
        for limit in (least, int(1.05 * least))
    ]
    line = (
        f"| {entry.model} | {entry.device} | {what} | {peak / 1e9:.2f} | {default:.2f} | {expandable:.2f} | "
        f"{least / peak:.3f} | {releases[0]} | {releases[1]} |"
    )
    print(line, flush=True)
    return line


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", help="by default the paper's five and three transformers")
    parser.add_argument("--output", type=Path, help="also write the table to this file")
    args = parser.parse_args()
    shelf, checker = shipped(), Checker()
    rows: list[str] = []
    seen: set[str] = set()
    for entry in shelf.entries():
        if entry.model not in (args.model or MODELS):
            continue
        schedule = shelf.load(entry)
        profile = checker.profile(schedule).within(schedule.tolerance)

        if entry.model not in seen:
            seen.add(entry.model)
            plain = checker.profile(schedule, plain=True)
            rows.append(row(entry, "plain training", plain, plain_steps(plain.graph)))
        budget = f"{entry.budget_bytes / 1e9:.3g} GB" + (
            f", tolerance {entry.tolerance:g}" if entry.tolerance else ""
        )
        rows.append(row(entry, budget, profile, schedule))
    where = environment("cpu")
    text = "\n".join(
        [
            f"# Reserved memory of the schedules that come along, {datetime.date.today()}",
            "",
            f"Computed by `scripts/reserved_table.py` at commit {where.get('commit', 'unknown')}, torch {where['torch']};",
            "nothing has run on a GPU. Peaks in GB; reserved memory, and the least limit, of the peak.",
            "",
            "| model | costs of | budget | peak | default | expandable | least limit | releases | at 5% more |",
            "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
            *rows,
            "",
        ]
    )
    if args.output:
        args.output.write_text(text)


if __name__ == "__main__":
    main()
