"""Measuring a model as it is, without any schedule: loading it, and each batch size in inference and training."""

import contextlib
import gc
import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import torch
from torch import nn

from monetlite.checking.measurements import BatchRun, Growth, Loading, Measurements, Mode, Place
from monetlite.checking.trainee import Trainee, default_loss
from monetlite.core.errors import ModelError
from monetlite.fx.torch_internals import torch_pytree as pytree
from monetlite.models import BuiltModel
from monetlite.profiling import memory_use
from monetlite.profiling.memory_records import peak_growth_bytes
from monetlite.profiling.meters import meter_for
from monetlite.tracing.step_inputs import Inputs, resident_bytes, split_inputs


def measured_place(device: str) -> Place:
    """The device, measured before anything is on it."""
    if device != "cuda":
        return Place(
            device=device,
            environment=meter_for(device).environment(),
            total_bytes=memory_use.machine_bytes(),
            available_bytes=memory_use.available_bytes(),
            process_bytes=memory_use.process_bytes(),
        )
    idle_bytes = memory_use.gpu_in_use_bytes()
    environment = meter_for(device).environment()
    torch.zeros(1, device=device)  # the context, with its kernels, comes with the first tensor
    torch.cuda.synchronize()
    started_bytes = memory_use.gpu_in_use_bytes()
    context_bytes = None
    if idle_bytes is not None and started_bytes is not None:
        context_bytes = max(0, started_bytes - idle_bytes - torch.cuda.memory_reserved())
    torch.cuda.empty_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return Place(
        device=device,
        environment=environment,
        total_bytes=total_bytes,
        available_bytes=free_bytes,
        context_bytes=context_bytes,
    )


@dataclass
class ModelMeasurer:
    """Builds a model at each batch size, runs it, and measures its memory and time.

    Attributes:
        build: makes the model and its inputs at a batch size (None: the model's own), on the CPU or on the device
            that `torch.device` is set to.
        device: `cpu` or `cuda`.
        optimizer: name of an optimizer, to take its step in training too.
        autocast: the dtype of `torch.autocast` around forward and loss.
        warmup: runs before timing begins. repeats: timed runs.
        say: told what is measured next.
    """

    build: Callable[[int | None], BuiltModel]
    _: KW_ONLY
    device: str = "cpu"
    optimizer: str | None = None
    autocast: str | None = None
    warmup: int = 1
    repeats: int = 5
    say: Callable[[str], None] = lambda _: None
    loads: list[Loading] = field(default_factory=list, init=False)
    name: str = field(default="", init=False)
    description: str = field(default="", init=False)
    labels_left_out: bool = field(default=False, init=False)

    def run(self, batches: Sequence[int | None], modes: Sequence[Mode] = tuple(Mode)) -> Measurements:
        """Measure batches in ascending order. A mode that runs out of memory at one is not tried at larger ones.

        Raises:
            DeviceError: this machine has no such device.
            ModelError: the model can't be built, or fails otherwise than by running out of memory.
        """
        place = measured_place(self.device)
        runs: list[BatchRun] = []
        ended: list[Mode] = []
        for batch in batches:
            found = self._at(batch, [mode for mode in modes if mode not in ended])
            size = found[0].batch if found else batch
            assert size is not None, "a batch of the model's own size is the first"
            runs += [*found, *(BatchRun(mode=mode, batch=size, tried=False) for mode in ended)]
            ended += [run.mode for run in found if run.memory is None]
        times_ms = tuple(time_ms for loading in self.loads for time_ms in loading.times_ms)
        return Measurements(
            model=self.name,
            description=self.description,
            place=place,
            loading=replace(self.loads[0], times_ms=times_ms) if self.loads else None,
            runs=tuple(run for mode in modes for run in runs if run.mode is mode),
            optimizer=self.optimizer,
            autocast=self.autocast,
            labels_left_out=self.labels_left_out,
        )

    def _at(self, batch: int | None, modes: Sequence[Mode]) -> list[BatchRun]:
        """Measure one batch size, from a clean device, in some modes."""
        if not modes:
            return []
        self._clean()
        self.say("loading" if batch is None else f"loading, batch {batch}")
        built = self._load(batch)
        if built is not None:
            return [self._measure(built, mode) for mode in modes]
        if batch is None:
            raise ModelError(
                "the model and a batch of its own size don't fit into memory; say what to measure: --batch 1,2,4"
            )
        return [BatchRun(mode=mode, batch=batch) for mode in modes]

    def _load(self, batch: int | None) -> BuiltModel | None:
        """Build the model and its inputs on the device; None if memory does not suffice."""
        made: list[BuiltModel] = []
        times_ms: list[float] = []

        def load() -> None:
            begin = time.perf_counter()
            with torch.device(self.device):
                built = self.build(batch)
            # Not everything follows `torch.device`.
            inputs = pytree.tree_map_only(torch.Tensor, lambda item: item.to(self.device), built.example_inputs)
            made.append(replace(built, model=built.model.to(self.device), example_inputs=inputs))
            times_ms.append((time.perf_counter() - begin) * 1000)

        try:
            with self._limited():
                growth = _growth(load, self.device)
        except Exception as error:
            if not memory_use.is_out_of_memory(error):
                raise
            return None
        built = made[0]
        sizes = resident_bytes(built.model, pytree.tree_leaves(built.example_inputs))
        self.loads.append(
            Loading(
                times_ms=tuple(times_ms),
                parameter_bytes=sizes.parameters,
                buffer_bytes=sizes.buffers,
                input_bytes=sizes.inputs,
                growth=growth,
            )
        )
        self.name, self.description = self.name or built.name, self.description or built.description
        return built

    def _measure(self, built: BuiltModel, mode: Mode) -> BatchRun:
        self.say(f"{mode}, batch {built.batch}")
        training = mode is Mode.TRAINING
        inputs: Any = built.example_inputs
        if not training and _runs_without_labels(built.model, inputs):
            inputs = {name: item for name, item in inputs.items() if name != "labels"}
            self.labels_left_out = True
        trainee = Trainee(
            built.model.train(training),
            *split_inputs(inputs),
            default_loss,
            self.device,
            training=training,
            autocast=self.autocast or "",
            optimizer=self.optimizer if training else None,
        )
        try:
            with self._limited():
                trainee.run()  # makes what libraries make once
                memory = replace(trainee.memory(), in_use_bytes=trainee.in_use_bytes())
                with memory_use.steady_heap() if self.device == "cpu" else contextlib.nullcontext():
                    for _ in range(self.warmup):
                        trainee.run()
                    times_ms = tuple(trainee.time_ms(with_optimizer=True) for _ in range(self.repeats))
            return BatchRun(mode=mode, batch=built.batch, memory=memory, times_ms=times_ms)
        except Exception as error:
            if not memory_use.is_out_of_memory(error):
                raise ModelError(
                    f"{built.name} fails in {mode} at batch {built.batch}: {type(error).__name__}: {error}; leave "
                    "that batch or that mode out (--batch, --mode)"
                ) from error
        finally:
            trainee.clear()
        self._clean()
        return BatchRun(mode=mode, batch=built.batch)

    def _limited(self) -> contextlib.AbstractContextManager[None]:
        """Make taking more memory than there is an exception, rather than the end of the process."""
        return memory_use.memory_limited(memory_use.available_bytes() if self.device == "cpu" else None)

    def _clean(self) -> None:
        """Give back all memory that nobody uses."""
        gc.collect()
        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        else:
            memory_use.trim_heap()


def _growth(load: Callable[[], None], device: str) -> Growth | None:
    """Run a function once, and measure the memory that it takes; None where Linux does not say."""
    if device == "cuda":
        before_bytes = torch.cuda.memory_allocated()
        peak_bytes = peak_growth_bytes(load, device)
        return Growth(kept_bytes=torch.cuda.memory_allocated() - before_bytes, peak_bytes=peak_bytes)
    before = memory_use.process_bytes()
    highest = memory_use.high_water_bytes(load)
    after = memory_use.process_bytes()
    if before is None or after is None or highest is None:
        return None
    return Growth(kept_bytes=after - before, peak_bytes=highest - before)


def _runs_without_labels(model: nn.Module, inputs: Inputs) -> bool:
    """Tell whether a model that computes its loss from `labels` can also do without."""
    if "labels" not in split_inputs(inputs)[1]:
        return False
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False  # transformers makes the decoder's inputs of them
    labels = inspect.signature(model.forward).parameters.get("labels")
    return labels is not None and labels.default is None
