"""What every command runs in: a console, progress where somebody looks, errors as messages and exit codes."""

import contextlib
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from monetlite.core.errors import BudgetError, DeviceError, InfeasibleBudget, ModelError, MonetliteError
from monetlite.core.interrupts import interrupts_kept
from monetlite.core.units import format_bytes, format_ms

if TYPE_CHECKING:
    from rich.console import Console

    from monetlite.solving.race import Progress

EXIT_USAGE, EXIT_INFEASIBLE, EXIT_FAILED = 2, 3, 4


class Exit(SystemExit):
    """A command's own end. Others are a model's, which ends no command."""


def open_console(as_json: bool) -> "tuple[Console, bool]":
    """A console for the report, and whether to keep progress to ourselves."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=False), as_json or not sys.stderr.isatty()


class Measuring:
    """A progress bar while operators are measured; None as the callback where nobody looks."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet

    def __enter__(self) -> Callable[[int, int], None] | None:
        if self._quiet:
            return None
        from rich.console import Console
        from rich.progress import Progress

        self._bar = Progress(console=Console(stderr=True), transient=True)
        task = self._bar.add_task("measuring operators", total=None)
        self._bar.start()

        def progress(done: int, total: int) -> None:
            self._bar.update(task, completed=done, total=total)

        return progress

    def __exit__(self, *error: object) -> None:
        if not self._quiet:
            self._bar.stop()


class Solving:
    """A live line while solving: incumbent, bound, gap, peak, time."""

    def __init__(self, quiet: bool, budget_bytes: int) -> None:
        self._quiet, self._budget_bytes = quiet, budget_bytes

    def __enter__(self) -> "Callable[[Progress], None] | None":
        if self._quiet:
            return None
        from rich.console import Console

        self._status = Console(stderr=True).status(f"solving within {format_bytes(self._budget_bytes)}")
        self._status.start()

        def progress(event: "Progress") -> None:
            found = "nothing found yet"
            if event.peak_bytes is not None:
                found = f"{format_ms(event.latency_ms)} at {format_bytes(event.peak_bytes)}, gap {event.gap:.1%}"
            self._status.update(
                f"{event.seconds:.0f} s: {found}, bound {format_ms(event.lower_bound_ms)} ({event.phase})"
            )

        return progress

    def __exit__(self, *error: object) -> None:
        if not self._quiet:
            self._status.stop()


class Telling:
    """A live line that says what is done at present; None as the callback where nobody looks."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet

    def __enter__(self) -> Callable[[str], None] | None:
        if self._quiet:
            return None
        from rich.console import Console

        self._status = Console(stderr=True).status("starting")
        self._status.start()
        return self._status.update

    def __exit__(self, *error: object) -> None:
        if not self._quiet:
            self._status.stop()


def check_folder(target: Path) -> None:
    """See that a file can be written, before time is spent on what goes into it.

    Raises:
        MonetliteError: there is no folder for it, or nothing can be written there by this name.
    """
    if not target.parent.is_dir():
        raise MonetliteError(f"{target} can't be written: there is no folder {target.parent}; create it first")
    try:
        target = Path(os.path.realpath(target))
        if target.exists() and not target.is_file():
            raise MonetliteError(f"{target} can't be written: it is there, and not a file")
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", suffix=".part"):
            pass  # as the file will be written, to be renamed then
    except OSError as error:
        raise MonetliteError(f"{target} can't be written: {error.strerror or error}") from error


class Sweeping:
    """A progress bar while several budgets are solved for, one after the other; None where nobody looks."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet

    def __enter__(self) -> Callable[[str, int, int], None] | None:
        if self._quiet:
            return None
        from rich.console import Console
        from rich.progress import Progress

        self._bar = Progress(console=Console(stderr=True), transient=True)
        task = self._bar.add_task("solving", total=None)
        self._bar.start()

        def progress(what: str, done: int, total: int) -> None:
            self._bar.update(task, description=what, completed=done, total=total)

        return progress

    def __exit__(self, *error: object) -> None:
        if not self._quiet:
            self._bar.stop()


def guard(run: Callable[[], None], debug: bool, *, keeps_best: bool = False) -> None:
    """Turn errors into a message and an exit code; a traceback only where it was asked for.

    Ctrl-C ends a command, but one that `keeps_best`: the solve that it interrupts has a schedule, or none, as after
    its time limit.
    """
    try:
        with (
            contextlib.nullcontext() if keeps_best else interrupts_kept(),
            contextlib.nullcontext() if debug else _plain_warnings(),
        ):
            run()
    except Exit:
        raise
    except (KeyboardInterrupt, click.Abort):
        click.echo("monetlite: interrupted; nothing was written", err=True)
        raise SystemExit(EXIT_FAILED) from None
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
        raise SystemExit(code) from None


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """Warnings for people: what they say, and not the line of code that says it."""
    default = warnings.formatwarning

    def plain(message: Warning | str, category: type[Warning], *where: Any) -> str:
        return f"warning: {message}\n" if category is UserWarning else default(message, category, *where)

    warnings.formatwarning = plain  # type: ignore[assignment]  # the line has a name there
    try:
        yield
    finally:
        warnings.formatwarning = default


def prints_aside() -> contextlib.AbstractContextManager[object]:
    """Have what a person's model prints on stderr: stdout is the command's."""
    return contextlib.redirect_stdout(sys.stderr)
