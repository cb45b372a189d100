"""The run of a command: its options as objects, and errors as messages and exit codes."""

import contextlib
import inspect
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from monetlite.cli.command_options import Decorator, ModelChoice, with_options
from monetlite.cli.exits import (
    EXIT_FAILED,
    EXIT_INFEASIBLE,
    EXIT_USAGE,
    INTERRUPTED,
    CommandExit,
    CommandInterrupted,
)
from monetlite.cli.terminal import Terminal
from monetlite.core.command_lines import command_line
from monetlite.core.errors import BudgetError, DeviceError, InfeasibleBudget, ModelError, MonetliteError
from monetlite.core.interrupts import interrupts_kept
from monetlite.core.options import PricingOptions, SolvingOptions

_OBJECTS: dict[str, type[Any]] = {"choice": ModelChoice, "pricing": PricingOptions, "solving": SolvingOptions}
"""Parameters of commands that are made of several options, by name."""
_COMMON = (
    click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout."),
    click.option("--debug", is_flag=True, help="Show the traceback of an error."),
)


_NOT_SUGGESTED = ("as_json", "debug", "force", "output", "time_limit")
"""Parameters that are about one run of a command."""


class _Command(click.Command):
    """A command whose rare options stand below a heading of their own."""

    rare: Collection[str] = ()
    rare_heading = ""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, rare in (("Options", False), (self.rare_heading, True)):
            options = [item for item in self.get_params(ctx) if isinstance(item, click.Option)]
            items = [item for item in options if (item.name in self.rare) is rare]
            if rows := [row for item in items if (row := item.get_help_record(ctx))]:
                with formatter.section(heading):
                    formatter.write_dl(rows)


def was_given(name: str) -> bool:
    """True if a parameter stands on the command line."""
    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE


def suggested(command: str, *, without: Collection[str] = (), **changes: object) -> str:
    """A command with every option of this one that was given.

    Args:
        command: the command to suggest; options that it lacks are left out.
        without: parameters to leave out.
        changes: values of parameters that are other there.
    """
    context = click.get_current_context()
    target: Any = context.find_root().command
    for name in command.split():
        target = target.commands[name]
    left_out = {*without, *_NOT_SUGGESTED}
    given = {name: value for name, value in context.params.items() if was_given(name) and name not in left_out}
    given |= changes
    options = {
        item.opts[0].lstrip("-"): list(given[item.name]) if item.multiple else given[item.name]
        for item in target.params
        if isinstance(item, click.Option) and item.name in given
    }
    arguments = [given[item.name] for item in target.params if isinstance(item, click.Argument)]
    return command_line(command, options, arguments)


def only_for(use: str, *names: str) -> None:
    """Refuse options that are given on the command line and have no use there.

    Raises:
        UsageError: one of these parameters is given.
    """
    for item in click.get_current_context().command.params:
        if item.name in names and was_given(item.name):
            raise click.UsageError(f"{item.opts[0]} is for {use}")


def command(
    name: str,
    *options: Decorator,
    group: click.Group | None = None,
    keeps_best: bool = False,
    now: str = "",
    rare: Collection[str] = (),
    rare_heading: str = "Rare options",
) -> Callable[[Callable[..., None]], click.Command]:
    """Make a click command of a function, with --json and --debug.

    Args:
        name: of the command.
        options: click's options and arguments.
        group: the group that it joins.
        keeps_best: Ctrl-C ends the solve and not the command.
        now: the new spelling, for an old name: it is hidden, and says so on stderr.
        rare: parameters whose options --help lists below the others, under `rare_heading`.

    The function takes a `Terminal` and its options by name; parameters called `choice`, `pricing` and `solving` get
    the options that are fields of `ModelChoice`, `PricingOptions` and `SolvingOptions` as one object.
    """

    def decorate(function: Callable[..., None]) -> click.Command:
        def callback(as_json: bool, debug: bool, force: bool = False, **given: Any) -> None:
            if now:
                click.echo(f"monetlite: `{name}` is now `monetlite {now}`", err=True)
            terminal = Terminal(as_json)
            run = partial(function, terminal, **_grouped(function, given))
            guard(run, debug, keeps_best=keeps_best, terminal=terminal)

        callback.__doc__ = getattr(function, "func", function).__doc__
        made = click.command(name, cls=_Command, hidden=bool(now))(with_options(*options, *_COMMON)(callback))
        made.rare, made.rare_heading = rare, rare_heading
        if group is not None:
            group.add_command(made)
        return made

    return decorate


def _grouped(function: Callable[..., None], given: Mapping[str, Any]) -> dict[str, Any]:
    grouped = dict(given)
    for name in inspect.signature(function).parameters:
        if name in _OBJECTS:
            own = [item.name for item in fields(_OBJECTS[name]) if item.name in given]
            grouped[name] = _OBJECTS[name](**{option: grouped.pop(option) for option in own})
    return grouped


def guard(
    run: Callable[[], None], debug: bool, *, keeps_best: bool = False, terminal: Terminal | None = None
) -> None:
    """Turn errors into a message and an exit code; a traceback only with --debug.

    Ctrl-C ends a command, but one that `keeps_best`: the solve that it interrupts has a schedule, or none, as after
    its time limit.
    """
    try:
        with (
            contextlib.nullcontext() if keeps_best else interrupts_kept(),
            contextlib.nullcontext() if debug else _plain_warnings(),
        ):
            run()
    except (CommandExit, click.ClickException):
        raise
    except (KeyboardInterrupt, click.Abort):
        click.echo(INTERRUPTED, err=True)
        raise CommandInterrupted(EXIT_FAILED) from None
    except SystemExit as left:
        click.echo(
            f"monetlite: the model ended the program, by SystemExit({left.code!r}); nothing is known of it. Take "
            "sys.exit and exit out of its code",
            err=True,
        )
        raise SystemExit(EXIT_FAILED) from None
    except Exception as error:
        if debug:
            raise
        usage = isinstance(error, (BudgetError, DeviceError, ModelError))
        code = EXIT_INFEASIBLE if isinstance(error, InfeasibleBudget) else EXIT_USAGE if usage else EXIT_FAILED
        message = str(error) if isinstance(error, MonetliteError) else f"{type(error).__name__}: {error}"
        if not isinstance(error, MonetliteError):
            message += "\nThis is a bug in monetlite or in the model; run again with --debug for the traceback"
        click.echo(f"monetlite: {message}", err=True)
        if terminal is not None and terminal.as_json and isinstance(error, InfeasibleBudget):
            terminal.print_json(
                {
                    "status": "infeasible",
                    "budget_bytes": error.budget_bytes,
                    "smallest_proven_bytes": error.proven_bytes,
                    "smallest_reached_bytes": error.reached_bytes,
                    "error": message,
                }
            )
        raise SystemExit(code) from None


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """Print the text of a warning, without the line of code that warns."""
    default = warnings.formatwarning

    def plain(message: Warning | str, category: type[Warning], *where: Any) -> str:
        return f"warning: {message}\n" if category is UserWarning else default(message, category, *where)

    warnings.formatwarning = plain  # type: ignore[assignment]  # the line has a name there
    try:
        yield
    finally:
        warnings.formatwarning = default


def prints_aside() -> contextlib.AbstractContextManager[object]:
    """Print on stderr what a person's model prints: stdout is the command's."""
    return contextlib.redirect_stdout(sys.stderr)


def check_writable(target: Path, option: str = "--output") -> None:
    """Check that a file, which an option may have named, can be written, before time is spent on its contents.

    Raises:
        MonetliteError: there is no folder for it, or nothing can be written there by this name.
        UsageError: there is a file of this name, and no --force.
    """
    if not target.parent.is_dir():
        raise MonetliteError(f"{target} can't be written: there is no folder {target.parent}; create it first")
    name = target
    try:
        target = Path(os.path.realpath(target))
        if target.exists() and not target.is_file():
            raise MonetliteError(f"{target} can't be written: it is there, and not a file")
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", suffix=".part"):
            pass  # as the file will be written, to be renamed then
        there = target.exists()
    except OSError as error:
        raise MonetliteError(f"{target} can't be written: {error.strerror or error}") from error
    context = click.get_current_context()
    if there and not context.params.get("force"):
        named = any(option in item.opts for item in context.command.params)
        raise click.UsageError(
            f"{name} is there already; --force replaces it{f', {option} names another file' if named else ''}"
        )
