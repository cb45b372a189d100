"""`monetlite zoo`: schedules that people share."""

from pathlib import Path

import click

from monetlite.cli.command_options import force_option, output_option
from monetlite.cli.exits import EXIT_FAILED, CommandExit
from monetlite.cli.option_types import BUDGET, DEVICE_NAME, Integer
from monetlite.cli.output_names import name_of_copy
from monetlite.cli.running import check_writable, command
from monetlite.cli.terminal import Terminal
from monetlite.core.errors import ScheduleFileError
from monetlite.core.schedule import Schedule, schedule_text
from monetlite.zoo.collection import (
    PREFIX,
    Shelf,
    file_name,
    find_entry,
    known_models,
    load_schedule,
    matching,
    shipped,
)

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


@command(
    "list",
    click.option("--model", help="gpt2, hf:gpt2, ResNet-50, ..."),
    click.option("--device", type=DEVICE_NAME, help="Costs of this device: p100, rtx-3090, ..."),
    click.option("--budget", type=BUDGET, help="Only what keeps within it: 6GB, or 50% of plain training's peak."),
    click.option("--batch", type=Integer(min=1), help="Only what serves this batch."),
    _folder,
    group=zoo_command,
)
def list_command(
    terminal: Terminal,
    model: str | None,
    device: str | None,
    budget: str | None,
    batch: int | None,
    folder: Path | None,
) -> None:
    """List schedules: memory against overhead."""
    from monetlite.reporting.text_zoo import print_entries

    there = _shelf(folder).entries()
    entries = matching(there, model=model, device=device, budget=budget, batch=batch)
    if terminal.as_json:
        terminal.print_json([{**entry.data(), "name": entry.name} for entry in entries])
    elif entries:
        print_entries(terminal.console, entries, folder)
    else:
        click.echo(f"no schedule matches; there are schedules of {known_models(model or '', there)}")


@command("show", click.argument("name"), _folder, group=zoo_command)
def show_command(terminal: Terminal, name: str, folder: Path | None) -> None:
    """Show one schedule: NAME as zoo:resnet50@6GB, or a file."""
    from monetlite.reporting.text_solve import schedule_facts
    from monetlite.reporting.text_zoo import print_shared

    file, schedule = _find(name, folder)
    if terminal.as_json:
        terminal.print_json({**schedule_facts(schedule), "file": file})
    else:
        print_shared(terminal.console, file, schedule)


@command(
    "get",
    click.argument("name"),
    output_option("Copy; by default the file's own name and its device, here."),
    _folder,
    group=zoo_command,
)
def get_command(terminal: Terminal, name: str, output: Path | None, folder: Path | None) -> None:
    """Copy one schedule out of the collection: NAME as zoo:resnet50@6GB."""
    file, schedule = _find(name, folder)
    target = output or name_of_copy(file, schedule.device)
    check_writable(target)
    replaced = " (in place of an earlier file)" if target.exists() else ""
    schedule.save(target)
    if terminal.as_json:
        terminal.print_json({"file": file, "output": str(target)})
    else:
        click.echo(f"{file} written to {target}{replaced}")


@command("check", click.argument("files", nargs=-1, type=click.Path(path_type=Path)), _folder, group=zoo_command)
def check_command(terminal: Terminal, files: tuple[Path, ...], folder: Path | None) -> None:
    """Check schedule files against this version: schema, legality, budget, peak and latency as written.

    Without FILES, every file of the collection. Exit code 4 if any fails.
    """
    from monetlite.reporting.text_zoo import print_checked
    from monetlite.zoo.check import Checked, Checker

    shelf = None if files else _shelf(folder)
    if shelf is not None and not shelf.files():
        shelf.entries()  # says that there is no collection
    checker = Checker()
    places = ((shelf.folder / file, file) for file in shelf.files()) if shelf else ((file, None) for file in files)
    found: list[Checked] = []
    for path, name in places:
        with terminal.line(f"checking {name or path}"):
            checked = checker.check(path, name)
        found.append(checked)
        if not terminal.as_json:
            print_checked(terminal.console, checked)
    stale = shelf is not None and not any(item.problems for item in found) and shelf.stale()
    failed = sum(not item.passed for item in found)
    if terminal.as_json:
        facts = [{"file": item.file, "problems": list(item.problems)} for item in found]
        terminal.print_json({"files": facts, "index_is_stale": stale})
    else:
        if stale:
            click.echo("the index is not that of the files; run `monetlite zoo add` or scripts/make_zoo.py")
        click.echo(f"{len(found) - failed} of {len(found)} files are sound")
    if failed or stale:
        raise CommandExit(EXIT_FAILED)


@command("add", click.argument("file", type=click.Path(path_type=Path)), _folder, force_option, group=zoo_command)
def add_command(terminal: Terminal, file: Path, folder: Path | None) -> None:
    """Check a schedule file and put it into a collection, under the name that its contents give it."""
    from monetlite.zoo.check import Checker

    shelf = _shelf(folder)
    with terminal.line(f"checking {file}"):
        checked = Checker().check(file)
    if not checked.passed or checked.schedule is None:
        raise ScheduleFileError(f"{file} is not sound, and was not added: {'; '.join(checked.problems)}")
    target = shelf.folder / file_name(checked.schedule)
    if target.is_file() and target.read_bytes() != schedule_text(checked.schedule).encode():
        check_writable(target)
    entry = shelf.add(checked.schedule)
    if terminal.as_json:
        terminal.print_json(entry.data())
    else:
        click.echo(f"{file} added as {entry.file}")


@command(
    "import",
    click.argument("file", type=click.Path(path_type=Path)),
    click.option(
        "--with",
        "ours",
        help="A schedule to put beside it: a file, or a name such as zoo:resnet50@6GB. By default the fastest "
        "shipped one for a P100 of the same model, batch and budget.",
    ),
    click.option(
        "--time-limit",
        type=click.FloatRange(min=0, min_open=True),
        help="Also solve for this many seconds on the graph and the costs in the file.",
    ),
    _folder,
    group=zoo_command,
)
def import_command(
    terminal: Terminal, file: Path, ours: str | None, time_limit: float | None, folder: Path | None
) -> None:
    """Read one of MONeT's published solutions beside monetlite's own. It is a pickle; nothing in it is run."""
    from monetlite.reporting.text_solve import schedule_facts
    from monetlite.reporting.text_zoo import print_monet
    from monetlite.zoo.monet_solutions import read_monet, similar_entry, solve_again

    theirs = read_monet(file)
    same_costs = None
    if time_limit is not None:
        with terminal.line(f"solving for {time_limit:g} s on the costs in the file"):
            same_costs = solve_again(theirs, time_limit)
    name, schedule = (None, None)
    if ours is not None:
        name, schedule = _find(ours, folder)
    elif entry := similar_entry(theirs, (shelf := _shelf(folder)).entries()):
        name, schedule = entry.file, shelf.load(entry)
    if terminal.as_json:
        facts = {
            "monet": theirs.data(),
            "same_costs": None if same_costs is None else schedule_facts(same_costs),
            "ours": None if schedule is None else {**schedule_facts(schedule), "file": name},
        }
        terminal.print_json(facts)
    else:
        print_monet(terminal.console, theirs, same_costs, schedule, name)


def _shelf(folder: Path | None) -> Shelf:
    return shipped() if folder is None else Shelf(folder)


def _find(name: str, folder: Path | None) -> tuple[str, Schedule]:
    if not name.startswith(PREFIX) and Path(name).exists():
        return name, load_schedule(name)
    shelf = _shelf(folder)
    if name.endswith((".yaml", ".yml")) and name not in shelf.files():
        return name, load_schedule(name)  # which says what is the matter with it
    entry = find_entry(name, shelf)
    return entry.file, shelf.load(entry)
