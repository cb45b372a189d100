"""The `monetlite` command: one file for each of its commands.

Exit codes: 0 done, 2 usage (a bad option, budget, model or device), 3 infeasible, 4 anything else (a schedule
that does not pass `check` among it).
"""

import os
import sys
import threading

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
