"""Processes of this Python beside this one."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")

NICENESS = 13
"""Of a process that gives way: beside one that wants a core, too, it gets a twentieth of it."""

PARENT_SECONDS = 1.0
"""Time between looks at whether a parent is there."""


def own_environment() -> dict[str, str]:
    """Variables of a process that finds the modules that this one finds."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}


def give_way(process: "subprocess.Popen[bytes]") -> None:
    """Have a process give way to training.

    Training that takes every core waits for its slowest thread. On two threads, a step beside a busy process took 4
    times as long, and 1.04 times beside one that gives way so.
    """
    if hasattr(os, "setpriority"):
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)


def end_with(parent: int, tidy_up: Callable[[], object]) -> None:
    """End this process once the one that began it is gone, however that ended; tidy up before.

    Args:
        parent: its number, which it has told: it may be gone by now.
        tidy_up: called first.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_SECONDS)
        tidy_up()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class ChildFailed(RuntimeError):
    """A process ended without a result of its call that can be read."""


def begin_call(function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> Callable[[], _T]:
    """Begin a call in a process beside this one, which ends with this one. What it prints is left out.

    Args:
        function, args, kwargs: of the call. They are pickled, and so is the result.

    Returns:
        Waits for the call's result. Raises what the call raises, or ChildFailed.
    """
    context = multiprocessing.get_context("spawn")  # a copy of this process would lack threads that torch counts on
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_result, args=(sender, function, args, kwargs), daemon=True)
    with _without_interrupts():
        process.start()
    sender.close()

    def result() -> _T:
        try:
            error, value = receiver.recv()
        except Exception as lost:  # the process ended, or its result can't be unpickled
            process.join()
            raise ChildFailed(f"a process of monetlite ended with exit code {process.exitcode}") from lost
        process.join()
        if error is not None:
            raise error
        found: _T = value
        return found

    return result


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Have processes that begin in a block not hear Ctrl-C, which ends this one, and them with it."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # where multiprocessing starts it, it lets interrupts through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _send_result(
    sender: Connection, function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for standard in (1, 2):
        os.dup2(nowhere, standard)
    try:
        answer: tuple[Exception | None, object] = (None, function(*args, **kwargs))
    except Exception as error:  # raised in the process that waits
        answer = (error, None)
    sender.send(answer)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
