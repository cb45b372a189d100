"""Processes of this Python beside this one."""

import os
import sys


def own_environment() -> dict[str, str]:
    """Variables of a process that finds the modules that this one finds."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
