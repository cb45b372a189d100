"""Advice where nothing fits: the memory at the smallest peak by purpose, and settings that take less of it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from monetlite.core.costs import Cost
from monetlite.core.graph import DELIVERY, OPTIMIZER_STEP, Phase, Value, ValueKind
from monetlite.core.simulate import simulate
from monetlite.core.source import batch_of
from monetlite.core.step_analysis import StepAnalysis
from monetlite.core.steps import Step, step_in_words
from monetlite.core.units import format_bytes

MOST_SETTINGS = 4
MIN_SHARE = 0.2
"""Smallest part of the missing memory that a setting has to save to be named."""
NAMED_PART, NAMED_TENSOR = 0.01, 0.1
"""Smallest shares of the peak from which a purpose, or a tensor, is named."""
_EIGHT_BIT = (1 + 4 / 256) / 4
"""State of 8-bit Adam over that of Adam in float32."""
_HALVED = {"float32": 0.5, "complex64": 0.5, "float64": 0.25}
"""Size in bfloat16 over the size in another dtype."""
LOSS_FAMILIES = ("log_softmax", "nll_loss", "cross_entropy")
"""Families of a loss, begun with. Models compute it in float32, beside a copy of what they make in bfloat16."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting that lowers the smallest peak: how people call and write it, and the peak with it."""

    name: str
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class LeastPeak(StepAnalysis):
    """The leanest schedule known of a step: what fills memory at its peak, and settings that lower the peak.

    Settings are priced on the same steps with other sizes. The smallest peak with a setting is at most that.

    Attributes:
        others: schedules of the step that may be leaner with a setting, where the optimizer's step makes the peak.
    """

    others: tuple[tuple[Step, ...], ...] = ()

    def advice(self, budget_bytes: int) -> str:
        """Sentences on what fills the peak, and lines on what would help."""
        named = sorted(self.peak_bytes_of.items(), key=lambda item: -item[1])
        filled = [f"{format_bytes(size)} {what}" for what, size in named if size >= NAMED_PART * self.peak_bytes]
        lines = [f"That peak holds {', '.join(filled)}.{self._largest_tensor()}"]
        helpful = self.settings(budget_bytes)
        if not helpful:
            return f"{lines[0]} Raise the budget"
        lines.append("Raise the budget, or change what fills it:")
        for item in helpful:
            saved = format_bytes(self.peak_bytes - item.peak_bytes)
            lines.append(f"  {item.name}: about −{saved}, to {format_bytes(item.peak_bytes)}")
        return "\n".join(lines)

    def settings(self, budget_bytes: int) -> tuple[Setting, ...]:
        """Settings that save a part of what is missing that matters; those that save most first."""
        least_bytes = max(1, MIN_SHARE * (self.peak_bytes - budget_bytes))
        found = [item for item in self._settings(budget_bytes) if self.peak_bytes - item.peak_bytes >= least_bytes]
        return tuple(sorted(found, key=lambda item: item.peak_bytes)[:MOST_SETTINGS])

    def _largest_tensor(self) -> str:
        held = self.held_at(self.timeline.peak_step)
        value = max((stay.value for stay in held), key=lambda at: self.graph.values[at].size_bytes, default=None)
        if value is None or self.graph.values[value].size_bytes < NAMED_TENSOR * self.peak_bytes:
            return ""
        largest, writer = self.graph.values[value], self.graph.operators[self.graph.writer[value]].name
        kind = f"{'×'.join(map(str, largest.shape))} {largest.dtype}, " if largest.shape else ""
        return f" The largest tensor is {writer}'s: {kind}{format_bytes(largest.size_bytes)}."

    def _settings(self, budget_bytes: int) -> Iterator[Setting]:
        if self.profile.optimizer in ("adam", "adamw"):
            name = "8-bit AdamW (optimizer='adamw8bit', or --optimizer adamw8bit)"
            yield Setting(name=name, peak_bytes=self._peak(optimizer=_EIGHT_BIT))
        if self.graph.resident.optimizer:
            name = "SGD, without state (optimizer='sgd', or --optimizer sgd)"
            yield Setting(name=name, peak_bytes=self._peak(optimizer=0.0))
        if 2 * self.trained_bytes > self.graph.resident.parameters:
            # Adapters come back with about a hundredth of what the frozen weights' gradients take.
            yield Setting(name="LoRA on frozen weights (peft)", peak_bytes=self._peak(trained=0.01))
        if self.narrowed_bytes:
            name = "bfloat16 weights (model.to(torch.bfloat16), or --dtype bfloat16)"
            yield Setting(name=name, peak_bytes=self._narrowed())
        yield from self._smaller_inputs(budget_bytes)

    def _smaller_inputs(self, budget_bytes: int) -> Iterator[Setting]:
        """The largest batch that fits, of halves; at batch 1, inputs of half the size."""
        if not self.graph.resident.parameters:
            return  # by torch.compile, parameters are among the inputs
        if self.batch == 1:
            name = "inputs half as large (in a command, --sequence-length or --input-size)"
            yield Setting(name=name, peak_bytes=self._peak(inputs=0.5))
        smaller = self.batch
        while smaller > 1:
            smaller //= 2
            peak_bytes = self._peak(inputs=smaller / self.batch)
            if peak_bytes <= budget_bytes or smaller == 1:
                yield Setting(name=f"batch {smaller} instead of {self.batch}", peak_bytes=peak_bytes)
                return

    @property
    def batch(self) -> int:
        """The first dimension of the inputs; 0 if there is none."""
        return batch_of(self.profile.source, self.graph.inputs) or 0

    @cached_property
    def trained_bytes(self) -> int:
        """Bytes of the weights that have gradients."""
        own_bytes = sum(self.graph.values[value].size_bytes for value in self.weight_gradients)
        return min(max(own_bytes, self.graph.resident.gradients), self.graph.resident.parameters)

    @cached_property
    def weight_gradients(self) -> frozenset[int]:
        """Gradients of weights; those that are added to gradients of earlier batches are of another kind."""
        delivered = (op.implementations[0] for op in self.graph.operators if op.family == DELIVERY)
        ends = {value for item in delivered for value in (*item.reads, *item.writes)}
        return frozenset(
            at for at, item in enumerate(self.graph.values) if at in ends or item.kind is ValueKind.PARAM_GRAD
        )

    @cached_property
    def casts(self) -> frozenset[int]:
        """Values that are copies of weights in autocast's dtype."""
        return frozenset(
            value
            for operator in self.graph.operators
            if operator.family == "to_copy" and operator.phase is Phase.FORWARD
            for value in operator.writes
            if not operator.implementations[0].reads and self.graph.values[value].dtype == self.graph.autocast
        )

    @cached_property
    def of_weights(self) -> frozenset[int]:
        """Values whose sizes are those of weights: casts, gradients, and what gradients are computed from alone."""
        values = self.graph.values
        found = set(self.casts | self.weight_gradients)
        for operator in reversed(self.graph.operators):
            for written in found.intersection(operator.writes):
                found.update(
                    value
                    for value in operator.implementations[0].reads
                    if values[value].kind is ValueKind.GRADIENT and values[value].shape == values[written].shape
                )
        return frozenset(found)

    @cached_property
    def narrowed_bytes(self) -> int:
        """Bytes of weights in float32, as far as it is known."""
        if any(self.graph.values[value].dtype not in _HALVED for value in self.weight_gradients):
            return 0
        parameters = self.graph.resident.parameters
        if self.graph.autocast:
            cast_bytes = sum(self.graph.values[value].size_bytes for value in self.casts)
            return min(parameters, max(self.trained_bytes, 2 * cast_bytes))
        narrow = any(value.dtype in ("bfloat16", "float16") for value in self.graph.values)
        return self.trained_bytes if narrow else parameters

    def _narrowed(self) -> int:
        """The peak with weights, and without autocast everything, in bfloat16."""
        resident = self.graph.resident
        everything = not self.graph.autocast
        losses = [operator for operator in self.graph.operators if operator.family.startswith(LOSS_FAMILIES)]
        wide = {value: 1.0 for operator in losses for value in operator.writes}
        wide = {value: 1.5 for operator in losses for value in operator.implementations[0].reads} | wide

        def size(at: int, value: Value) -> float:
            if at in self.casts:
                return 0
            if at in wide and everything:
                return value.size_bytes * wide[at]
            if value.kind is ValueKind.STATISTIC or not (everything or at in self.weight_gradients):
                return value.size_bytes
            return value.size_bytes * _HALVED.get(value.dtype, 1)

        return self._repriced(
            size,
            parameters=resident.parameters - self.narrowed_bytes // 2,
            optimizer=resident.optimizer // 2,
            gradients=resident.gradients // 2,
            step_share=0.5,
        )

    def _peak(self, *, inputs: float = 1.0, optimizer: float = 1.0, trained: float = 1.0) -> int:
        """The peak where inputs, the optimizer's state or the trained weights are a fraction of what they are."""
        resident = self.graph.resident

        def size(at: int, value: Value) -> float:
            if at in self.weight_gradients:
                return value.size_bytes * trained
            scales = at not in self.of_weights and value.size_bytes % max(2, self.batch) == 0
            return value.size_bytes * inputs if scales else value.size_bytes

        return self._repriced(
            size,
            inputs=int(resident.inputs * inputs),
            optimizer=int(resident.optimizer * optimizer * trained),
            gradients=int(resident.gradients * trained),
            # 8-bit AdamW steps in place. SGD holds as much on a GPU as Adam and AdamW.
            step_share=0.0 if optimizer == _EIGHT_BIT else trained,
            work_share=inputs,
        )

    def _repriced(
        self, size: Callable[[int, Value], float], *, step_share: float, work_share: float = 1.0, **resident: int
    ) -> int:
        """The peak of the same steps with other sizes of values, resident memory and workspaces."""
        values = tuple(
            replace(value, size_bytes=int(size(at, value))) for at, value in enumerate(self.graph.values)
        )
        graph = replace(self.graph, values=values, resident=replace(self.graph.resident, **resident))

        def priced(cost: Cost, share: float) -> Cost:
            again = cost.recompute_workspace_bytes
            return replace(
                cost,
                workspace_bytes=int(cost.workspace_bytes * share),
                recompute_workspace_bytes=None if again is None else int(again * share),
            )

        costs = tuple(
            tuple(
                priced(cost, step_share if operator.family in (OPTIMIZER_STEP, DELIVERY) else work_share)
                for cost in of
            )
            for operator, of in zip(graph.operators, self.profile.costs, strict=True)
        )
        profile = replace(self.profile, graph=graph, costs=costs)
        return min(simulate(profile, steps).peak_bytes for steps in (self.steps, *self.others))

    def place(self) -> str:
        """The operator and the step at the peak."""
        return f"at {self.peak_operator}, {step_in_words(self.timeline.peak_step, len(self.steps))}"
