"""Ctrl-C: a solve returns its best so far, more than a solve ends; so do processes in which a solver is at work."""

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch
from torch import nn

import monetlite
from monetlite.core.interrupts import BOUND_THREAD, interrupts_kept
from monetlite.core.options import SolvingOptions
from monetlite.planning.batches import largest_batch
from monetlite.solving.incumbent import Incumbent

heard: list[bool] = []


@pytest.fixture
def pressed(monkeypatch):
    """Presses Ctrl-C once something has been found, and counts the solves that then begin."""
    begun, done = [], []
    offer, begin = Incumbent.offer, Incumbent.__init__

    def counting(self, *args):
        begin(self, *args)
        if self.budget_bytes >= 0:
            begun.append(self)

    def pressing(self, *args):
        taken = offer(self, *args)
        if self.steps is not None and len(begun) == 1 and not done:
            done.append(True)  # a second one would come to whatever runs next
            os.kill(os.getpid(), signal.SIGINT)
        return taken

    monkeypatch.setattr(Incumbent, "__init__", counting)
    monkeypatch.setattr(Incumbent, "offer", pressing)
    return begun


def price(batch):
    layers = [module for _ in range(4) for module in (nn.Linear(64, 64), nn.Tanh())]
    return monetlite.profile(monetlite.trace(nn.Sequential(*layers), torch.randn(batch, 64)), "rtx-3090")


def test_a_solve_returns_what_it_has(pressed):
    assert monetlite.solve(price(512), "100%", time_limit=30).peak_bytes > 0


def test_a_solve_that_has_nothing_yet_ends(monkeypatch):
    """It is interrupted, and not infeasible."""
    offer = Incumbent.offer

    def pressing(self, *args):
        taken = offer(self, *args)
        os.kill(os.getpid(), signal.SIGINT)
        return taken

    profile = price(512)
    monkeypatch.setattr(Incumbent, "offer", pressing)
    with pytest.raises(KeyboardInterrupt):
        monetlite.solve(profile, "90%", time_limit=30)


@pytest.mark.parametrize(
    "run",
    [
        lambda: monetlite.sweep(price(512), ["100%", "90%", "80%"], time_limit=30),
        lambda: largest_batch(price, 2_000_000, SolvingOptions(time_limit=60), first=512, step=64),
        lambda: monetlite.optimize(
            nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)),
            torch.randn(64, 8),
            "100%",
            device="rtx-3090",
        ),
    ],
    ids=["sweep", "largest batch", "optimize"],
)
def test_more_than_a_solve_ends(run, pressed):
    with pytest.raises(KeyboardInterrupt):
        run()
    assert len(pressed) == 1


@pytest.mark.parametrize("own", [signal.SIG_IGN, lambda *_: heard.append(True)], ids=["ignored", "noted"])
def test_a_person_s_own_handler_stays(own):
    heard.clear()
    before = signal.signal(signal.SIGINT, own)
    try:
        with interrupts_kept():
            os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == ([] if own is signal.SIG_IGN else [True])


def test_handlers_are_put_back_and_other_threads_left_alone():
    before = signal.getsignal(signal.SIGINT)
    with interrupts_kept():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
    seen = []

    def elsewhere():
        with interrupts_kept():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [before]


def test_an_interrupt_that_a_callback_loses_comes_again():
    """Python prints exceptions of a weak reference's callback, and goes on."""

    class Value:
        pass

    def work():
        value = Value()
        watched = weakref.ref(value, lambda reference: os.kill(os.getpid(), signal.SIGINT))
        del value
        for _ in range(1000):
            time.sleep(0.01)
        ended.append(watched)

    hook, ended = sys.unraisablehook, []
    with pytest.raises(KeyboardInterrupt), interrupts_kept():
        work()
    assert ended == []
    assert sys.unraisablehook is hook


def test_a_process_ends_with_the_one_that_began_it():
    program = """
import os, time
from monetlite.core.child_processes import begin_call
begin_call(time.sleep, 120)
print(__import__("multiprocessing").active_children()[0].pid, flush=True)
os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    deadline = time.monotonic() + 60
    while alive(int(done.stdout)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive(int(done.stdout))


def alive(pid):
    """True unless a process ended. Nobody may have asked for its exit code."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_process_ends_by_its_exit_code_while_bounds_are_computed():
    """The thread is in a solver's own code for much longer."""
    program = f"""
import sys, threading, time
threading.Thread(target=time.sleep, args=(60,), name={BOUND_THREAD!r}, daemon=True).start()
sys.argv = ["monetlite", *sys.argv[1:]]
from monetlite.cli import run
run()
"""
    for arguments, code in ((["--version"], 0), (["solve", "--bogus"], 2)):
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False
        )
        assert done.returncode == code
        assert done.stdout or done.stderr
        assert time.monotonic() - began < 50


@pytest.mark.thorough
def test_the_end_of_a_process_waits_for_a_bound_that_was_told_to_stop():
    """HiGHS has threads that abort a process which ends before them."""
    program = """
import time, torch, monetlite
from monetlite.solving import solver

def bound(self):
    self.stopped.wait()
    time.sleep(0.5)
    print("ended", flush=True)

solver._GRACE_SECONDS, solver._PeakSolve._bound = 0.0, bound
layers = [layer for _ in range(24) for layer in (torch.nn.Linear(64, 64), torch.nn.GELU())]
monetlite.optimize(torch.nn.Sequential(*layers), torch.randn(4096, 64), "60%", device="rtx-3090", time_limit=1)
print("solved", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["solved", "ended"]
