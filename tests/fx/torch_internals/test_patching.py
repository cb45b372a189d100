"""The lock around changes of torch's state is the one that TorchDynamo holds while it compiles."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.convert_frame import compile_lock

from monetlite.fx.torch_internals.patching import patched


def in_a_thread(run: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(run()))
    thread.start()
    thread.join()
    return found[0]


def is_free() -> bool:
    """True where another thread could take the lock now."""
    free = compile_lock.acquire(blocking=False)
    if free:
        compile_lock.release()
    return free


def test_dynamo_holds_the_lock_while_a_backend_compiles() -> None:
    free = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        free.append(in_a_thread(is_free))
        with patched():  # the compiling thread itself may
            return graph

    torch._dynamo.reset()
    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert free == [False]
    assert in_a_thread(is_free)


def test_changes_are_made_by_one_thread_and_undone_in_reverse_whatever_happens() -> None:
    made: list[str] = []

    @contextlib.contextmanager
    def change(name: str) -> Iterator[None]:
        made.append(name)
        yield
        made.append(f"{name} undone")

    with patched(change("first"), change("second")):
        assert made == ["first", "second"]
        assert not in_a_thread(is_free)
    assert made == ["first", "second", "second undone", "first undone"]
    assert in_a_thread(is_free)

    class Broken(Exception):
        pass

    undone: list[int] = []
    with contextlib.ExitStack() as last:
        last.callback(undone.append, 1)
        with pytest.raises(Broken), patched(last.pop_all()):
            raise Broken
    assert undone == [1]
    assert in_a_thread(is_free)
