"""What monetlite does on one GPU, in short calls that go on where the last one stopped.

    python scripts/gpu_report.py solve --output solved --device h200      # anywhere: schedules at estimated costs
    python scripts/gpu_report.py allocator solved --output report         # on the GPU: the allocator's model
    python scripts/gpu_report.py measure solved --output report --part a  # on the GPU: every schedule, held to its word
    python scripts/gpu_report.py measure solved --output report --part c  # on the GPU: a Llama of 1B in bfloat16
    python scripts/gpu_report.py measure solved --output report --part b  # on the GPU: beside checkpoint and torch.compile
    python scripts/gpu_report.py profile --output report                  # on the GPU: the cost of every operator
    python scripts/gpu_report.py solve report --output solved_measured    # anywhere: schedules at those costs

What runs on the GPU needs torch, networkx, pyyaml and msgspec, and a checkout of this repository. It begins nothing
after `--seconds` (430), writes each row as soon as it is measured, and leaves out what is there: the same command
again goes on. An exit code of 75 asks for that. A model has a process of its own, so an error that ends CUDA for a
process costs one row. A folder of results has at most eight files.

Part a holds every schedule of seven models to its budget (allocated and reserved memory), to its prediction (peak
within 2%, step time within 5%) and to plain training's gradients. Where plain training does not fit into memory,
gradients are compared at a smaller batch. Schedules are solved for budgets of reserved memory, 1% less than each, and
run with the allocator limited to it, as with `monetlite.limit_reserved`. Without a GPU, `--device cpu --small` tries
all of it.
"""

import argparse
import contextlib
import io
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

# Blocks of memory are then as large as what is in them, and little lies between them (docs/choosing-a-budget.md).
if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import torch  # which reads that when it is imported

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from gpu_report_allocator import give_back_ms, held_to_model, recorded  # noqa: E402  # beside this file
from gpu_report_checks import checked  # noqa: E402
from gpu_report_kernels import recorded_kernels  # noqa: E402
from gpu_report_models import SUBJECTS  # noqa: E402
from gpu_report_rows import Key, Rows, failed_checks, page  # noqa: E402
from gpu_report_solve import MARGIN, PROFILES, solve  # noqa: E402
from gpu_report_subjects import (  # noqa: E402
    built,
    context_lost,
    layouts_of,
    say,
    schedules_of,
    tidy,
    tolerance_of,
)

import monetlite  # noqa: E402  # from this checkout, installed or not
from monetlite.checking.comparison.bench import (  # noqa: E402
    OUT_OF_MEMORY,
    Bench,
    Contender,
    Entrant,
    Unsupported,
    environment,
    reason,
)
from monetlite.checking.comparison.peer_runs import TITLES, Peer  # noqa: E402
from monetlite.checking.comparison.peers import by_blocks, inductor  # noqa: E402
from monetlite.checking.comparison.scheduled_peers import scheduled  # noqa: E402
from monetlite.checking.trainee import default_loss  # noqa: E402
from monetlite.core.files.atomic import write_atomically  # noqa: E402
from monetlite.core.schedule import Schedule  # noqa: E402
from monetlite.core.simulate import simulate  # noqa: E402
from monetlite.core.steps import plain_steps  # noqa: E402
from monetlite.core.units import format_bytes, parse_budget  # noqa: E402
from monetlite.profiling.measured import Measurement  # noqa: E402

SECONDS = 430.0
"""After which nothing else is begun."""
OVERTIME = 130.0
"""Seconds after that at which what is still running is ended."""
COMPILE_SECONDS = 90.0
"""What torch.compile may take: with less left, it is not begun."""
SHARES = (0.5,)
"""Activation memory budgets of torch.compile: each takes a compilation of its own."""
AGAIN, NEW_PROCESS = 75, 76
"""Exit codes: there is more to do, in another call; at once, in another process."""
PARTS = {"a": [name for name in SUBJECTS if name != "llama"], "b": list(SUBJECTS), "c": ["llama"]}
"""Models of each part, by default; in c the ways of a and b, for tokens a second."""


def in_processes(args: argparse.Namespace, jobs: Sequence[tuple[str, str]]) -> int:
    """Do jobs, (part, model) each, in a process each, and write the page. Returns 75 if some are left."""
    code = _in_processes(args, jobs)
    write_atomically(args.output / "report.md", page(Rows(args.output), environment(args.device)))
    return code


def _in_processes(args: argparse.Namespace, jobs: Sequence[tuple[str, str]]) -> int:
    end = time.monotonic() + args.seconds
    for part, name in jobs:
        while True:
            left = end - time.monotonic()
            if left <= 0:
                return AGAIN
            command = [sys.executable, __file__, *args.given, "--seconds", str(left), "--job", part, name]
            before = (args.output / "rows.jsonl").read_text() if (args.output / "rows.jsonl").exists() else ""
            try:
                code = subprocess.run(command, timeout=left + OVERTIME, check=False).returncode
            except subprocess.TimeoutExpired:
                return AGAIN
            if code == AGAIN:
                return AGAIN
            if code == 0:
                break
            rows = Rows(args.output)
            if rows.path.exists() and rows.path.read_text() != before:
                continue  # what ended the process is a row now, or begun once: the rest goes on
            rows.add((part, name, "process", ""), failure=f"ended with exit code {code}", checks=[])
            break
    return 0


def profile(args: argparse.Namespace) -> int:
    """Measure what operators cost, for the transformers first, which have fewest kinds."""
    return in_processes(args, [("profile", name) for name in args.model or reversed(SUBJECTS)])


def profile_one(args: argparse.Namespace, part: str, name: str) -> int:
    """One model's profiles. An operator that can't be measured is a row, and the model then has no profile."""
    began, rows = time.monotonic(), Rows(args.output)
    os.environ.setdefault("MONETLITE_CACHE", str(args.output))
    for layout in layouts_of(name, args):
        kept, key = f"{name}.{layout}.json", (part, name, "profile", layout)
        if rows.done(key):
            continue
        model, inputs = built(name, args, args.device)
        graph = monetlite.trace(model, inputs, layout=layout)
        measurement = Measurement(graph, args.device, tolerance=tolerance_of(name, args))
        failures = {row["setting"] for row in rows if row["model"] == name and row["way"] == "operator"}
        measurement.leave_out(failures)

        def failed(operator: str, error: Exception, failures: set[str] = failures) -> None:
            rows.add((part, name, "operator", operator), failure=reason(error), checks=[])
            failures.add(operator)
            if context_lost(args.device):
                sys.exit(NEW_PROCESS)

        measurement.run(max(0.0, args.seconds - (time.monotonic() - began)), failed=failed)
        if measurement.done < measurement.total:
            say(f"{name}, {layout}: {measurement.done} of {measurement.total} calls")
            return AGAIN
        if failures:
            rows.add(key, failure=f"{len(failures)} operators can't be measured", checks=[])
            continue
        found = measurement.profile()
        with tempfile.TemporaryDirectory() as folder:
            found.save(Path(folder) / kept)
            path = args.output / PROFILES
            content = io.BytesIO(path.read_bytes() if path.exists() else b"")
            with zipfile.ZipFile(content, "a", zipfile.ZIP_DEFLATED) as archive:
                archive.write(Path(folder) / kept, kept)
            write_atomically(path, content.getvalue())
        plain_ms = sum(simulate(found, plain_steps(found.graph)).latencies_ms)
        rows.add(key, note=f"{measurement.total} calls, {plain_ms:.1f} ms in all", plain_ms=plain_ms)
        say(f"{name}, {layout}: {time.monotonic() - began:.0f} s")
    return 0


def measure(args: argparse.Namespace) -> int:
    """Checks and measurements, of one part or of all."""
    jobs = [
        (part, name)
        for part in args.part or ("a", "c", "b")
        for name in args.model or PARTS[part]
        if next(schedules_of(args, name), None)
    ]
    if not jobs:
        say(f"no schedules of these models in {args.schedules}: `solve` makes them")
        return 1
    code = in_processes(args, jobs)
    rows = Rows(args.output)
    failures = [row for row in rows if row.get("failure") and row["way"] != "operator"]
    for line in (*(f"{row['model']}, {row['way']}: {row['failure']}" for row in failures), *failed_checks(rows)):
        say(line)
    checks = sum(len(row.get("checks", [])) for row in rows)
    say(f"{checks} checks; {'more to do: run this again' if code else 'all done'}")
    return code or int(bool(failures or failed_checks(rows)) or not checks)


def measure_one(args: argparse.Namespace, part: str, name: str) -> int:
    """One model's rows of a part: each way to train enters, and takes its steps in turn with plain training."""
    end, rows = time.monotonic() + args.seconds, Rows(args.output)
    model, inputs = built(name, args, args.device)
    bench = Bench(model, inputs, {}, default_loss, args.device)
    del model
    promised: dict[str, tuple[str, Schedule]] = {}
    ours: list[Contender] = []
    for budget, schedule in schedules_of(args, name):
        contender = scheduled(Peer.MONETLITE, schedule, parse_budget(budget, schedule.plain_peak_bytes))
        promised[contender.setting] = (budget, schedule)
        ours.append(contender)
    plain: Entrant | None = None
    plain_contender = Contender(peer=Peer.PLAIN)

    def contenders() -> Iterator[Contender]:
        yield plain_contender
        if part != "b":
            yield from ours
        if part != "a":
            with contextlib.suppress(Unsupported):
                yield from by_blocks(bench.plain, (1,))
        if part == "b":
            yield from inductor(bench.plain, args.share or SHARES) if args.compiled else ()
            # Beside each of these, the schedule with the largest budget that is no larger than its peak.
            titles = TITLES[Peer.PLAIN], TITLES[Peer.MONETLITE]
            theirs = [
                row for row in rows if (row["part"], row["model"]) == (part, name) and row["way"] not in titles
            ]
            for peak in {row.get("peak_bytes") or 0 for row in theirs}:
                yield from [item for item in ours if (item.asked_bytes or 0) <= peak][:1]

    for contender in contenders():
        key: Key = (part, name, TITLES[contender.peer], contender.setting)
        if contender is plain_contender:
            if rows.lost(key):
                return 0
        elif rows.done(key):
            continue
        needed = COMPILE_SECONDS if contender.peer is Peer.INDUCTOR else 0.0
        if time.monotonic() + needed > end:
            return AGAIN
        rows.begin(key)
        entrant = bench.enter(contender)
        plain = plain or entrant
        entrant, gradients_of = (
            gradients_at_smaller_batch(bench, contender, entrant)
            if plain.run.failure == OUT_OF_MEMORY
            else (entrant, "")
        )
        *beside, run = bench.time([entrant] if contender is plain_contender else [plain, entrant], args.repeats)
        facts = checked(
            run, beside[0] if beside else plain.run, promised.get(run.setting), of_model=(name, args.small)
        )
        if entrant.trainee is not None and args.device == "cuda" and not run.failure:
            facts |= recorded_kernels(entrant.trainee.step)
        tokens = inputs[0].numel() if inputs[0].dtype == torch.int64 else None
        facts["tokens_per_second"] = tokens and facts["step_ms"] and tokens / facts["step_ms"] * 1000
        rows.add(key, inputs="×".join(map(str, inputs[0].shape)), gradients_of=gradients_of, **facts)
        say(f"{name}, {TITLES[contender.peer]} {contender.setting}: {end - time.monotonic():.0f} s left")
        if context_lost(args.device):
            return NEW_PROCESS
        del entrant
        tidy(args.device)
    return 0


def gradients_at_smaller_batch(bench: Bench, contender: Contender, entrant: Entrant) -> tuple[Entrant, str]:
    """A run whose gradients are compared at the largest half of the batch, and so on, that plain training fits.

    Returns the run, and the batch in words.
    """
    batch = len(bench.plain.args[0])
    while not entrant.run.failure and batch > 1:
        batch //= 2
        tidy(bench.device)
        inputs = tuple(item[:batch] for item in bench.plain.args)
        smaller = Bench(bench.plain.model, inputs, {}, default_loss, bench.device)
        if smaller.enter(Contender(peer=Peer.PLAIN)).run.failure:
            continue
        found = smaller.enter(contender).run
        if found.failure:
            break
        run = replace(entrant.run, gradient_difference=found.gradient_difference, faults=found.faults)
        return replace(entrant, run=run), f" (batch {batch})"
    return entrant, ""


def allocator(args: argparse.Namespace) -> int:
    """The model of the allocator beside what it does in training steps, before anything relies on it."""
    return in_processes(args, [("allocator", name) for name in args.model or ("resnet50", "unet", "gpt")])


def allocator_one(args: argparse.Namespace, part: str, name: str) -> int:
    """Plain training's steps, and those of each schedule within its limit."""
    rows = Rows(args.output)
    key: Key = (part, "", "give back", "")
    if not rows.done(key):
        rows.begin(key)
        taken = give_back_ms()
        said = (
            f"{taken['given_back_ms']:.1f} ms to give a gigabyte back, {taken['taken_ms']:.1f} ms to take it again"
        )
        rows.add(key, note=said, **taken)
    total_bytes = torch.cuda.get_device_properties().total_memory
    for budget, schedule in (("", None), *schedules_of(args, name)):
        key = (part, name, "plain" if schedule is None else "schedule", budget)
        if rows.done(key):
            continue
        rows.begin(key)
        limit_bytes = None
        if schedule is not None:
            monetlite.limit_reserved(parse_budget(budget, schedule.plain_peak_bytes))
            limit_bytes = int(torch.cuda.get_per_process_memory_fraction() * total_bytes)

        def steps(schedule: Schedule | None = schedule) -> None:
            model, inputs = built(name, args, args.device)
            trained = model if schedule is None else monetlite.MONeTWrapper(model, schedule)
            for _ in range(3):
                loss = default_loss(trained(*inputs))
                loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
                model.zero_grad()

        try:
            expandable = "expandable_segments:True" in os.environ.get("PYTORCH_ALLOC_CONF", "")
            found = held_to_model(recorded(steps), expandable=expandable, limit_bytes=limit_bytes)
            peaks = (format_bytes(found[of]) for of in ("peak_reserved_bytes", "by_model_bytes"))
            parts = f"they part at event {found['parts']['event']}" if found["parts"] else "they never part"
            said = f"{found['requests']} requests; reserved {next(peaks)}, by the model {next(peaks)}; {parts}"
            rows.add(key, note=said, **found)
        except Exception as error:
            rows.add(key, failure=reason(error))
        return NEW_PROCESS  # where nothing is reserved yet
    return 0


COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], int], str]] = {
    "profile": (profile, "measure what operators cost, on the GPU"),
    "solve": (solve, "solve for every budget, anywhere"),
    "allocator": (allocator, "hold the allocator's model to the allocator, on the GPU"),
    "measure": (measure, "check and measure, on the GPU"),
}
ONE = {"profile": profile_one, "allocator": allocator_one}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for command, (_, what) in COMMANDS.items():
        one = commands.add_parser(command, help=what)
        one.add_argument("--model", action="append", choices=list(SUBJECTS), help="by default all of them")
        one.add_argument("--small", action="store_true", help="small models and batches, to try this out")
        one.add_argument("--output", type=Path, required=True, help="a folder for what is found")
        one.add_argument("--device", default="cuda", help="cuda, cpu, or for `solve` the name of a GPU (h200)")
        if command in ("measure", "allocator"):
            one.add_argument("schedules", type=Path, help="a folder that `solve` wrote")
        if command != "solve":
            one.add_argument("--seconds", type=float, default=SECONDS, help="to begin something in")
            one.add_argument("--job", nargs=2, help=argparse.SUPPRESS)  # (part, model), in a process of its own
        if command in ("profile", "solve"):
            one.add_argument(
                "--tolerance", type=float, default=0.0, help="of implementations; 2e-3 for unet and vgg16"
            )
            one.add_argument("--compile", action="store_true", help="regions that Inductor compiles, too")
    solving, measuring = commands.choices["solve"], commands.choices["measure"]
    solving.add_argument(
        "profiles", type=Path, nargs="?", help="a folder of `profile`; without, costs are estimated"
    )
    solving.add_argument("--time-limit", type=float, default=60.0, help="seconds for each budget")
    solving.add_argument(
        "--of", choices=["reserved", "tensors"], default="reserved", help="memory that budgets are of"
    )
    solving.add_argument("--margin", type=float, default=MARGIN, help="share of each budget to leave")
    measuring.add_argument("--part", action="append", choices=list(PARTS), help="by default a, c and b")
    measuring.add_argument("--repeats", type=int, default=5)
    measuring.add_argument("--share", type=float, action="append", help="torch.compile's budget, by default 0.5")
    measuring.add_argument(
        "--compiled", action=argparse.BooleanOptionalAction, default=True, help="torch.compile's budget as well"
    )
    arguments = sys.argv[1:] if arguments is None else arguments
    args = parser.parse_args(arguments)
    args.given = arguments
    if getattr(args, "job", None):
        return ONE.get(args.command, measure_one)(args, *args.job)
    return COMMANDS[args.command][0](args)


if __name__ == "__main__":
    sys.exit(main())
