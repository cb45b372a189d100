"""The `monetlite` command: one file for each of its commands.

Exit codes: 0 done; 2 usage (a bad option, budget, model or device, or a file that would be overwritten);
3 infeasible; 4 anything else (a schedule that does not pass `check`, a file that can't be read or written, Ctrl-C).
"""

import io
import os
import signal
import sys
import threading
from typing import Any, TextIO

import click

from monetlite import __version__
from monetlite.cli.check_command import check_command, verify_command
from monetlite.cli.compare_command import compare_command
from monetlite.cli.exits import EXIT_FAILED, INTERRUPTED, CommandInterrupted
from monetlite.cli.export_command import export_command
from monetlite.cli.fit_command import fit_command
from monetlite.cli.measure_command import measure_command, profile_command
from monetlite.cli.show_command import explain_command, plot_command, rescale_command, show_command
from monetlite.cli.solve_command import max_batch_command, solve_command
from monetlite.cli.zoo_commands import zoo_command
from monetlite.core.interrupts import BOUND_THREAD


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="monetlite")
def main() -> None:
    """Train PyTorch models within a memory budget."""


NOW = (
    fit_command,
    solve_command,
    show_command,
    check_command,
    measure_command,
    compare_command,
    export_command,
    zoo_command,
)
BEFORE = (explain_command, plot_command, rescale_command, verify_command, profile_command, max_batch_command)
"""Old names, which work as before and are not listed."""
for _command in (*NOW, *BEFORE):
    main.add_command(_command)


class ReadUntilClosed(io.FileIO):
    """Output that goes nowhere once its reader has left (`| head -1`), so that a command still does its work.

    Attributes:
        lost: the reason for which output was lost otherwise, such as a full disk.
    """

    lost: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.lost = None if isinstance(error, BrokenPipeError) else error
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return len(data)


def printing_to(stream: TextIO | None) -> Any:
    """A stream to the same place, for a reader who may leave and a terminal that may lack characters.

    None, if the process was started without.
    """
    if stream is None:
        return None
    raw = ReadUntilClosed(stream.fileno(), "w", closefd=False)
    lines = raw.isatty() or stream is sys.stderr
    return io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, "replace", line_buffering=lines)


def run() -> None:
    """Run the command as a process, which ends as it should while a solver is still at work.

    Threads in a solver's own code can't be stopped at once, and would be there when it is torn down: the process
    would end by an abort, after all is done.
    """
    sys.stdout, sys.stderr = printing_to(sys.stdout), printing_to(sys.stderr)
    streams = [stream for stream in (sys.stdout, sys.stderr) if stream is not None]
    at_once = False
    try:
        ended = main.main(standalone_mode=False)
        code = ended if isinstance(ended, int) else 0
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except click.Abort:  # before the command itself
        click.echo(INTERRUPTED, err=True)
        code, at_once = EXIT_FAILED, True
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
        at_once = isinstance(left, CommandInterrupted)  # Python would end by a signal in place of the code
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done; Python would end by the signal in place of the code
    for stream in streams:
        stream.flush()
    if lost := next((stream.buffer.raw.lost for stream in streams if stream.buffer.raw.lost), None):
        click.echo(f"monetlite: the output can't be written: {lost.strerror}", err=True)
        sys.stderr.flush()
        code = EXIT_FAILED
    if at_once or any(thread.name == BOUND_THREAD for thread in threading.enumerate()):
        os._exit(code)
    sys.exit(code)
