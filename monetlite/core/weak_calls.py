"""Functions for others to hold that call a method, and don't keep its object alive."""

import functools
import weakref
from collections.abc import Callable
from typing import Any


def weakly(method: Callable[..., Any], *given: Any) -> Callable[..., Any]:
    """A function that calls a method of an object as long as there is this object.

    Args:
        method: a bound method.
        given: its first arguments.

    Returns:
        A function of the other arguments. It returns None once the object is gone.
    """
    return functools.partial(_call, weakref.WeakMethod(method), *given)


def _call(method: "weakref.WeakMethod[Callable[..., Any]]", *arguments: Any) -> Any:
    found = method()
    return None if found is None else found(*arguments)
