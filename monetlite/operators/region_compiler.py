"""Regions compiled beforehand by two processes at a time, into Inductor's cache on disk.

Inductor and its C++ compiler take seconds a region, of one core. This process then finds each region in the cache,
in tenths of a second. Only CPU regions are compiled so: for GPUs, Inductor has processes of its own.
"""

import contextlib
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from monetlite.core.announcing import tell
from monetlite.core.child_processes import own_environment
from monetlite.fx.torch_internals.torch_inductor import cache_folder
from monetlite.operators.regions import TEXTS, compile_text

PROCESSES = 2
DONE = "done\n"
_COMMAND = "from monetlite.operators.region_compiler import serve; serve()"


def compile_ahead(targets: Iterable[str]) -> None:
    """Compile the regions among some targets of calls, unless there are too few for that to pay; tell of it.

    Those that are in the cache are left out. One that can't be compiled is left for its first call, which raises
    the error.
    """
    texts = [TEXTS[target] for target in dict.fromkeys(targets) if target in TEXTS]
    texts = [text for text in texts if _is_for_cpu(text) and not _marker(text).exists()]
    if len(texts) <= PROCESSES:
        return
    tell(f"compiling {len(texts)} regions in {PROCESSES} processes")
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(_process(texts[number::PROCESSES])) for number in range(PROCESSES)]
        done = sum(line == DONE for process in processes for line in process.stdout or ())
    tell(f"compiled {done} of {len(texts)} regions in {time.monotonic() - began:.0f} s")


def _is_for_cpu(text: str) -> bool:
    return {device for *_, device in json.loads(text)["inputs"]} <= {"cpu"}


def _marker(text: str) -> Path:
    """The file beside Inductor's own that says that a region was compiled, for so many threads of such a CPU."""
    cpu = f"{torch.get_num_threads()} {torch.backends.cpu.get_cpu_capability()}"
    digest = hashlib.sha256(f"{text} {cpu} {torch.__version__}".encode()).hexdigest()
    return Path(cache_folder()) / "monetlite_regions" / digest[:24]


@contextlib.contextmanager
def _process(texts: Sequence[str]) -> "Iterator[subprocess.Popen[str]]":
    """A process that compiles regions; it is ended with the block."""
    process = subprocess.Popen(
        [sys.executable, "-c", _COMMAND],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=own_environment(),
    )
    try:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps({"threads": torch.get_num_threads(), "texts": list(texts)}))
            process.stdin.close()
        yield process
    finally:
        process.kill()
        process.wait()


def serve() -> None:
    """Compile the regions that come on the standard input, and write a line for each that could be compiled."""
    work = json.load(sys.stdin)
    torch.set_num_threads(work["threads"])
    for text in work["texts"]:
        try:
            compile_text(text)
        except Exception:  # the first call raises it again
            continue
        marker = _marker(text)
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
        sys.stdout.write(DONE)
        sys.stdout.flush()  # ends this process where the other one has ended
