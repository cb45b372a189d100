"""One lock and one context manager for every change of torch's state."""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any


@contextlib.contextmanager
def patched(*changes: AbstractContextManager[Any]) -> Iterator[None]:
    """Apply changes of torch's state for the time of a block, one thread at a time, and undo them at its end.

    The lock is the one that TorchDynamo holds while it compiles (`torch._dynamo.convert_frame.compile_lock`). So no
    other thread compiles anything while torch is changed, and a thread that is compiling may apply changes. With a
    lock of our own, two threads could each wait for the lock of the other.
    """
    from torch._dynamo.convert_frame import compile_lock

    with compile_lock, contextlib.ExitStack() as undone:
        for change in changes:
            undone.enter_context(change)
        yield
