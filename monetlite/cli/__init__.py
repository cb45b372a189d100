"""The `monetlite` command: one file for each of its commands.

Exit codes: 0 done, 2 usage (a bad option, budget, model or device), 3 infeasible, 4 anything else (a schedule
that does not pass `verify` among it).
"""

import os
import sys
import threading

import click

from monetlite import __version__
from monetlite.cli.compare_command import compare_command
from monetlite.cli.explain_command import explain_command
from monetlite.cli.max_batch_command import max_batch_command
from monetlite.cli.measure_command import measure_command
from monetlite.cli.plot_command import plot_command
from monetlite.cli.profile_command import profile_command
from monetlite.cli.rescale_command import rescale_command
from monetlite.cli.solve_command import solve_command
from monetlite.cli.verify_command import verify_command
from monetlite.cli.zoo_commands import zoo_command
from monetlite.core.interrupts import BOUND_THREAD


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="monetlite")
def main() -> None:
    """Train PyTorch models within a memory budget."""


for _command in (
    solve_command,
    profile_command,
    measure_command,
    verify_command,
    compare_command,
    explain_command,
    plot_command,
    zoo_command,
    rescale_command,
    max_batch_command,
):
    main.add_command(_command)


def run() -> None:
    """Run the command as a process, which ends as it should while a solver is still at work.

    Threads in a solver's own code can't be stopped at once, and would be there when it is torn down: the process
    would end by an abort, after all is done.
    """
    try:
        main()
    except SystemExit as left:
        if any(thread.name == BOUND_THREAD for thread in threading.enumerate()):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(left.code if isinstance(left.code, int) else left.code is not None)
        raise
