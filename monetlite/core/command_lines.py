"""Commands that messages suggest."""

import shlex
from collections.abc import Iterable, Mapping


def command_line(command: str, options: Mapping[str, object], arguments: Iterable[object] = ()) -> str:
    """Write a command as a shell takes it.

    Args:
        command: its name.
        options: values by name. True stands for a flag, None and False for an option that is left out, a list for
            one that is repeated.
        arguments: its arguments, which stand first.

    >>> command_line("solve", {"model": "a b.py:build", "input_size": (224, 224), "reserved": True, "batch": None})
    "monetlite solve --model 'a b.py:build' --input-size 224x224 --reserved"
    """
    words = ["monetlite", *command.split(), *map(str, arguments)]
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        for item in value if isinstance(value, list) else [value]:
            if item is True:
                words.append(flag)
            elif item is not None and item is not False:
                words += [flag, "x".join(map(str, item)) if isinstance(item, tuple) else str(item)]
    return shlex.join(words)
