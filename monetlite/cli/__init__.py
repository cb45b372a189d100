"""The `monetlite` command: one file for each of its commands.

Exit codes: 0 done, 2 usage (a bad option, budget, model or device), 3 infeasible, 4 anything else (a schedule
that does not pass `check` among it).
"""

import io
import os
import sys
import threading
from typing import Any, TextIO

import click

from monetlite import __version__
from monetlite.cli.check_command import check_command, verify_command
from monetlite.cli.compare_command import compare_command
from monetlite.cli.measure_command import measure_command, profile_command
from monetlite.cli.show_command import explain_command, plot_command, rescale_command, show_command
from monetlite.cli.solve_command import max_batch_command, solve_command
from monetlite.cli.zoo_commands import zoo_command
from monetlite.core.interrupts import BOUND_THREAD


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="monetlite")
def main() -> None:
    """Train PyTorch models within a memory budget."""


NOW = (solve_command, show_command, check_command, measure_command, compare_command, zoo_command)
BEFORE = (explain_command, plot_command, rescale_command, verify_command, profile_command, max_batch_command)
"""Old names, which work as before and are not listed."""
for _command in (*NOW, *BEFORE):
    main.add_command(_command)


class ReadUntilClosed(io.FileIO):
    """Output that goes nowhere once its reader has left (`| head -1`), so that a command still does its work."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return len(data)


def printing_to(stream: TextIO) -> TextIO:
    """A stream to the same place, for a reader who may leave and a terminal that may lack characters."""
    raw = ReadUntilClosed(stream.fileno(), "w", closefd=False)
    lines = raw.isatty() or stream is sys.stderr
    return io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, "replace", line_buffering=lines)


def run() -> None:
    """Run the command as a process, which ends as it should while a solver is still at work.

    Threads in a solver's own code can't be stopped at once, and would be there when it is torn down: the process
    would end by an abort, after all is done.
    """
    sys.stdout, sys.stderr = printing_to(sys.stdout), printing_to(sys.stderr)
    try:
        main()
    except SystemExit as left:
        if any(thread.name == BOUND_THREAD for thread in threading.enumerate()):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(left.code if isinstance(left.code, int) else left.code is not None)
        raise
