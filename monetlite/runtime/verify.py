"""Checking a scheduled model against plain training: gradients, buffers, random state, peak and step time."""

import contextlib
import copy
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from monetlite.profiling.heap import steady_heap
from monetlite.profiling.memory import peak_growth_bytes
from monetlite.profiling.meters import FEW_FAULTS, page_faults
from monetlite.runtime.wrapper import MONeTWrapper
from monetlite.schedule import Schedule
from monetlite.tracing.build import Inputs, resident_bytes, split_inputs

REORDERED_SUMS = 1e-6
"""Largest relative difference of a gradient that capturing a model, which orders some sums anew, can make."""
SLACK = 10
"""How many times further than plain training with weights that are off by its tolerance a schedule may be."""

NEGLIGIBLE = 1e-3
"""Gradients this small beside the model's largest are compared on that scale where sums are reordered: those that
cancel to nothing (of a weight in front of a normalisation) are rounding errors in plain training too."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What `verify` found. Differences are the largest absolute one over the largest absolute value.

    Attributes:
        gradients: for each parameter and input with a gradient, its difference from plain training's.
        buffers: the same for the module's buffers after the step.
        loss: the same for the output.
        random_state: whether the generator is left as plain training leaves it.
        peak_bytes, plain_peak_bytes: measured peak of the step, resident memory included.
        predicted_peak_bytes, budget_bytes: what the schedule promises and was asked for; the prediction is
            for the batch it was solved for.
        step_ms, plain_step_ms: median measured step times, taken in turn.
        same_shapes: whether the inputs are those the schedule was solved for.
        allowed_difference: what the largest difference may be: rounding; or, for a schedule with a tolerance,
            `SLACK` times what plain training's gradients move by when every weight is off by that much.
    """

    gradients: Mapping[str, float]
    buffers: Mapping[str, float]
    loss: float
    random_state: bool
    peak_bytes: int
    plain_peak_bytes: int
    predicted_peak_bytes: int
    budget_bytes: int
    step_ms: float
    plain_step_ms: float
    same_shapes: bool
    allowed_difference: float = REORDERED_SUMS

    @property
    def exact(self) -> bool:
        """Whether everything is bit for bit as plain training's."""
        return self.random_state and self.largest_difference == 0.0

    @property
    def largest_difference(self) -> float:
        return max((self.loss, *self.gradients.values(), *self.buffers.values()))

    @property
    def within_budget(self) -> bool:
        return self.peak_bytes <= self.budget_bytes

    @property
    def passed(self) -> bool:
        """Same training, up to `allowed_difference`, and a peak within the budget."""
        return self.random_state and self.largest_difference <= self.allowed_difference and self.within_budget


def verify(
    model: nn.Module,
    schedule: Schedule,
    example_inputs: Inputs,
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    repeats: int = 3,
    seed: int = 0,
) -> Report:
    """Run one training step plainly and by the schedule, and compare everything they leave behind.

    The model itself is not changed: both run on copies.

    Args:
        model: the module the schedule is for, in training mode (a wrapped one is unwrapped).
        schedule: as for `MONeTWrapper`.
        example_inputs: as for `trace`.
        loss: makes a scalar of the model's output; by default its `loss`, or the mean of the squares of
            every floating-point output.
        repeats: timed steps of each.
        seed: of the random numbers of both.

    Raises:
        ScheduleMismatch, ModelError: as `MONeTWrapper`.
    """
    if isinstance(model, MONeTWrapper):
        model = model.model
    objective = loss or default_loss
    args, kwargs = split_inputs(example_inputs)
    device = "cuda" if any(item.is_cuda for item in model.parameters()) else "cpu"
    plain, scheduled = (
        Trainee(
            trained, args, kwargs, objective, device, accumulate=schedule.accumulate, autocast=schedule.autocast
        )
        for trained in (copy.deepcopy(model), MONeTWrapper(copy.deepcopy(model), schedule))
    )
    expected, found = plain.snapshot(seed), scheduled.snapshot(seed)
    allowed = REORDERED_SUMS
    if schedule.tolerance > 0:
        allowed = max(allowed, SLACK * _sensitivity(plain, expected, schedule.tolerance, seed))
    plain_ms, scheduled_ms = map(statistics.median, step_times_ms((plain, scheduled), repeats))
    negligible = NEGLIGIBLE if schedule.tolerance > REORDERED_SUMS else 0.0
    leaves = [item for item in pytree.tree_leaves((args, kwargs)) if isinstance(item, torch.Tensor)]
    shapes = [tuple(item.shape) for item in leaves]
    return Report(
        gradients=_differences(expected.gradients, found.gradients, negligible),
        buffers=_differences(expected.buffers, found.buffers, negligible),
        loss=_difference(expected.loss, found.loss),
        random_state=torch.equal(expected.random_state, found.random_state),
        peak_bytes=scheduled.peak_bytes(),
        plain_peak_bytes=plain.peak_bytes(),
        predicted_peak_bytes=schedule.peak_bytes,
        budget_bytes=schedule.budget_bytes,
        step_ms=scheduled_ms,
        plain_step_ms=plain_ms,
        same_shapes=shapes == [spec.shape for spec in schedule.inputs.values()],
        allowed_difference=allowed,
    )


def step_times_ms(trainees: "Sequence[Trainee]", repeats: int) -> list[list[float]]:
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
                    if page_faults() - faults <= FEW_FAULTS:
                        good_ms.append(taken)
    return [good or every for good, every in zip(undisturbed, times, strict=True)]


def _sensitivity(plain: "Trainee", expected: "_Snapshot", tolerance: float, seed: int) -> float:
    """How far a plain step's gradients move when every weight is off by a fraction of itself, up or down."""
    generator = torch.Generator("cpu").manual_seed(seed)
    parameters = list(plain.model.parameters())
    kept = [parameter.detach().clone() for parameter in parameters]
    buffers = {name: buffer.clone() for name, buffer in plain.model.named_buffers()}
    with torch.no_grad():
        for parameter in parameters:
            sign = torch.randint(0, 2, parameter.shape, generator=generator, device="cpu").mul_(2).sub_(1)
            parameter.addcmul_(parameter, sign.to(parameter), value=tolerance)
    try:
        moved = plain.snapshot(seed)
    finally:
        with torch.no_grad():
            for parameter, value in zip(parameters, kept, strict=True):
                parameter.copy_(value)
            for name, buffer in plain.model.named_buffers():
                buffer.copy_(buffers[name])
    return max(_differences(expected.gradients, moved.gradients, NEGLIGIBLE).values(), default=0.0)


def default_loss(output: Any) -> torch.Tensor:
    """A scalar to train on: an output's `loss`, or the mean of the squares of all its floating-point tensors."""
    if isinstance(output, dict) and isinstance(output.get("loss"), torch.Tensor):
        found: torch.Tensor = output["loss"]
        return found
    tensors = [item for item in pytree.tree_leaves(output) if isinstance(item, torch.Tensor) and item.requires_grad]
    return torch.stack([item.float().square().mean() for item in tensors]).sum()


@dataclass(frozen=True, kw_only=True)
class _Snapshot:
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    random_state: torch.Tensor


class Trainee:
    """A model that takes training steps, always from no gradients, or to `accumulate` from gradients of zero."""

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
    ) -> None:
        self.accumulate = accumulate
        self.autocast = getattr(torch, autocast) if autocast else None
        self.model, self.objective, self.device = model, objective, device
        copies: dict[int, torch.Tensor] = {}
        self.args, self.kwargs = pytree.tree_map_only(
            torch.Tensor, lambda tensor: _fresh(tensor, copies), (args, kwargs)
        )
        self.inputs = [
            item for item in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(item, torch.Tensor)
        ]

    def step(self) -> torch.Tensor:
        self._clear()
        # A training loop holds the model's output until the step ends; the schedule counts on that.
        with torch.autocast(self.device, self.autocast, enabled=self.autocast is not None):
            output = self.model(*self.args, **self.kwargs)
            loss = self.objective(output)
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
        return loss.detach()

    def snapshot(self, seed: int) -> _Snapshot:
        """What one step leaves behind, from a seed."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            loss = self.step()
            random_state = torch.cuda.get_rng_state() if self.device == "cuda" else torch.get_rng_state()
        named = [
            *self.model.named_parameters(),
            *((f"input {i}", item) for i, item in enumerate(self.inputs)),
        ]
        return _Snapshot(
            loss=loss.clone(),
            gradients={name: tensor.grad.clone() for name, tensor in named if tensor.grad is not None},
            buffers={name: tensor.clone() for name, tensor in self.model.named_buffers()},
            random_state=random_state,
        )

    def time_ms(self) -> float:
        self._synchronize()
        start = time.perf_counter()
        self.step()
        self._synchronize()
        return (time.perf_counter() - start) * 1000

    def peak_bytes(self) -> int:
        """Resident memory of the step, and the most it allocates beyond that."""
        self._clear()
        model = self.model.model if isinstance(self.model, MONeTWrapper) else self.model
        kept = sum(tensor.grad.nbytes for tensor in self._leaves() if tensor.grad is not None)
        return resident_bytes(model, self.inputs).total + kept + peak_growth_bytes(self.step, self.device)

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


def _fresh(tensor: torch.Tensor, copies: dict[int, torch.Tensor]) -> torch.Tensor:
    """A copy that is a leaf; a tensor that is passed twice is copied once."""
    if id(tensor) not in copies:
        copy = tensor.detach().clone(memory_format=torch.preserve_format)
        copies[id(tensor)] = copy.requires_grad_(tensor.requires_grad)
    return copies[id(tensor)]


def _differences(
    expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor], negligible: float = 0.0
) -> dict[str, float]:
    missing = float("inf")
    largest = max((tensor.abs().max().item() for tensor in expected.values() if tensor.numel()), default=0.0)
    least = negligible * largest
    return {
        name: _difference(expected[name], found[name], least) if name in expected and name in found else missing
        for name in (*expected, *(name for name in found if name not in expected))
    }


def _difference(expected: torch.Tensor, found: torch.Tensor, least: float = 0.0) -> float:
    """The largest difference over the largest magnitude, or over `least` where that is more."""
    if expected.shape != found.shape:
        return float("inf")
    if torch.equal(expected, found):
        return 0.0
    expected, found = expected.double(), found.double()
    worst = (expected - found).abs().max().item()
    largest = max(expected.abs().max().item(), least)
    if worst != worst:
        return 0.0 if torch.equal(expected.nan_to_num(), found.nan_to_num()) else float("inf")
    return worst / largest if largest > 0 else worst


__all__ = ["REORDERED_SUMS", "Report", "verify"]
