"""The place where a command prints: results on stdout; on stderr, live or as a log, the work that it does."""

import contextlib
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator

import click

from monetlite.cli.exits import EXIT_FAILED, INTERRUPTED
from monetlite.core.files.plain_data import json_text
from monetlite.core.units import format_bytes, format_ms
from monetlite.solving.incumbent import Solution

DEFAULT_WIDTH = 80
"""Characters of a line where COLUMNS is 0: it is not known."""
LOG_SECONDS = 10.0
"""Least time between two lines about one piece of work in a log."""


class Terminal:
    """The console of a command.

    A piece of work that can take more than two seconds is told on stderr before it begins: as a line or a bar that
    goes away where stderr is a terminal, as plain lines elsewhere.
    """

    def __init__(self, as_json: bool) -> None:
        from rich.console import Console

        self.as_json = as_json
        self.console = Console(highlight=False, soft_wrap=False)
        self._aside = Console(stderr=True, highlight=False)
        for console in (self.console, self._aside):
            console.width = console.width or DEFAULT_WIDTH
        self._live = self._aside.is_terminal and not self._aside.is_dumb_terminal

    def print_json(self, facts: object) -> None:
        click.echo(json_text(facts))

    def tell(self, text: str) -> None:
        """Print a line that stays, on stderr: an assumption that is made before the work."""
        click.echo(f"monetlite: {text}", err=True)

    def import_torch(self) -> None:
        """Import torch, which takes seconds the first time."""
        if "torch" not in sys.modules:
            with self.line("importing torch"):
                self._import("torch")

    def _import(self, module: str) -> None:
        """Import a module of compiled code.

        Ctrl-C ends the process at once: an exception would leave it half-imported, or get lost in its import.
        """

        def leave(*_: object) -> None:
            os.write(2, b"\r\x1b[2K\x1b[?25h" * self._live + f"{INTERRUPTED}\n".encode())
            os._exit(EXIT_FAILED)

        before = signal.signal(signal.SIGINT, leave)
        try:
            importlib.import_module(module)
        finally:
            signal.signal(signal.SIGINT, before)

    @contextlib.contextmanager
    def bar(self, text: str) -> Iterator[Callable[[int, int], None]]:
        """A progress bar, called with pieces of work done and in all."""
        with self.named_bar(text) as update:
            yield lambda done, total: update(text, done, total)

    @contextlib.contextmanager
    def named_bar(self, text: str) -> Iterator[Callable[[str, int, int], None]]:
        """A progress bar, called with the work that comes next, too."""
        if not self._live:
            say = _log(text, LOG_SECONDS)
            yield lambda what, done, total: say(f"{what}: {done} of {total}")
            return
        from rich.progress import Progress as Bar

        with Bar(console=self._aside, transient=True) as bar:
            task = bar.add_task(text, total=None)
            yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)

    @contextlib.contextmanager
    def line(self, text: str, log_seconds: float = 0.0) -> Iterator[Callable[[str], None]]:
        """A live line, called with its new text. In a log, lines follow each other after some time at least."""
        if not self._live:
            yield _log(text, log_seconds)
            return
        from rich.text import Text

        with self._aside.status(Text(text)) as status:
            yield lambda text: status.update(Text(text))

    @contextlib.contextmanager
    def solving(self, budget_bytes: int) -> Iterator[Callable[[Solution], None]]:
        """A live line of a solve: incumbent, bound, gap, peak, time."""
        with self.searching(f"solving within {format_bytes(budget_bytes)}") as tell:
            yield lambda event: tell(_progress_text(event))

    def searching(self, text: str) -> contextlib.AbstractContextManager[Callable[[str], None]]:
        """A live line of a search, which may have to be compiled first."""
        self._import("monetlite.solving.solver")
        from monetlite.solving.annealing.compiling import announcement, is_ready

        note = "" if is_ready() else f", after {announcement()}"
        return self.line(text + note, LOG_SECONDS)


def _log(text: str, seconds: float) -> Callable[[str], None]:
    """Print a line, and return a function that prints another one if so much time has passed."""
    click.echo(f"{text} ...", err=True)
    printed = time.monotonic()

    def update(text: str) -> None:
        nonlocal printed
        if time.monotonic() - printed >= seconds:
            click.echo(text, err=True)
            printed = time.monotonic()

    return update


def _progress_text(event: Solution) -> str:
    found = "nothing found yet"
    if event.latency_ms is not None and event.peak_bytes is not None:
        found = f"{format_ms(event.latency_ms)} at {format_bytes(event.peak_bytes)}, gap {event.gap:.1%}"
    return f"{event.seconds:.0f} s, {event.phase}: {found}, bound {format_ms(event.lower_bound_ms)}"
