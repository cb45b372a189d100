"""A model that takes training steps. Whatever monetlite measures of whole steps, it measures of a `Trainee`."""

import contextlib
import copy
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import Any

import torch
from torch import nn

from monetlite.checking.measurements import StepMemory
from monetlite.core.errors import ModelError, first_line
from monetlite.fx.torch_internals import torch_pytree as pytree
from monetlite.fx.torch_internals.torch_pytree import tensors_among
from monetlite.operators.random import forked_state, rng_state
from monetlite.profiling.allocated import measuring_nothing
from monetlite.profiling.memory_records import peak_growth_bytes
from monetlite.profiling.memory_use import (
    high_water_bytes,
    page_faults,
    release_workspaces,
    releases,
    steady_heap,
    trim_heap,
)
from monetlite.profiling.meters import MAX_PAGE_FAULTS
from monetlite.profiling.step_additions import make_optimizer
from monetlite.runtime.backward_updates import BackwardUpdates
from monetlite.runtime.reserved_memory import reserved_within
from monetlite.runtime.wrapper import MONeTWrapper
from monetlite.tracing.model_outputs import has_loss
from monetlite.tracing.step_inputs import autocast_to, resident_bytes

STEPS_IN_A_ROW = 4
"""Steps that are timed together on a GPU: in training, the host begins a step while the GPU ends the one before."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Results of a step, on the CPU: loss, gradients and buffers by name, and the generator's state.

    `drew` tells whether the step drew random numbers.
    """

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    random_state: torch.Tensor
    drew: bool


@dataclass(eq=False)
class Trainee:
    """A model that takes training steps, or forward passes alone.

    A step begins without gradients or, to `accumulate`, with gradients of zero. The optimizer's step counts in the
    peak, as in a prediction. It changes no weight.

    Attributes:
        model: the module, or a wrapper of it.
        args, kwargs: arguments of its call. Their gradients are cleared at each step.
        objective: makes the loss of the model's output.
        device: `cpu` or `cuda`.
        training: False for forward passes without gradients.
        accumulate: keep gradients between steps.
        step_in_backward: have the optimizer update each parameter when its gradient arrives.
        holds_outputs: keep outputs beside the model's loss until the step ends.
        autocast: dtype of `torch.autocast` around forward and loss; empty for none.
        optimizer: name of an optimizer.
        limit_bytes: what torch's CUDA allocator may reserve for a step while it is measured.
        releases: times that the CUDA allocator gave memory back in a step, for each time that some were timed.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    objective: Callable[[Any], torch.Tensor]
    device: str
    _: KW_ONLY
    training: bool = True
    accumulate: bool = False
    step_in_backward: bool = False
    holds_outputs: bool = False
    autocast: str = ""
    optimizer: InitVar[str | None] = None
    limit_bytes: int | None = None
    releases: list[float] = field(default_factory=list)

    def __post_init__(self, optimizer: str | None) -> None:
        self.inputs = tensors_among((self.args, self.kwargs))
        self.stepper = None
        if optimizer is not None:
            # At a learning rate of zero weights stay as they are, bit for bit; memory and time are as always.
            trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
            self.stepper = make_optimizer(optimizer, trained, 0.0)

    def of(self, model: nn.Module) -> "Trainee":
        """A trainee of another model, on the same inputs."""
        other = copy.copy(self)
        other.model, other.releases = model, []
        return other

    def step(self) -> torch.Tensor:
        """Run forward and backward from cleared gradients, and return the loss."""
        self.clear()
        with torch.set_grad_enabled(self.training), self._updating():
            with autocast_to(self.device, self.autocast):
                output = self.model(*self.args, **self.kwargs)
                if not self.training:
                    return torch.zeros(())
                loss = self.objective(output)
            if has_loss(output) and not self.holds_outputs:
                del output  # as trainers do
            loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
        return loss.detach()

    def run(self) -> None:
        """Take a step, with the optimizer's."""
        self.step()
        if self.stepper is not None and not self.step_in_backward:
            self.stepper.step()

    def snapshot(self, seed: int) -> Snapshot:
        """Take a step from a seed, and return its results."""
        inputs = ((f"input {number}", item) for number, item in enumerate(self.inputs))
        named = [*self.model.named_parameters(), *inputs]
        gradients: dict[str, torch.Tensor] = {}
        with forked_state(self.device), self._limited(), self._noting(named, gradients):
            torch.manual_seed(seed)
            before = rng_state(self.device)
            loss = self.step()
            after = rng_state(self.device)
        return Snapshot(
            loss=on_cpu(loss),
            gradients=gradients
            | {name: taken_gradient(tensor) for name, tensor in named if tensor.grad is not None},
            buffers={name: on_cpu(tensor) for name, tensor in self.model.named_buffers()},
            random_state=after,
            drew=not torch.equal(before, after),
        )

    def time_ms(self, *, with_optimizer: bool = False) -> float:
        """Duration of a step, in ms: on a GPU of several in a row, as in training."""
        limited = self.limit_bytes is not None and self.device == "cuda"
        if limited:
            self.clear()
            torch.cuda.empty_cache()
        steps = STEPS_IN_A_ROW if self.device == "cuda" else 1
        with self._limited():
            if limited:
                self.step()  # leaves the allocator's cache as such a step finds it
            released = releases()
            self._synchronize()
            start = time.perf_counter()
            for _ in range(steps):
                (self.run if with_optimizer else self.step)()
            self._synchronize()
            taken = time.perf_counter() - start
        if self.device == "cuda":
            self.releases.append((releases() - released) / steps)
        return taken * 1000 / steps

    def memory(self) -> StepMemory:
        """Measure the memory of a step with the optimizer's.

        Libraries' workspaces count; other tensors on the GPU, such as another model, don't.
        """
        if self.stepper is not None and not self.stepper.state:
            self.run()  # makes the optimizer's state
        self.clear()
        own_bytes = self._own_bytes()
        if self.device != "cuda":
            return StepMemory(peak_bytes=own_bytes + peak_growth_bytes(self.run), resident_bytes=own_bytes)
        release_workspaces()
        torch.cuda.empty_cache()
        reserved_bytes = torch.cuda.memory_reserved()
        with self._limited():
            peak_bytes = own_bytes + peak_growth_bytes(self.run, self.device)
        grown_bytes = torch.cuda.max_memory_reserved() - reserved_bytes
        return StepMemory(peak_bytes=peak_bytes, resident_bytes=own_bytes, reserved_bytes=own_bytes + grown_bytes)

    def in_use_bytes(self) -> int | None:
        """Memory that the system reports: of this process during a step on the CPU, of the whole GPU after a step.

        None where Linux does not say.
        """
        self.clear()
        if self.device != "cuda":
            trim_heap()
            return high_water_bytes(self.run)
        self.run()
        self._synchronize()
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        return total_bytes - free_bytes

    def forget_state(self) -> None:
        """Free the optimizer's state, and gradients; the next step makes them anew."""
        self.clear()
        if self.stepper is not None:
            self.stepper.state.clear()

    def clear(self) -> None:
        """Drop all gradients or, to accumulate, set them to zero."""
        for tensor in self._leaves():
            if not self.accumulate:
                tensor.grad = None
            elif tensor.requires_grad:
                tensor.grad = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad.zero_()

    @contextlib.contextmanager
    def _updating(self) -> Iterator[None]:
        """Have the optimizer step in the backward pass, if it is to."""
        if not self.step_in_backward or self.stepper is None:
            yield
            return
        updates = BackwardUpdates(self.stepper)
        try:
            yield
        finally:
            updates.remove()

    @contextlib.contextmanager
    def _noting(
        self, named: Sequence[tuple[str, torch.Tensor]], gradients: dict[str, torch.Tensor]
    ) -> Iterator[None]:
        """Note gradients before the optimizer takes them in the backward pass."""
        with contextlib.ExitStack() as hooks:
            for name, tensor in named if self.step_in_backward else ():
                if tensor.requires_grad:
                    note = functools.partial(_note_gradient, gradients, name)
                    hooks.enter_context(tensor.register_hook(note))  # type: ignore[no-untyped-call]  # torch has no types for it
            yield

    def _limited(self) -> contextlib.AbstractContextManager[None]:
        """Keep what the allocator reserves within the limit, if there is one."""
        limit_bytes = self.limit_bytes if self.device == "cuda" else None
        return reserved_within(limit_bytes, self._own_bytes())

    def _own_bytes(self) -> int:
        """Bytes of the step that are in memory before it begins."""
        model = self.model.model if isinstance(self.model, MONeTWrapper) else self.model
        gradients = [tensor.grad for tensor in self._leaves()]
        state = [] if self.stepper is None else pytree.tree_leaves(list(self.stepper.state.values()))
        return resident_bytes(model, [*self.inputs, *gradients, *state]).total

    def _leaves(self) -> list[torch.Tensor]:
        """Tensors that gradients are of."""
        return [*self.model.parameters(), *(item for item in self.inputs if item.is_leaf)]

    def _synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def step_times_ms(trainees: Sequence[Trainee], repeats: int) -> list[list[float]]:
    """Step times of several ways to train, taken in turn, in ms.

    On the CPU, freed memory is kept in the process. Steps that take more from the system all the same (each way to
    train leaves it in other pieces) are repeated, up to three times as often as asked for.
    """
    times: list[list[float]] = [[] for _ in trainees]
    undisturbed: list[list[float]] = [[] for _ in trainees]
    with steady_heap() if trainees[0].device == "cpu" else contextlib.nullcontext(), measuring_nothing():
        for trainee in trainees:
            trainee.step()
        for _ in range(3 * repeats):
            for trainee, all_ms, good_ms in zip(trainees, times, undisturbed, strict=True):
                if len(good_ms) < repeats:
                    faults = page_faults()
                    taken = trainee.time_ms()
                    all_ms.append(taken)
                    if trainee.device == "cuda" or page_faults() - faults <= MAX_PAGE_FAULTS:
                        good_ms.append(taken)
    return [good or every for good, every in zip(undisturbed, times, strict=True)]


def copied(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """A copy of a model, except for what `memo` has, as `copy.deepcopy` takes it."""
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise ModelError(
            f"the model can't be copied, and steps are compared on copies: copy.deepcopy(model) raises "
            f"{type(error).__name__}: {first_line(error)}. Old torch.nn.utils.weight_norm is a known cause; "
            "torch.nn.utils.parametrizations has one for models that can be copied"
        ) from error


def leaf_copies(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Copies of a call's tensors that are leaves. A tensor that is passed twice is copied once."""
    copies: dict[int, torch.Tensor] = {}

    def copy_of(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in copies:
            made = tensor.detach().clone(memory_format=torch.preserve_format)
            copies[id(tensor)] = made.requires_grad_(tensor.requires_grad)
        return copies[id(tensor)]

    made: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map_only(torch.Tensor, copy_of, (args, kwargs))
    return made


def default_loss(output: Any) -> torch.Tensor:
    """An output's `loss`, or the mean of the squares of all its floating-point tensors.

    The latter takes no memory beside the outputs and their gradients, which is what a schedule counts of a loss.

    Raises:
        ModelError: nothing of the output has a gradient.
    """
    if isinstance(output, dict) and isinstance(output.get("loss"), torch.Tensor):
        found: torch.Tensor = output["loss"]
        return found
    tensors = [item for item in tensors_among(output) if item.requires_grad]
    if not tensors:
        raise ModelError("nothing to train: no output of the model depends on a parameter that requires a gradient")
    return torch.stack([_MeanSquare.apply(item) for item in tensors]).sum()  # type: ignore[no-untyped-call]  # torch has no types for it


class _MeanSquare(torch.autograd.Function):
    """Mean of a tensor's squares, in at least float32, without an intermediate of the tensor's size."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tensor)
        wide = torch.promote_types(tensor.dtype, torch.float32)
        norm: torch.Tensor = torch.linalg.vector_norm(tensor, dtype=wide)
        return norm.square().div(max(1, tensor.numel())).float()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (tensor,) = ctx.saved_tensors
        slope: torch.Tensor = tensor * (gradient * (2 / max(1, tensor.numel())))
        return slope


@contextlib.contextmanager
def changed_weights(model: nn.Module, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Train with other weights for a while. Afterwards weights and buffers are as they were.

    `change` makes a parameter of its name and its value (at least float32, on the CPU).
    """
    kept = {name: on_cpu(item) for name, item in (*model.named_parameters(), *model.named_buffers())}
    try:
        with torch.no_grad():
            for name, weights in model.named_parameters():
                weights.copy_(change(name, kept[name].to(torch.promote_types(weights.dtype, torch.float32))))
        yield
    finally:
        with torch.no_grad():
            for name, item in (*model.named_parameters(), *model.named_buffers()):
                item.copy_(kept[name])


def off_by(fraction: float, seed: int) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """A change for `changed_weights`: every weight off by a fraction of itself, up or down at random."""
    generator = torch.Generator("cpu").manual_seed(seed)

    def change(_: str, weights: torch.Tensor) -> torch.Tensor:
        signs = torch.randint(0, 2, weights.shape, generator=generator, device="cpu").mul_(2).sub_(1)
        return weights.addcmul(weights, signs.to(weights), value=fraction)

    return change


def _note_gradient(gradients: dict[str, torch.Tensor], name: str, gradient: torch.Tensor) -> None:
    gradients[name] = on_cpu(gradient)


def taken_gradient(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's gradient in main memory, which the tensor then no longer has."""
    gradient, tensor.grad = tensor.grad, None
    assert gradient is not None
    return gradient.detach().to("cpu")


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in main memory."""
    return tensor.detach().to("cpu", copy=True)
