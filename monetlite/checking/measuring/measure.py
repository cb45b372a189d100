"""A model's memory and time at several batch sizes, as they really are: nothing here is predicted."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch.utils import _pytree as pytree

from monetlite.checking.measuring.probes import probe_for
from monetlite.checking.measuring.results import Loading, Measurements, Mode, Run
from monetlite.checking.measuring.tasks import Task
from monetlite.core.errors import ModelError
from monetlite.profiling.memory_use import is_out_of_memory
from monetlite.tracing.build import resident_bytes

if TYPE_CHECKING:
    from monetlite.models import BuiltModel


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a model is run.

    Attributes:
        device: `cpu` or `cuda`.
        optimizer: `sgd`, `momentum`, `adam` or `adamw`, to take its step in training too.
        autocast: the dtype of `torch.autocast` around forward and loss.
        warmup: runs before timing begins; repeats: timed runs.
    """

    device: str = "cpu"
    optimizer: str | None = None
    autocast: str | None = None
    warmup: int = 1
    repeats: int = 5


def measure(
    build: "Callable[[int | None], BuiltModel]",
    batches: Sequence[int | None],
    modes: Sequence[Mode] = tuple(Mode),
    setting: Setting | None = None,
    progress: Callable[[str], None] | None = None,
) -> Measurements:
    """Build a model at each batch size, run it, and see what memory and time it takes.

    Args:
        build: makes the model and its inputs at a batch size (None: the model's own), on the CPU or on the device
            that `torch.device` is set to.
        batches: in ascending order. A mode that runs out of memory at one is not tried at larger ones.
        modes: inference, training or both.
        setting: how it is run.
        progress: told what is measured next.

    Raises:
        DeviceError: this machine has no such device.
        ModelError: the model can't be built, or fails otherwise than by running out of memory.
    """
    measurer = _Measurer(build, setting or Setting(), progress or (lambda _: None))
    runs: list[Run] = []
    ended: list[Mode] = []
    for batch in batches:
        found = measurer.at(batch, [mode for mode in modes if mode not in ended])
        size = found[0].batch if found else batch
        assert size is not None, "a batch of the model's own size is the first"
        runs += [*found, *(Run(mode=mode, batch=size, tried=False) for mode in ended)]
        ended += [run.mode for run in found if run.memory is None]
    return measurer.result([run for mode in modes for run in runs if run.mode is mode])


class _Measurer:
    def __init__(
        self, build: "Callable[[int | None], BuiltModel]", setting: Setting, tell: Callable[[str], None]
    ) -> None:
        self._build, self._setting, self._tell = build, setting, tell
        self._probe = probe_for(setting.device)
        self._loads: list[Loading] = []
        self._name = self._description = ""
        self._labels_left_out = False

    def at(self, batch: int | None, modes: Sequence[Mode]) -> list[Run]:
        """Measure one batch size, from a clean device, in some modes."""
        if not modes:
            return []
        self._probe.clean()
        self._tell("loading" if batch is None else f"loading, batch {batch}")
        built = self._load(batch)
        if built is not None:
            return [self._run(built, mode) for mode in modes]
        if batch is None:
            raise ModelError(
                "the model and a batch of its own size don't fit into memory; say what to measure: --batch 1,2,4"
            )
        return [Run(mode=mode, batch=batch) for mode in modes]

    def result(self, runs: Sequence[Run]) -> Measurements:
        loading = None
        if self._loads:
            times_ms = tuple(time_ms for loading in self._loads for time_ms in loading.times_ms)
            loading = replace(self._loads[0], times_ms=times_ms)
        return Measurements(
            model=self._name,
            description=self._description,
            place=self._probe.place,
            loading=loading,
            runs=tuple(runs),
            optimizer=self._setting.optimizer,
            autocast=self._setting.autocast,
            labels_left_out=self._labels_left_out,
        )

    def _load(self, batch: int | None) -> "BuiltModel | None":
        """Build the model and its inputs on the device; None if memory does not suffice."""
        made: list[BuiltModel] = []
        times_ms: list[float] = []

        def load() -> None:
            begin = time.perf_counter()
            with torch.device(self._setting.device):
                built = self._build(batch)
            made.append(_moved(built, self._setting.device))
            times_ms.append((time.perf_counter() - begin) * 1000)

        try:
            with self._probe.within():
                growth = self._probe.growth(load)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return None
        built = made[0]
        sizes = resident_bytes(built.model, pytree.tree_leaves(built.example_inputs))
        self._loads.append(
            Loading(
                times_ms=tuple(times_ms),
                parameter_bytes=sizes.parameters,
                buffer_bytes=sizes.buffers,
                input_bytes=sizes.inputs,
                growth=growth,
            )
        )
        self._name, self._description = self._name or built.name, self._description or built.description
        return built

    def _run(self, built: "BuiltModel", mode: Mode) -> Run:
        setting, probe = self._setting, self._probe
        self._tell(f"{mode}, batch {built.batch}")
        task = Task(built, mode, device=setting.device, optimizer=setting.optimizer, autocast=setting.autocast)
        self._labels_left_out |= task.labels_left_out
        try:
            with probe.within():
                task.run()  # makes the optimizer's state, and what libraries make once
                memory = probe.memory(task.run, task.resident_bytes())
                times_ms = probe.times_ms(task.run, setting.warmup, setting.repeats)
        except Exception as error:
            if not is_out_of_memory(error):
                raise ModelError(
                    f"{built.name} fails in {mode} at batch {built.batch}: {type(error).__name__}: {error}; leave "
                    "that batch or that mode out (--batch, --mode)"
                ) from error
        else:
            return Run(mode=mode, batch=built.batch, memory=memory, times_ms=times_ms)
        task.clear()
        probe.clean()
        return Run(mode=mode, batch=built.batch)


def _moved(built: "BuiltModel", device: str) -> "BuiltModel":
    """The same on a device, where `torch.device` alone did not put everything there."""
    inputs = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), built.example_inputs)
    return replace(built, model=built.model.to(device), example_inputs=inputs)


__all__ = ["Setting", "measure"]
