"""Ends of a command: exit codes, and the exceptions that carry them."""

EXIT_USAGE, EXIT_INFEASIBLE, EXIT_FAILED = 2, 3, 4
INTERRUPTED = "monetlite: interrupted; no file is half-written"


class CommandExit(SystemExit):
    """The end of a command with an exit code. Another SystemExit is a model's, and ends no command."""


class CommandInterrupted(CommandExit):
    """The end of a command by Ctrl-C."""
