"""What monetlite does on one GPU: checks and measurements of seven models, in two files.

Three steps, since solving needs neither the GPU nor its time. The first and the last need torch, numpy, networkx and
pyyaml alone, and a checkout of this repository; neither begins anything else after 430 seconds. The first keeps what
it has measured beside the profiles, and goes on there when it is run again.

    python scripts/gpu_report.py profile --output profiles          # on the GPU: what every operator costs
    python scripts/gpu_report.py solve profiles --output solved     # anywhere: a schedule for each budget
    python scripts/gpu_report.py measure solved                     # on the GPU: the report

The report goes to docs/benchmarks/gpu_NAME_DATE.json and .md. It holds every schedule to its budget (allocated and
reserved memory), to its prediction (peak within 2%, step time within 5%) and to plain training's gradients, and
measures it beside plain PyTorch, torch.utils.checkpoint and torch.compile's activation memory budget, in turn.
Schedules are solved for budgets of reserved memory, 1% less than each, and run with the allocator limited to it, as
with `monetlite.limit_reserved`; plain PyTorch and its peers aren't. torch.compile, which takes long, comes in a second
round, beside plain PyTorch once more. What there was no time for is listed, and the files are written anew after every
way to train. Without a GPU, `--device cpu --small` tries all of it.
"""

import argparse
import datetime
import gc
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Blocks of memory are then as large as what is in them, and little lies between them (docs/choosing-a-budget.md).
if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import torch  # which reads that when it is imported

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from gpu_report_models import SMALL, SUBJECTS, Built  # noqa: E402  # beside this file

import monetlite  # noqa: E402  # from this checkout, installed or not
from monetlite.checking.comparison.bench import Bench, Contender, Entrant, environment, reason  # noqa: E402
from monetlite.checking.comparison.peer_runs import TITLES, Peer, PeerRun  # noqa: E402
from monetlite.checking.comparison.peers import every_block, inductor  # noqa: E402
from monetlite.checking.comparison.runner import scheduled  # noqa: E402
from monetlite.checking.trainee import default_loss  # noqa: E402
from monetlite.core.schedule import Schedule  # noqa: E402
from monetlite.core.simulate import simulate  # noqa: E402
from monetlite.core.steps import plain_steps  # noqa: E402
from monetlite.core.units import format_bytes, parse_budget  # noqa: E402

PEAK_WITHIN, LATENCY_WITHIN = 0.02, 0.05
"""How far measured figures may be from predicted ones, of those."""
SECONDS = 430.0
"""After which no other model is begun."""
SHARE = 0.5
"""The budget of torch.compile that is measured: each takes a compilation of its own."""
COMPILE_SECONDS = 90.0
"""What that may take: with less left, it is left out."""
MARGIN = 0.01
"""Of a budget, what a schedule leaves to the prediction's error."""
SAME_GRADIENTS, REPEATED = 1e-5, 10
"""How far gradients may be where a schedule makes the same bits: that share, or so many times what two plain steps are
apart, whose kernels may add up in no fixed order.
"""


def built(name: str, device: str, small: bool) -> Built:
    """A model and its inputs on a device, the same each time."""
    torch.manual_seed(0)
    model, inputs = SUBJECTS[name].build(small)
    return model.to(device), tuple(item.to(device) for item in inputs)


def profile(args: argparse.Namespace) -> int:
    """The first step: measure what operators cost, for the transformers first, which have fewest kinds."""
    began = time.monotonic()
    args.output.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("MONETLITE_CACHE", str(args.output / "cache"))
    left_out = []
    for name in args.model or reversed(SUBJECTS):
        for layout in ("as_traced", "channels_last") if args.channels_last else ("as_traced",):
            path = args.output / f"{name}.{layout}.json"
            if path.exists():
                continue
            if time.monotonic() - began > args.seconds:
                left_out.append(f"{name}, {layout}")
                continue
            model, inputs = built(name, args.device, args.small)
            graph = monetlite.trace(model, inputs, layout=layout)
            monetlite.profile(graph, args.device, tolerance=args.tolerance).save(path)
            print(f"{name}, {layout}: {time.monotonic() - began:.0f} s since the start", flush=True)
            del model, inputs, graph
            tidy(args.device)
    if left_out:
        print(f"no time left for {'; '.join(left_out)}: run this again")
    return 1 if left_out else 0


def solve(args: argparse.Namespace) -> int:
    """The second step: a schedule for each model and budget that there is one for."""
    from monetlite.core.errors import InfeasibleBudget
    from monetlite.core.options import SolvingOptions
    from monetlite.planning.budgets import solve_layouts

    args.output.mkdir(parents=True, exist_ok=True)
    for name in args.model or SUBJECTS:
        paths = [args.profiles / f"{name}.{layout}.json" for layout in ("as_traced", "channels_last")]
        profiles = [monetlite.load_profile(path) for path in paths if path.exists()]
        if not profiles:
            print(f"{name}: no profile in {args.profiles}", flush=True)
            continue
        found: list[Schedule] = []
        # From the smallest on: each begins from what was found for less.
        for budget in reversed(SMALL if args.small else SUBJECTS[name].budgets):
            plain = simulate(profiles[0], plain_steps(profiles[0].graph))
            try:
                schedule = solve_layouts(
                    profiles[:1] if args.tolerance < 1e-5 else profiles,
                    int(parse_budget(budget, plain.peak_bytes) * (1 - args.margin)),
                    SolvingOptions(
                        tolerance=args.tolerance,
                        reserved=profiles[0].device != "cpu",
                        time_limit=args.time_limit,
                    ),
                    starts=found,
                )
            except InfeasibleBudget as error:
                print(f"{name} within {budget}: {error}", flush=True)
                continue
            found.append(schedule)
            schedule.save(args.output / f"{name}_{budget.replace('%', 'pct')}.yaml")
            print(f"{name} within {budget}: {schedule.overhead:+.1%}, gap {schedule.gap:.1%}", flush=True)
    return 0


def measure(args: argparse.Namespace) -> int:
    """The third step: checks and measurements."""
    began = time.monotonic()
    report: dict[str, Any] = {
        "date": str(datetime.date.today()),
        "environment": environment(args.device),
        "repeats": args.repeats,
        "small": args.small,
        "models": {},
        "left_out": [],
    }
    stem = args.output or ROOT / "docs" / "benchmarks" / _stem(report["environment"]["device"])

    def save() -> None:
        Path(f"{stem}.json").write_text(json.dumps(report, indent=1) + "\n")
        Path(f"{stem}.md").write_text(markdown(report))

    broken = False
    names = list(args.model or SUBJECTS)
    solved = {name: list(_schedules(args.schedules, name, args.small)) for name in names}
    report["left_out"] = [f"{name}: no schedule in {args.schedules}" for name in names if not solved[name]]
    for beside_compiled in (False, True) if args.compiled else (False,):
        for name in filter(solved.get, names):
            longest = COMPILE_SECONDS if beside_compiled else 0.0
            if time.monotonic() - began + longest > args.seconds:
                what = f"{name}, beside torch.compile" if beside_compiled else name
                report["left_out"].append(f"{what}: no time left after {args.seconds:.0f} s")
                continue
            found = report["models"].setdefault(name, {"rows": []})
            before = list(found["rows"])

            def show(rows: list[dict[str, Any]], found: dict[str, Any] = found, before: Any = before) -> None:
                found["rows"] = [*before, *rows]
                save()

            try:
                found |= measured(name, solved[name], args, began + args.seconds, beside_compiled, show)
            except Exception as error:
                # Such as memory that doesn't hold the model: the others are measured all the same.
                report["left_out"].append(f"{name}: {reason(error)}")
                broken = True
            tidy(args.device)
            print(f"{name}: {time.monotonic() - began:.0f} s since the start", flush=True)
    save()
    print(f"written to {stem}.json and .md")
    checks = [check for found in report["models"].values() for row in found["rows"] for check in row["checks"]]
    failed = [check for check in checks if not check["passed"]]
    print(f"{len(checks) - len(failed)} of {len(checks)} checks passed")
    return 1 if failed or broken or not checks else 0


def measured(
    name: str,
    schedules: list[tuple[str, Schedule]],
    args: argparse.Namespace,
    until: float,
    beside_compiled: bool,
    show: Callable[[list[dict[str, Any]]], None],
) -> dict[str, Any]:
    """One model: plain training, schedules and checkpointing, in turn; or torch.compile, and what it is compared with.

    `show` is given the rows so far, whenever there is one more. Returns what there is to say beside them.
    """
    model, inputs = built(name, args.device, args.small)
    bench = Bench(model, inputs, {}, default_loss, args.device)
    del model
    of_schedule: dict[str, tuple[str, Schedule]] = {}
    ours = []
    for budget, schedule in schedules:
        contender = scheduled(Peer.MONETLITE, schedule, parse_budget(budget, schedule.plain_peak_bytes))
        of_schedule[contender.setting] = (budget, schedule)
        ours.append(contender)
    plain = Contender(peer=Peer.PLAIN, setting="beside torch.compile" * beside_compiled)
    entered: list[Entrant] = []

    def rows(runs: list[PeerRun]) -> list[dict[str, Any]]:
        return [
            row(run, runs[0], of_schedule.get(run.setting) if run.peer is Peer.MONETLITE else None) for run in runs
        ]

    def enter(contender: Contender) -> PeerRun:
        if entered and time.monotonic() > until:
            late = PeerRun(peer=contender.peer, setting=contender.setting, failure="no time left")
            entered.append(Entrant(run=late))
        else:
            entered.append(bench.enter(contender))
        so_far = [item.run for item in entered]
        show(rows(so_far))
        return so_far[-1]

    enter(plain)
    if beside_compiled:
        peaks = [enter(contender).peak_bytes for contender in inductor(bench.plain, shares=(SHARE,))]
        at_most = [item for item in ours if (item.asked_bytes or 0) <= max(peak or 0 for peak in peaks)]
        ours = at_most[:1]  # whose budget is the largest of those
    for contender in [*ours, *(() if beside_compiled else every_block(bench.plain))]:
        enter(contender)
    runs = bench.time(entered, args.repeats)
    show(rows(runs))
    published = dict(zip(SUBJECTS[name].budgets, SUBJECTS[name].published, strict=False))
    return {
        "inputs": ["×".join(map(str, item.shape)) for item in inputs],
        "published": {} if args.small else published,
    }


def row(run: PeerRun, plain: PeerRun, promised: tuple[str, Schedule] | None) -> dict[str, Any]:
    """One way to train: what was measured, and what is held against it."""
    plain_ms = plain.step_ms
    found: dict[str, Any] = {
        "way": TITLES[run.peer],
        "setting": run.setting,
        "failure": run.failure,
        "peak_bytes": run.peak_bytes,
        "reserved_bytes": run.reserved_bytes,
        "releases": run.releases,
        "times_ms": list(run.times_ms),
        "step_ms": run.step_ms if run.times_ms else None,
        "overhead": run.step_ms / plain_ms - 1 if run.times_ms and plain_ms < float("inf") else None,
        "gradient_difference": run.gradient_difference,
        "faults": list(run.faults),
        "checks": [],
    }
    if promised is None:
        return found
    budget, schedule = promised
    budget_bytes = parse_budget(budget, schedule.plain_peak_bytes)
    found |= {
        "budget": budget,
        "budget_bytes": budget_bytes,
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
        if schedule.tolerance == 0 and plain.gradient_difference is not None:
            most = max(SAME_GRADIENTS, REPEATED * plain.gradient_difference)
            check("gradients off by", run.gradient_difference, most)
        check("peak within the budget, bytes", run.peak_bytes, budget_bytes)
        if run.reserved_bytes is not None:
            check("reserved within the budget, bytes", run.reserved_bytes, budget_bytes)
        check("predicted peak off by", abs((run.peak_bytes or 0) / schedule.peak_bytes - 1), PEAK_WITHIN)
        check("predicted step time off by", abs(run.step_ms / schedule.latency_ms - 1), LATENCY_WITHIN)
    return found


def markdown(report: dict[str, Any]) -> str:
    """The report for people."""
    where = ", ".join(f"{name} {value}" for name, value in report["environment"].items())
    lines = [
        f"# On one GPU, {report['date']}",
        "",
        f"{where}. Written by `scripts/gpu_report.py`; steps taken in turn, {report['repeats']} of each, medians.",
        "Peaks and reserved memory as torch's allocator counts them; *releases*: how often in a step it gave memory back "
        "to the GPU. *Off* is measured over predicted, less one; *gradients*: their largest relative difference from "
        "plain PyTorch's, whose own row has that of two of its steps.",
    ]
    for name, found in report["models"].items():
        lines += [
            "",
            f"## {', '.join([name, *found.get('inputs', [])])}",
            "",
            "| way | peak | reserved | releases | step, ms | overhead | MONeT's | peak off | time off | gradients |",
            "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        ]
        lines += [_line(item, found.get("published", {})) for item in found["rows"]]
        failed = [
            f"- {item['way']} {item['setting']}: {check['what']} {check['value']}, at most {check['most']}"
            for item in found["rows"]
            for check in item["checks"]
            if not check["passed"]
        ]
        lines += ["", *(["Failed checks:", "", *failed] if failed else ["Every check passed."])]
    if report["left_out"]:
        lines += ["", "## Left out", "", *(f"- {item}" for item in report["left_out"])]
    return "\n".join(lines) + "\n"


def _line(item: dict[str, Any], published: dict[str, float]) -> str:
    way = f"{item['way']}{': ' if item['setting'] else ''}{item['setting']}"
    if item["failure"]:
        return f"| {way} | {item['failure']} | | | | | | | | |"
    monets = published.get(item.get("budget", ""))
    cells = [
        way,
        format_bytes(item["peak_bytes"]),
        "" if item["reserved_bytes"] is None else format_bytes(item["reserved_bytes"]),
        "" if item["releases"] is None else f"{item['releases']:.0f}",
        "" if item["step_ms"] is None else f"{item['step_ms']:.1f}",
        "" if item["overhead"] is None else f"{item['overhead']:+.1%}",
        "" if monets is None else f"{monets:+.2f}%",
        f"{item['peak_bytes'] / item['predicted_peak_bytes'] - 1:+.1%}" if "predicted_ms" in item else "",
        f"{item['step_ms'] / item['predicted_ms'] - 1:+.1%}" if "predicted_ms" in item and item["step_ms"] else "",
        "; ".join(item["faults"]) or f"{item['gradient_difference']:.0e}"
        if item["gradient_difference"] is not None
        else "",
    ]
    return f"| {' | '.join(cells)} |"


def _schedules(folder: Path, name: str, small: bool) -> Iterator[tuple[str, Schedule]]:
    for budget in SMALL if small else SUBJECTS[name].budgets:
        path = folder / f"{name}_{budget.replace('%', 'pct')}.yaml"
        if path.exists():
            yield budget, monetlite.load_schedule(path)


def _stem(device: str) -> str:
    return f"gpu_{re.sub('[^a-z0-9]+', '-', device.lower()).strip('-')}_{datetime.date.today()}"


def tidy(device: str) -> None:
    """Free what a model has left."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    steps = parser.add_subparsers(dest="step", required=True)
    for step, function, what in (
        ("profile", profile, "measure what operators cost, on the GPU"),
        ("solve", solve, "solve for every budget, anywhere"),
        ("measure", measure, "check and measure, on the GPU"),
    ):
        one = steps.add_parser(step, help=what)
        one.set_defaults(function=function)
        one.add_argument("--model", action="append", choices=list(SUBJECTS), help="by default all of them")
        one.add_argument("--small", action="store_true", help="small models and batches, to try this out")
        if step != "solve":
            one.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
        if step == "profile":
            one.add_argument("--output", type=Path, required=True, help="a folder for profiles")
            one.add_argument("--seconds", type=float, default=SECONDS, help="to begin something in")
            one.add_argument("--tolerance", type=float, default=0.0, help="of implementations to measure")
            one.add_argument("--channels-last", action="store_true", help="images in channels-last as well")
        elif step == "solve":
            one.add_argument("profiles", type=Path)
            one.add_argument("--output", type=Path, required=True, help="a folder for schedules")
            one.add_argument("--time-limit", type=float, default=60.0, help="seconds for each budget")
            one.add_argument("--tolerance", type=float, default=0.0)
            one.add_argument("--margin", type=float, default=MARGIN, help="share of each budget to leave")
        else:
            one.add_argument("schedules", type=Path)
            one.add_argument("--output", type=Path, help="without an ending; by default in docs/benchmarks")
            one.add_argument("--repeats", type=int, default=5)
            one.add_argument("--seconds", type=float, default=SECONDS, help="to begin something in")
            one.add_argument(
                "--compiled",
                action=argparse.BooleanOptionalAction,
                default=True,
                help="torch.compile's budget as well",
            )
    args = parser.parse_args(arguments)
    function: Callable[[argparse.Namespace], int] = args.function
    return function(args)


if __name__ == "__main__":
    sys.exit(main())
