"""The command line, run inside of the tests."""

from click.testing import CliRunner

from monetlite import cli


def run(*arguments, columns=None):
    """A command's result; a failure that it has no message for is raised."""
    env = {} if columns is None else {"COLUMNS": str(columns)}
    result = CliRunner().invoke(cli.main, [str(item) for item in arguments], env=env)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result
