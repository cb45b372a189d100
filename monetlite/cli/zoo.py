"""`monetlite zoo`: schedules that people share."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from monetlite.cli.options import common_options
from monetlite.cli.running import EXIT_FAILED, Exit, guard, open_console
from monetlite.core.errors import ScheduleFileError

if TYPE_CHECKING:
    from monetlite.core.schedule import Schedule
    from monetlite.zoo import Shelf

_folder = click.option(
    "--folder",
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    help="A collection of schedule files; by default the one that comes with monetlite.",
)


@click.group("zoo")
def zoo_command() -> None:
    """Schedules that come with monetlite: list, show, get, check and add.

    They need no solving: MONeTWrapper(model, "zoo:resnet50@6GB").
    """


@zoo_command.command("list")
@click.option("--model", help="gpt2, hf:gpt2, ResNet-50, ...")
@click.option("--device", help="Costs of this device: p100, rtx-3090, ...")
@click.option("--budget", help="Only what keeps within it: 6GB, or 50% of plain training's peak.")
@click.option("--batch", type=click.IntRange(min=1), help="Only what serves this batch.")
@_folder
@common_options
def list_command(
    model: str | None,
    device: str | None,
    budget: str | None,
    batch: int | None,
    folder: Path | None,
    as_json: bool,
    debug: bool,
) -> None:
    """List schedules: memory against overhead."""

    def run() -> None:
        from monetlite.reporting.text_zoo import print_entries
        from monetlite.zoo.queries import Query, matching

        console, _ = open_console(as_json)
        there = _shelf(folder).entries()
        query = Query(model=model, device=device, budget=budget, batch=batch)
        entries = matching(there, query)
        if as_json:
            click.echo(json.dumps([{**entry.data(), "name": entry.name} for entry in entries]))
        elif entries:
            print_entries(console, entries)
        else:
            known = ", ".join(sorted({entry.model for entry in there}))
            click.echo(f"no schedule matches; there are schedules of {known}")

    guard(run, debug)


@zoo_command.command("show")
@click.argument("name")
@_folder
@common_options
def show_command(name: str, folder: Path | None, as_json: bool, debug: bool) -> None:
    """Show one schedule: NAME as zoo:resnet50@6GB, or a file."""

    def run() -> None:
        from monetlite.reporting.text_solve import schedule_facts
        from monetlite.reporting.text_zoo import print_shared

        console, _ = open_console(as_json)
        file, schedule = _find(name, folder)
        if as_json:
            click.echo(json.dumps({**schedule_facts(schedule), "file": file}))
        else:
            print_shared(console, file, schedule)

    guard(run, debug)


@zoo_command.command("get")
@click.argument("name")
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), help="By default the file's own name, here."
)
@_folder
@common_options
def get_command(name: str, output: Path | None, folder: Path | None, as_json: bool, debug: bool) -> None:
    """Copy one schedule out of the collection: NAME as zoo:resnet50@6GB."""

    def run() -> None:
        file, schedule = _find(name, folder)
        target = output or Path(Path(file).name)
        replaced = " (in place of an earlier file)" if target.exists() else ""
        schedule.save(target)
        facts = {"file": file, "output": str(target)}
        click.echo(json.dumps(facts) if as_json else f"{file} written to {target}{replaced}")

    guard(run, debug)


@zoo_command.command("check")
@click.argument("files", nargs=-1, type=click.Path(path_type=Path))
@_folder
@common_options
def check_command(files: tuple[Path, ...], folder: Path | None, as_json: bool, debug: bool) -> None:
    """Check schedule files against this version: schema, legality, budget, peak and latency as written.

    Without FILES, every file of the collection. Exit code 4 if any fails.
    """

    def run() -> None:
        from monetlite.reporting.text_zoo import print_checked
        from monetlite.zoo.check import Checked, Checker, check_all

        console, _ = open_console(as_json)
        shelf = None if files else _shelf(folder)
        each = check_all(shelf.folder, shelf.files()) if shelf else map(Checker().check, files)
        found: list[Checked] = []
        for checked in each:
            found.append(checked)
            if not as_json:
                print_checked(console, checked)
        stale = shelf is not None and not any(item.problems for item in found) and shelf.stale()
        failed = sum(not item.passed for item in found)
        if as_json:
            facts = [{"file": item.file, "problems": list(item.problems)} for item in found]
            click.echo(json.dumps({"files": facts, "index_is_stale": stale}))
        elif stale:
            click.echo("the index is not that of the files; run `monetlite zoo add` or scripts/make_zoo.py")
        if not as_json:
            click.echo(f"{len(found) - failed} of {len(found)} files are sound")
        if failed or stale:
            raise Exit(EXIT_FAILED)

    guard(run, debug)


@zoo_command.command("add")
@click.argument("file", type=click.Path(path_type=Path))
@_folder
@common_options
def add_command(file: Path, folder: Path | None, as_json: bool, debug: bool) -> None:
    """Check a schedule file and put it into a collection, under the name that its contents give it."""

    def run() -> None:
        from monetlite.zoo.check import Checker

        checked = Checker().check(file)
        if not checked.passed or checked.schedule is None:
            raise ScheduleFileError(f"{file} is not sound, and was not added: {'; '.join(checked.problems)}")
        entry = _shelf(folder).add(checked.schedule)
        click.echo(json.dumps(entry.data()) if as_json else f"{file} added as {entry.file}")

    guard(run, debug)


@zoo_command.command("import")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--with", "ours", help="A schedule to put beside it: a file, or a name such as zoo:resnet50@6GB.")
@_folder
@common_options
def import_command(file: Path, ours: str | None, folder: Path | None, as_json: bool, debug: bool) -> None:
    """Read one of MONeT's published solutions (a pickle, of which nothing is run) to compare with ours."""

    def run() -> None:
        from dataclasses import asdict

        from monetlite.reporting.text_solve import schedule_facts
        from monetlite.reporting.text_zoo import print_monet
        from monetlite.zoo.monet import read_monet

        console, _ = open_console(as_json)
        theirs = read_monet(file)
        name, schedule = (None, None) if ours is None else _find(ours, folder)
        if as_json:
            beside = None if schedule is None else {**schedule_facts(schedule), "file": name}
            click.echo(json.dumps({"monet": asdict(theirs), "ours": beside}))
        else:
            print_monet(console, theirs, schedule)

    guard(run, debug)


def _shelf(folder: Path | None) -> "Shelf":
    from monetlite.zoo import Shelf, shipped

    return shipped() if folder is None else Shelf(folder)


def _find(name: str, folder: Path | None) -> "tuple[str, Schedule]":
    from monetlite.zoo import load_schedule
    from monetlite.zoo.queries import PREFIX, find_entry

    if not name.startswith(PREFIX) and Path(name).is_file():
        return name, load_schedule(name)
    shelf = _shelf(folder)
    if name.endswith((".yaml", ".yml")) and name not in shelf.files():
        return name, load_schedule(name)  # which says what is the matter with it
    entry = find_entry(name, shelf)
    return entry.file, shelf.load(entry)
