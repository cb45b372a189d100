"""One training step, taken again and again: what it leaves behind, how long it takes, and its peak."""

import contextlib
import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from monetlite.core.errors import ModelError
from monetlite.operators.random import forked_state
from monetlite.profiling.memory_use import page_faults, peak_growth_bytes, release_workspaces, releases, steady_heap
from monetlite.profiling.meters import MAX_PAGE_FAULTS
from monetlite.profiling.step_additions import make_optimizer
from monetlite.runtime.reserved_memory import reserved_within
from monetlite.runtime.wrapper import MONeTWrapper
from monetlite.tracing.build import resident_bytes


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What one step leaves behind: the loss, gradients and buffers by name, and the generator's state."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    random_state: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The most memory of a step, resident memory included, in bytes.

    `allocated_bytes`: of tensors and workspaces, as asked for; a block of the CUDA allocator that holds one may be
    larger, by up to a megabyte without expandable segments. `reserved_bytes`: what that allocator took from the GPU
    to hold them, which is what nvidia-smi shows beside the context; None on a CPU.
    """

    allocated_bytes: int
    reserved_bytes: int | None = None


class Trainee:
    """A model that takes training steps, always from no gradients, or to `accumulate` from gradients of zero.

    An optimizer's step is part of the peak, as in a prediction, and of nothing else; it changes no weight. With
    `limit_bytes`, what torch's CUDA allocator reserves for the step is kept within that, while it is measured.
    """

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        objective: Callable[[Any], torch.Tensor],
        device: str,
        *,
        accumulate: bool = False,
        autocast: str = "",
        optimizer: str | None = None,
        limit_bytes: int | None = None,
    ) -> None:
        self.accumulate = accumulate
        self.releases: list[int] = []
        """Of each step that was timed on a GPU: how often its allocator gave memory back."""
        self.limit_bytes = limit_bytes
        self.autocast = getattr(torch, autocast) if autocast else None
        self.model, self.objective, self.device = model, objective, device
        copies: dict[int, torch.Tensor] = {}
        self.args, self.kwargs = pytree.tree_map_only(
            torch.Tensor, lambda tensor: _fresh(tensor, copies), (args, kwargs)
        )
        self.inputs = [
            item for item in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(item, torch.Tensor)
        ]
        self.optimizer = None
        if optimizer is not None:
            # At a learning rate of zero weights stay as they are, bit for bit, and memory is what it always is.
            self.optimizer = make_optimizer(optimizer, [p for p in model.parameters() if p.requires_grad], 0.0)

    def step(self) -> torch.Tensor:
        self._clear()
        # A training loop holds the model's output until the step ends; the schedule counts on that.
        with torch.autocast(self.device, self.autocast, enabled=self.autocast is not None):
            output = self.model(*self.args, **self.kwargs)
            loss = self.objective(output)
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
        return loss.detach()

    def snapshot(self, seed: int) -> Snapshot:
        """What one step leaves behind, from a seed."""
        with forked_state(self.device), reserved_within(self._limit_bytes, self._own_bytes()):
            torch.manual_seed(seed)
            loss = self.step()
            random_state = torch.cuda.get_rng_state() if self.device == "cuda" else torch.get_rng_state()
        named = [
            *self.model.named_parameters(),
            *((f"input {i}", item) for i, item in enumerate(self.inputs)),
        ]
        return Snapshot(
            loss=loss.clone(),
            gradients={name: tensor.grad.clone() for name, tensor in named if tensor.grad is not None},
            buffers={name: tensor.clone() for name, tensor in self.model.named_buffers()},
            random_state=random_state,
        )

    def time_ms(self) -> float:
        with self._limited():
            before = releases()
            self._synchronize()
            start = time.perf_counter()
            self.step()
            self._synchronize()
            taken = time.perf_counter() - start
        if self.device == "cuda":
            self.releases.append(releases() - before)
        return taken * 1000

    @contextlib.contextmanager
    def _limited(self) -> Iterator[None]:
        """Keep a step within the limit, if there is one, in an allocator that such a step has left behind."""
        if self._limit_bytes is None:
            yield
            return
        self._clear()
        torch.cuda.empty_cache()
        with reserved_within(self._limit_bytes, self._own_bytes()):
            self.step()
            yield

    @property
    def _limit_bytes(self) -> int | None:
        return self.limit_bytes if self.device == "cuda" else None

    def peak(self) -> Peak:
        """Resident memory of the step, and the most it takes beyond that.

        What else is on the GPU, such as another model, doesn't count; libraries' workspaces do.
        """
        if self.optimizer is not None and not self.optimizer.state:
            self._whole_step()  # which makes the optimizer's state
        self._clear()
        own_bytes = self._own_bytes()
        if self.device != "cuda":
            return Peak(allocated_bytes=own_bytes + peak_growth_bytes(self._whole_step, self.device))
        release_workspaces(self.device)
        torch.cuda.empty_cache()
        reserved_bytes = torch.cuda.memory_reserved()
        with reserved_within(self._limit_bytes, own_bytes):
            allocated_bytes = own_bytes + peak_growth_bytes(self._whole_step, self.device)
        grown_bytes = torch.cuda.max_memory_reserved() - reserved_bytes
        return Peak(allocated_bytes=allocated_bytes, reserved_bytes=own_bytes + grown_bytes)

    def _own_bytes(self) -> int:
        """What of the step is in memory before it begins."""
        model = self.model.model if isinstance(self.model, MONeTWrapper) else self.model
        own_bytes: int = resident_bytes(model, self.inputs).total
        own_bytes += sum(tensor.grad.nbytes for tensor in self._leaves() if tensor.grad is not None)
        states = self.optimizer.state.values() if self.optimizer is not None else ()
        return own_bytes + sum(
            item.nbytes for state in states for item in state.values() if isinstance(item, torch.Tensor)
        )

    def _whole_step(self) -> None:
        self.step()
        if self.optimizer is not None:
            self.optimizer.step()

    def _clear(self) -> None:
        for tensor in self._leaves():
            if not self.accumulate:
                tensor.grad = None
            elif tensor.requires_grad:
                tensor.grad = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad.zero_()

    def _leaves(self) -> list[torch.Tensor]:
        return [*self.model.parameters(), *self.inputs]

    def _synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def copied(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """A copy of a model, but for what `memo` has, as `copy.deepcopy` takes it.

    Raises:
        ModelError: it can't be copied.
    """
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise ModelError(
            f"the model can't be copied, and steps are compared on copies: copy.deepcopy(model) raises "
            f"{type(error).__name__}: {reason}. Old torch.nn.utils.weight_norm is a known cause; "
            "torch.nn.utils.parametrizations has one for models that can be copied"
        ) from error


def _fresh(tensor: torch.Tensor, copies: dict[int, torch.Tensor]) -> torch.Tensor:
    """A copy that is a leaf; a tensor that is passed twice is copied once."""
    if id(tensor) not in copies:
        fresh = tensor.detach().clone(memory_format=torch.preserve_format)
        copies[id(tensor)] = fresh.requires_grad_(tensor.requires_grad)
    return copies[id(tensor)]


def step_times_ms(trainees: Sequence[Trainee], repeats: int) -> list[list[float]]:
    """Step times of several ways to train, taken in turn, in ms.

    On the CPU, freed memory is kept in the process, and steps in which more is taken from the system all the same
    (each way to train leaves it in other pieces) are repeated, up to three times as often as asked for.
    """
    times: list[list[float]] = [[] for _ in trainees]
    undisturbed: list[list[float]] = [[] for _ in trainees]
    with steady_heap() if trainees[0].device == "cpu" else contextlib.nullcontext():
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


def default_loss(output: Any) -> torch.Tensor:
    """A scalar to train on: an output's `loss`, or the mean of the squares of all its floating-point tensors.

    The latter takes no memory beside the outputs and their gradients, which is what a schedule counts of a loss.

    Raises:
        ModelError: nothing of the output has a gradient.
    """
    if isinstance(output, dict) and isinstance(output.get("loss"), torch.Tensor):
        found: torch.Tensor = output["loss"]
        return found
    tensors = [item for item in pytree.tree_leaves(output) if isinstance(item, torch.Tensor) and item.requires_grad]
    if not tensors:
        raise ModelError("nothing to train: no output of the model depends on a parameter that requires a gradient")
    return torch.stack([_MeanSquare.apply(item) for item in tensors]).sum()  # type: ignore[no-untyped-call]  # torch has no types for it


class _MeanSquare(torch.autograd.Function):
    """The mean of a tensor's squares, in at least float32, and nothing of its size in between."""

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
    """Train with other weights for a while, then have them, and buffers that steps change, as they were.

    `change` makes a parameter, by its name, of its value (at least float32), on the CPU.
    """
    kept = {name: item.detach().cpu().clone() for name, item in (*model.named_parameters(), *model.named_buffers())}
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
    """For `changed_weights`: every weight off by a fraction of itself, up or down at random."""
    generator = torch.Generator("cpu").manual_seed(seed)

    def change(_: str, weights: torch.Tensor) -> torch.Tensor:
        signs = torch.randint(0, 2, weights.shape, generator=generator, device="cpu").mul_(2).sub_(1)
        return weights.addcmul(weights, signs.to(weights), value=fraction)

    return change


__all__ = ["Peak", "Snapshot", "Trainee", "changed_weights", "copied", "default_loss", "off_by", "step_times_ms"]
