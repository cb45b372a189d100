"""What every test needs: a cache of its own, few threads, short measurements, helper modules on the path."""

import functools
import gc
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from hypothesis import HealthCheck, settings
from torch.utils import _pytree as pytree

import monetlite
import monetlite.tracing
from monetlite.profiling import memory_records, meters
from monetlite.solving.annealing import compiling

for folder in (Path(__file__).parent, Path(__file__).parent / "solving"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))

settings.register_profile(
    "monetlite",
    # An example takes as long as the machine's other work makes it.
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    # The same examples in every run, and others where there is time.
    derandomize="MONETLITE_THOROUGH" not in os.environ,
)
settings.load_profile("monetlite")


def pytest_configure():
    """Hear Ctrl-C, which jobs in the background ignore: tests press it, here and in processes that they start."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    """Begin with tests that look at the process's memory, which thousands of tests leave in many pieces.

    Leave tests that take long, of what others test in part, to a person with time.
    """
    items.sort(key=lambda item: item.get_closest_marker("early") is None)
    if "MONETLITE_THOROUGH" not in os.environ:
        for item in items:
            if item.get_closest_marker("thorough"):
                item.add_marker(pytest.mark.skip(reason="MONETLITE_THOROUGH=1 runs it"))


@pytest.fixture(scope="session", autouse=True)
def _few_threads():
    """Threads that share a core wait for each other; so do those of programs that tests start."""
    beside_others = "PYTEST_XDIST_WORKER" in os.environ
    threads = 1 if beside_others else min(2, torch.get_num_threads())
    torch.set_num_threads(threads)
    os.environ["OMP_NUM_THREADS"] = str(threads)


@pytest.fixture(scope="session", autouse=True)
def _compiled(tmp_path_factory):
    """Solves of a second or two have what they need from the first one on; one of several workers compiles it."""
    with FileLock(tmp_path_factory.getbasetemp().parent / "compiling.lock"):
        compiling.ensure_compiled(time.monotonic() + 600)


@pytest.fixture(scope="session", autouse=True)
def _public_names():
    """The package looks names up when they are first used, and keeps them: not while a test has replaced one."""
    for name in monetlite.__all__:
        getattr(monetlite, name)


@pytest.fixture(scope="session", autouse=True)
def _no_structured_traces():
    """Pytest listens to loggers that don't propagate, for which torch then makes megabytes of records.

    Some of its listeners came before this: torch makes records as long as there is one.
    """
    records = logging.getLogger("torch.__trace")
    records.propagate = True
    records.handlers.clear()


@pytest.fixture(scope="session", autouse=True)
def _quick_compilations():
    """TorchDynamo times guards, with empty caches, and AOTAutograd prints programs: nothing reads that."""
    with pytest.MonkeyPatch.context() as patch:
        compiling_graphs = torch._functorch._aot_autograd.graph_compile
        patch.setattr(compiling_graphs, "_log_joint_graph", lambda *_: None, raising=False)
        patch.setattr(compiling_graphs, "_log_fw_bw_graphs", lambda *_: (None, None), raising=False)
        patch.setattr(torch._dynamo.guards, "profile_guard_manager", lambda *_: 0.0, raising=False)
        yield


@pytest.fixture(scope="session", autouse=True)
def _collected_in_the_end():
    yield
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def _rare_collections():
    """What there is stays: going through it for garbage, again and again, takes a fifth of the suite's time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


@pytest.fixture(autouse=True)
def _short_measurements(monkeypatch):
    """No test depends on how long a call takes: the fewest runs do, and caches as small as any to empty."""
    monkeypatch.setattr(meters, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(meters, "MAX_CACHE_BYTES", 2**20)


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    """Where measured costs are kept: never in a person's own cache."""
    folder = tmp_path / "monetlite-cache"
    monkeypatch.setenv("MONETLITE_CACHE", str(folder))
    return folder


@pytest.fixture
def work_folder(tmp_path, monkeypatch):
    """An empty folder that a person is in."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture(autouse=True)
def _fresh_random_numbers():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _forget_compiled_programs():
    """Dynamo keeps what it compiled for as long as the process lives; a suite of many models need not."""
    yield
    torch._dynamo.reset()
    _ = (
        memory_records.may_profile() or memory_records.may_profile()
    )  # the record of a step that a test left ends here


_TRACED = {}


@pytest.fixture
def traced_once(monkeypatch):
    """A command's model that was traced in the same way for an earlier command is not traced again."""
    trace = monetlite.tracing.trace

    @functools.wraps(trace)
    def traced(model, example_inputs, **options):
        tensors = [item for item in pytree.tree_leaves(example_inputs) if isinstance(item, torch.Tensor)]
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        key = repr((
            model, model.training, pytree.tree_structure(example_inputs), options,
            [(item.shape, item.dtype, item.device, item.requires_grad, item.stride()) for item in tensors],
            [(name, item.shape, item.dtype, item.device, item.requires_grad) for name, item in named.items()],
            torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cpu"),
        ))  # fmt: skip
        if key not in _TRACED:
            _TRACED[key] = trace(model, example_inputs, **options)
        return _TRACED[key]

    monkeypatch.setattr(monetlite.tracing, "trace", traced)
