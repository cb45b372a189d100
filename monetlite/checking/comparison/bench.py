"""Measuring contenders in one process, where none is in another's way.

All train the same parameters, which no step changes, on the same inputs, and clear their gradients before a step:
beside the one that is measured, others hold their buffers and programs only. So there is one copy of the weights on
a GPU however many contenders there are.
"""

import contextlib
import gc
import platform
import subprocess
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import monetlite
from monetlite.checking.comparison.exactness import Examiner
from monetlite.checking.comparison.peer_runs import Peer, PeerRun
from monetlite.checking.trainee import Trainee, copied, leaf_copies, step_times_ms
from monetlite.core.errors import MonetliteError, first_line
from monetlite.core.schedule import Schedule
from monetlite.fx.torch_internals import torch_pytree as pytree
from monetlite.fx.torch_internals.torch_dynamo import allow_programs
from monetlite.profiling.memory_use import is_out_of_memory, refusals
from monetlite.profiling.meters import meter_for

MAX_REASON_LENGTH = 200
MAX_PROGRAMS = 256
"""Programs that torch.compile may make of one function, for all contenders and graph breaks together."""
OUT_OF_MEMORY = "out of memory"
BEYOND_LIMIT = "out of memory within the limit, so measured without it"
REFUSED = "libraries went without memory that was refused"
"""Fault of a step in which the limit left less than a library asked for, which then ran another algorithm."""


class Unsupported(Exception):
    """A way to train that this model, or this machine, doesn't allow; the message is the reason."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to train in one setting.

    Attributes:
        setting: in words. label: in a word or two, for pictures.
        prepare: makes what is trained of a copy of the model, which it may change, except for its parameters: those
            are every contender's. Parameters and buffers keep their names.
        asked_bytes: the budget, where it takes one.
        limit_bytes: memory that torch's CUDA allocator may reserve for the step, where that is limited.
    """

    peer: Peer
    setting: str = ""
    prepare: Callable[[nn.Module], nn.Module] = lambda model: model
    label: str = ""
    asked_bytes: int | None = None
    limit_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Entrant:
    """A contender's run, as far as it is measured.

    Attributes:
        trainee: None where the contender failed.
        schedule: what it trains by, if it does.
        refused: True if no schedule fits its budget.
        first_ms: duration of a single step, soon; 0 where it failed.
    """

    run: PeerRun
    trainee: Trainee | None = None
    schedule: Schedule | None = None
    refused: bool = False
    first_ms: float = 0.0


class Bench:
    """A bench on which contenders train copies of one model. `plain` is plain training of it."""

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        objective: Callable[[Any], torch.Tensor],
        device: str,
        *,
        autocast: str = "",
        seed: int = 0,
    ) -> None:
        moved = copied(model).to(device)
        moved_inputs = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), (args, kwargs))
        self.plain = Trainee(moved, *leaf_copies(*moved_inputs), objective, device, autocast=autocast)
        self._seed = seed
        self._coarse = bool(autocast) or any(item.element_size() < 4 for item in moved.parameters())
        if device == "cuda":
            backends: Any = torch.backends
            self._coarse |= "tf32" in (backends.cudnn.conv.fp32_precision, backends.cuda.matmul.fp32_precision)
        self._examiner: Examiner | None = None
        self.device, self.autocast = device, autocast

    def enter(self, contender: Contender) -> Entrant:
        """Prepare a contender and measure it alone.

        Plain training enters first: the others' steps are compared with its.
        """
        run = PeerRun(
            peer=contender.peer,
            setting=contender.setting,
            label=contender.label,
            asked_bytes=contender.asked_bytes,
        )
        try:
            with _prepared():
                trainee = self.plain.of(contender.prepare(copy_of(self.plain.model)))
                trainee.limit_bytes = contender.limit_bytes
                # Programs are made in the first step, and libraries choose their kernels.
                trainee.step()
                if contender.peer is Peer.PLAIN:
                    self._examiner = Examiner(trainee, self._seed, coarse=self._coarse)
                try:
                    run = self._measured(trainee, run)
                except Exception as error:
                    if trainee.limit_bytes is None or not is_out_of_memory(error):
                        raise
                    trainee.limit_bytes = None
                    self._clean()
                    run = self._measured(trainee, run)
                    run = replace(run, faults=(*run.faults, BEYOND_LIMIT))
                first_ms = trainee.time_ms()
            return Entrant(trainee=trainee, run=run, first_ms=first_ms)
        except Exception as error:
            run = replace(run, failure=reason(error))
        self._clean()
        return Entrant(run=run)

    def _measured(self, trainee: Trainee, run: PeerRun) -> PeerRun:
        """A run with its step's differences from plain training's, and with its peak."""
        refused = refusals()
        if self._examiner is not None:
            difference, faults = self._examiner.examine(trainee)
            run = replace(run, gradient_difference=difference, faults=faults)
        self._clean()
        memory = trainee.memory()
        if refusals() > refused:
            run = replace(run, faults=(*run.faults, REFUSED))
        return replace(run, peak_bytes=memory.peak_bytes, reserved_bytes=memory.reserved_bytes)

    def time(self, entrants: Sequence[Entrant], repeats: int) -> list[PeerRun]:
        """The entrants' runs, with step times taken in turn; those that failed as they are."""
        timed = [_TimedTrainee(item.trainee) if item.trainee else None for item in entrants]
        running = [item for item in timed if item is not None]
        with _prepared():
            times = iter(step_times_ms(running, repeats) if running else [])
        return [
            entrant.run if item is None else item.finished(entrant.run, next(times))
            for entrant, item in zip(entrants, timed, strict=True)
        ]

    def _clean(self) -> None:
        """Free what the last contender has left: gradients, reference cycles, the allocator's cache."""
        self.plain.clear()
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()


class _TimedTrainee(Trainee):
    """A trainee that remembers why it failed, rather than end everybody's turns."""

    def __init__(self, trainee: Trainee) -> None:
        vars(self).update(vars(trainee))
        self.failure = ""
        self.faults: tuple[str, ...] = ()

    def step(self) -> torch.Tensor:
        if not self.failure:
            try:
                return super().step()
            except Exception as error:
                self.failure = reason(error)
        return torch.zeros(())

    def time_ms(self, *, with_optimizer: bool = False) -> float:
        if self.device == "cuda" and self.limit_bytes is None:
            # Blocks that the one before left in the allocator's cache don't fit this one: a step fills it anew.
            torch.cuda.empty_cache()
            self.step()
        taken = super().time_ms()
        if self.failure == OUT_OF_MEMORY and self.limit_bytes is not None:
            self.failure, self.limit_bytes, self.faults = "", None, (BEYOND_LIMIT,)
            taken = super().time_ms()
        return taken

    def finished(self, run: PeerRun, times_ms: Sequence[float]) -> PeerRun:
        if self.failure:
            return replace(run, failure=self.failure)
        return replace(
            run,
            times_ms=tuple(times_ms),
            releases=sum(self.releases) / len(self.releases) if self.releases else None,
            faults=tuple(dict.fromkeys((*run.faults, *self.faults))),
        )


def copy_of(model: nn.Module) -> nn.Module:
    """A copy with modules and buffers of its own, and the same parameters."""
    return copied(model, {id(parameter): parameter for parameter in model.parameters()})


@contextlib.contextmanager
def _prepared() -> Iterator[None]:
    """Raise Dynamo's limit of programs, and silence the warnings of libraries."""
    with allow_programs(MAX_PROGRAMS), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def reason(error: Exception) -> str:
    """The reason why a contender has no figures, in a line."""
    if is_out_of_memory(error):
        return OUT_OF_MEMORY
    text, kind = first_line(error), type(error).__name__
    if text != kind and not isinstance(error, (MonetliteError, Unsupported)):
        text = f"{kind}: {text}"
    return text if len(text) <= MAX_REASON_LENGTH else f"{text[: MAX_REASON_LENGTH - 1]}…"


def environment(device: str) -> dict[str, str]:
    """The hardware, the versions of torch, Python and monetlite, and the commit where it is in a checkout."""
    found = {
        **meter_for(device).environment(),
        "python": platform.python_version(),
        "monetlite": monetlite.__version__,
    }
    folder = Path(monetlite.__file__).parent.parent
    if (folder / ".git").exists():
        command = ["git", "-C", str(folder), "describe", "--always", "--dirty"]
        with contextlib.suppress(OSError):
            commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
            found |= {"commit": commit} if commit else {}
    return found
