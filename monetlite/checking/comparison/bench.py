"""Measuring contenders in one process, none in the way of another.

All train the same parameters, which no step changes, on the same inputs, and clear their gradients before a step:
beside the one that is measured, others hold their buffers and programs only. So there is one copy of the weights on
a GPU however many contenders there are.
"""

import contextlib
import copy
import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from monetlite.checking.comparison.compiled import settings
from monetlite.checking.comparison.contenders import Contender, Task, Unsupported, copy_of
from monetlite.checking.comparison.data import Peer, Run
from monetlite.checking.comparison.exactness import Examiner
from monetlite.checking.trainee import Trainee, copied, leaf_copies, step_times_ms
from monetlite.core.errors import MonetliteError
from monetlite.profiling.memory_use import is_out_of_memory, refusals

LONGEST_REASON = 200
OUT_OF_MEMORY = "out of memory"
BEYOND_LIMIT = "out of memory within the limit, so measured without it"
REFUSED = "libraries went without memory that was refused"
"""In a step that a limit leaves less to than an operator asks for, whose library then runs another algorithm."""


@dataclass(frozen=True, kw_only=True)
class Entrant:
    """A contender that runs, with what was measured of it alone."""

    trainee: Trainee
    run: Run


class Bench:
    """Where contenders train a copy of one model."""

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
        args, kwargs = leaf_copies(
            *pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), (args, kwargs))
        )
        self._trainee = Trainee(moved, args, kwargs, objective, device, autocast=autocast)
        self._seed = seed
        self._coarse = bool(autocast) or any(item.element_size() < 4 for item in moved.parameters())
        if device == "cuda":
            backends: Any = torch.backends
            self._coarse |= "tf32" in (backends.cudnn.conv.fp32_precision, backends.cuda.matmul.fp32_precision)
        self._examiner: Examiner | None = None
        self.device, self.autocast = device, autocast
        self.task = Task(model=moved, args=self._trainee.args, kwargs=self._trainee.kwargs)

    def enter(self, contender: Contender) -> Entrant | Run:
        """Prepare a contender and measure it alone; a run that says why, where that fails.

        Plain training enters first: the others' steps are compared with its.
        """
        run = Run(
            peer=contender.peer,
            setting=contender.setting,
            label=contender.label,
            asked_bytes=contender.asked_bytes,
        )
        try:
            with _prepared():
                trainee = copy.copy(self._trainee)
                trainee.releases = []
                trainee.model = contender.prepare(copy_of(self.task.model))
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
                    self._tidy()
                    run = self._measured(trainee, run)
                    run = replace(run, faults=(*run.faults, BEYOND_LIMIT))
        except Exception as error:
            run = replace(run, failure=reason(error))
        if run.failure:
            self._tidy()
            return run
        return Entrant(trainee=trainee, run=run)

    def _measured(self, trainee: Trainee, run: Run) -> Run:
        """A run with what its step leaves behind, and with its peak."""
        refused = refusals()
        if self._examiner is not None:
            difference, faults = self._examiner.examine(trainee)
            run = replace(run, gradient_difference=difference, faults=faults)
        self._tidy()
        memory = trainee.memory()
        if refusals() > refused:
            run = replace(run, faults=(*run.faults, REFUSED))
        return replace(run, peak_bytes=memory.peak_bytes, reserved_bytes=memory.reserved_bytes)

    def time(self, entrants: Sequence[Entrant], repeats: int) -> list[Run]:
        """The runs with their step times, taken in turn."""
        if not entrants:
            return []
        timed = [_Timed(entrant.trainee) for entrant in entrants]
        with _prepared():
            times = step_times_ms(timed, repeats)
        return [
            replace(entrant.run, failure=item.failure)
            if item.failure
            else replace(
                entrant.run,
                times_ms=tuple(times_ms),
                releases=_mean(item.releases),
                faults=tuple(dict.fromkeys((*entrant.run.faults, *item.faults))),
            )
            for entrant, item, times_ms in zip(entrants, timed, times, strict=True)
        ]

    def _tidy(self) -> None:
        """Free what the contender before has left: gradients, cycles, the allocator's cache."""
        for tensor in (*self.task.model.parameters(), *self._trainee.inputs):
            tensor.grad = None
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()


class _Timed(Trainee):
    """A trainee that says why it failed, rather than end everybody's turns."""

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
            # What the one before left in the allocator's cache doesn't fit this one: a step, to fill it anew.
            torch.cuda.empty_cache()
            self.step()
        taken = super().time_ms()
        if self.failure == OUT_OF_MEMORY and self.limit_bytes is not None:
            self.failure, self.limit_bytes, self.faults = "", None, (BEYOND_LIMIT,)
            taken = super().time_ms()
        return taken


@contextlib.contextmanager
def _prepared() -> Iterator[None]:
    """What holds while contenders run; what libraries warn of is not a person's to see."""
    with settings(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _mean(counts: Sequence[int]) -> float | None:
    return sum(counts) / len(counts) if counts else None


def reason(error: Exception) -> str:
    """Why a contender has no figures, in a line."""
    if is_out_of_memory(error):
        return OUT_OF_MEMORY
    text = str(error).strip().partition("\n")[0].rstrip(".")
    if not isinstance(error, (MonetliteError, Unsupported)):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if len(text) <= LONGEST_REASON else f"{text[: LONGEST_REASON - 1]}…"


__all__ = ["Bench", "Entrant", "reason"]
