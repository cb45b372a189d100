"""One training step as data: operators in execution order, and the values that pass between them.

Nothing here needs torch. A `Value` is a storage, not a tensor: views are part of the operators that read
them. An `Operator` offers one or more `Implementation`s, and each says which values it reads, writes and
overwrites. What is always in memory (weights, buffers, inputs, optimizer state, gradients of earlier batches)
is not a value; `Resident` counts it.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, Literal, TypeAlias

from monetlite.core.units import Count

LOSS = "monetlite.loss"
"""Family of the operator for code outside the model: it reads the outputs and writes their gradients."""
OUTSIDE = "monetlite.outside"
"""Family of operators for code between the pieces in which a model was captured."""
DELIVERY = "monetlite.delivery"
"""Family of the operators that hand gradients over to autograd, some at a time: not part of the model either."""
OPTIMIZER_STEP = "monetlite.optimizer_step"
"""Family of the operator that stands for the optimizer's step: priced with the rest, but not part of the model."""


AS_TRACED: Literal["as_traced"] = "as_traced"
CHANNELS_LAST: Literal["channels_last"] = "channels_last"
TILED_LOSS: Literal["tiled_loss"] = "tiled_loss"
TILED_ROWS: Literal["tiled_rows"] = "tiled_rows"
"""Layouts of a step: as the model has it; its images with the channels innermost throughout; a language model's
head and loss in tiles of rows; or these and its MLPs, projections and normalisations, each as one operator."""
LAYOUTS = (AS_TRACED, CHANNELS_LAST, TILED_LOSS, TILED_ROWS)
COMPILED_LAYOUTS = {
    AS_TRACED: "compiled",
    CHANNELS_LAST: "compiled_channels_last",
    TILED_LOSS: "compiled_tiled_loss",
    TILED_ROWS: "compiled_tiled_rows",
}
"""For each layout, the one in which regions of operators are compiled, too."""
LAYOUTS_IN_WORDS = {
    AS_TRACED: "",
    CHANNELS_LAST: "images in channels-last",
    TILED_LOSS: "head and loss in tiles of rows",
    TILED_ROWS: "head and loss, MLPs, projections and norms in tiles of rows",
    "compiled": "regions compiled by Inductor",
    "compiled_channels_last": "regions compiled by Inductor, images in channels-last",
    "compiled_tiled_loss": "regions compiled by Inductor, head and loss in tiles of rows",
    "compiled_tiled_rows": "regions compiled by Inductor; head, loss, MLPs, projections, norms in tiles of rows",
}
Layout: TypeAlias = Literal[
    "as_traced",
    "channels_last",
    "tiled_loss",
    "tiled_rows",
    "compiled",
    "compiled_channels_last",
    "compiled_tiled_loss",
    "compiled_tiled_rows",
]


def uncompiled_layout(layout: str) -> str:
    """The layout without its regions."""
    return next((plain for plain, compiled in COMPILED_LAYOUTS.items() if compiled == layout), layout)


LOSS_ONLY: Literal["loss"] = "loss"
ALL_OUTPUTS: Literal["all"] = "all"
TRAINED_OUTPUTS: Literal["trained"] = "trained"
"""Outputs that the caller of a model with a loss gets: the loss and what is small, all, or all with gradients."""


class Phase(StrEnum):
    FORWARD = "forward"
    BACKWARD = "backward"


class ValueKind(StrEnum):
    ACTIVATION = "activation"
    """Computed in the forward pass; may be stored, or dropped and computed again."""
    INTERMEDIATE = "intermediate"
    """Computed from activations for the backward pass alone (a packed mask, a pooling offset)."""
    GRADIENT = "gradient"
    """Computed in the backward pass; dies at its last read."""
    OUTPUT = "output"
    """Returned to the caller, who holds it until the step ends."""
    TANGENT = "tangent"
    """The gradient of an output, held by autograd until the step ends."""
    PARAM_GRAD = "param_grad"
    """The gradient of a parameter or an input: never freed once written."""
    STATISTIC = "statistic"
    """A few numbers that later runs of the operator that writes them read (the mean of a batch)."""


HELD = frozenset({ValueKind.OUTPUT, ValueKind.TANGENT, ValueKind.PARAM_GRAD, ValueKind.STATISTIC})
"""Kinds that stay in memory from when they are written until the step ends."""


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """The layout of a tensor. Calls of an operator on equal layouts cost the same.

    `shape` and `stride` count elements; `dtype` is torch's name without the `torch.` prefix.
    """

    shape: tuple[Count, ...]
    stride: tuple[Count, ...]
    dtype: str
    requires_grad: bool = False


@dataclass(frozen=True, kw_only=True)
class TensorRef:
    """A tensor argument of a call: a (view of a) value, or of something resident when `value` is None.

    `node` names the tensor in the captured graph, from which the view is rebuilt when a schedule is lowered.
    """

    node: str
    value: int | None
    spec: TensorSpec


@dataclass(frozen=True, kw_only=True)
class TorchConstant:
    """A dtype, device, layout or memory format among a call's arguments, by name: `("dtype", "float32")`."""

    kind: str
    name: str


Argument: TypeAlias = "TensorRef | TorchConstant | bool | int | float | str | tuple[Argument, ...] | None"


@dataclass(frozen=True, kw_only=True)
class Call:
    """The call that executes an implementation: a function by its registered name, and its arguments.

    `outputs[i]` names the captured tensor that the i-th result becomes; None where nobody reads it.
    """

    target: str
    args: tuple[Argument, ...]
    kwargs: tuple[tuple[str, Argument], ...] = ()
    outputs: tuple[str | None, ...]

    def tensors(self) -> Iterator[TensorRef]:
        """Every tensor argument, in order."""

        def walk(argument: Argument) -> Iterator[TensorRef]:
            if isinstance(argument, TensorRef):
                yield argument
            elif isinstance(argument, tuple):
                for item in argument:
                    yield from walk(item)

        yield from walk((*self.args, *(value for _, value in self.kwargs)))

    @cached_property
    def signature(self) -> str:
        """Everything that the cost of this call depends on: target, layouts and constants, as canonical JSON.

        Calls that share storage between arguments are told apart from calls that don't.
        """
        storages: dict[tuple[int | None, str], int] = {}

        def encode(argument: Argument) -> Any:
            if isinstance(argument, TensorRef):
                key = (argument.value, "" if argument.value is not None else argument.node)
                spec = argument.spec
                return {"t": [spec.shape, spec.stride, spec.dtype, storages.setdefault(key, len(storages))]}
            if isinstance(argument, TorchConstant):
                return {argument.kind: argument.name}
            if isinstance(argument, tuple):
                return [encode(item) for item in argument]
            return repr(argument) if isinstance(argument, float) else argument

        kwargs = {name: encode(value) for name, value in self.kwargs}
        used = [name is not None for name in self.outputs]
        return json.dumps([self.target, encode(self.args), kwargs, used], sort_keys=True, separators=(",", ":"))


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """One way to run an operator.

    Attributes:
        overwrites: values whose memory it takes over; they must die at the step.
        tolerance: largest difference of a result from the default implementation's, as a fraction of the largest
            sum of magnitudes on the way to it; 0 promises the same bits.
        devices: devices that it can run on (`cpu`, `cuda`); any, if empty.
        guard: a call on weights, made when a training step begins, that returns if `tolerance` holds for them.
        again: the call of re-runs, if that is another one.
    """

    name: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    overwrites: tuple[int, ...] = ()
    tolerance: float = 0.0
    devices: tuple[str, ...] = ()
    guard: Call | None = None
    call: Call | None = None
    again: Call | None = None


@dataclass(frozen=True, kw_only=True)
class Operator:
    """One kernel of the step. `implementations[0]` is what plain training runs.

    `optional` operators are forward operators that only the backward pass needs: they run wherever it suits,
    or never. An operator that is not `rerunnable` (it draws random numbers, or has a side effect) runs once.
    `derived` operators are optional ones that plain training never runs: an implementation of another operator
    reads what they write. They are not part of what a fingerprint is of.
    """

    name: str
    family: str
    phase: Phase
    implementations: tuple[Implementation, ...]
    optional: bool = False
    rerunnable: bool = True
    derived: bool = False
    module: str = ""
    source: str = ""

    @property
    def writes(self) -> tuple[int, ...]:
        return self.implementations[0].writes

    def find(self, name: str) -> Implementation | None:
        """The implementation of that name, if there is one."""
        return next((item for item in self.implementations if item.name == name), None)


@dataclass(frozen=True, kw_only=True)
class Value:
    """A storage: its size, its kind, and the layout of the tensor that its one writer makes of it.

    A `note` is a value that one device's kernel leaves for its own gradient, such as its place in the generator's
    sequence. Another device's kernel leaves another, so notes are not part of a graph's structure.
    """

    name: str
    kind: ValueKind
    size_bytes: int
    shape: tuple[int, ...] = ()
    dtype: str = ""
    note: bool = False

    @property
    def held(self) -> bool:
        return self.kind in HELD


@dataclass(frozen=True, kw_only=True)
class Resident:
    """Bytes that are in memory all through the step."""

    parameters: Count = 0
    buffers: Count = 0
    inputs: Count = 0
    optimizer: Count = 0
    gradients: Count = 0
    """Of earlier batches, to which those of this step are added; copies in DistributedDataParallel's buckets."""
    libraries: Count = 0
    """Memory that libraries keep between their calls: cuBLAS's workspaces on CUDA."""

    @property
    def total(self) -> int:
        return sum(getattr(self, item.name) for item in fields(self))


@dataclass(frozen=True, kw_only=True)
class OperatorGraph:
    """A training step: operators in execution order, forward before backward, and their values.

    Operators and values are referred to by their index. Operator names are unique.
    """

    name: str
    operators: tuple[Operator, ...]
    values: tuple[Value, ...]
    resident: Resident
    inputs: Mapping[str, TensorSpec] = field(default_factory=dict)
    device: str = "cpu"
    """The device it was traced on (`cpu` or `cuda`), or the name of the device that it was traced for."""
    layout: str = AS_TRACED
    autocast: str = ""
    """The dtype that `torch.autocast` converts operands to, as torch names it; empty where it is off."""
    outputs: str = ALL_OUTPUTS
    """Those that the caller gets of a model with a loss (`loss` or `all`)."""

    def __post_init__(self) -> None:
        assert len({operator.name for operator in self.operators}) == len(self.operators), "names must be unique"
        seen_backward = False
        for operator in self.operators:
            seen_backward |= operator.phase is Phase.BACKWARD
            assert not (seen_backward and operator.phase is Phase.FORWARD), "forward operators come first"

    @cached_property
    def by_name(self) -> dict[str, int]:
        return {operator.name: index for index, operator in enumerate(self.operators)}

    @cached_property
    def mandatory_forward(self) -> tuple[int, ...]:
        """Forward operators that run once in order: those that are not optional."""
        return tuple(at for at, op in enumerate(self.operators) if op.phase is Phase.FORWARD and not op.optional)

    @cached_property
    def writer(self) -> dict[int, int]:
        """For each value, the operator that writes it."""
        return {value: index for index, operator in enumerate(self.operators) for value in operator.writes}

    @property
    def outputs_bytes(self) -> int:
        """Bytes of the outputs that have a gradient."""
        return sum(value.size_bytes for value in self.values if value.kind is ValueKind.TANGENT)

    def available(self, device: str) -> "OperatorGraph":
        """The same graph with the implementations that can run on a device (`cpu` or `cuda`)."""
        return self.restricted(lambda item: not item.devices or device in item.devices)

    def restricted(self, allowed: Callable[[Implementation], bool]) -> "OperatorGraph":
        """The same graph with the defaults and the implementations that are allowed."""
        return replace(
            self,
            operators=tuple(
                replace(item, implementations=(item.implementations[0], *filter(allowed, item.implementations[1:])))
                for item in self.operators
            ),
        )

    @cached_property
    def fingerprint(self) -> str:
        """Ties a schedule to what it was solved for: operators, edges, and every value's size and dtype."""
        values = [self.values[value] for operator in self.traced for value in operator.writes]
        sizes = [(value.size_bytes, value.shape, value.dtype) for value in values]
        return _digest([self._structure(), sizes])

    @cached_property
    def structure(self) -> str:
        """The fingerprint without sizes: the same for another batch size of the same model."""
        return _digest(self._structure())

    @cached_property
    def operator_digests(self) -> tuple[str, ...]:
        """Four hexadecimal digits for each of the model's own operators, from its family and its reads.

        They prove nothing; they help to name the operator that differs.
        """
        digests = []
        for family, phase, _, _, reads, writes in self._structure():
            behind = [writes[0] - value if writes and value >= 0 else value for value in reads]
            digests.append(_digest([family, phase, behind, len(writes)])[:4])
        return tuple(digests)

    @cached_property
    def traced(self) -> tuple[Operator, ...]:
        """The model's own operators."""
        return tuple(op for op in self.operators if op.family not in (DELIVERY, OPTIMIZER_STEP) and not op.derived)

    def _structure(self) -> list[Any]:
        notes = {index for index, value in enumerate(self.values) if value.note}
        written = (value for operator in self.traced for value in operator.writes if value not in notes)
        number = {value: position for position, value in enumerate(written)}
        return [
            [
                operator.family,
                operator.phase,
                operator.optional,
                operator.rerunnable,
                [number.get(value, -1) for value in operator.implementations[0].reads if value not in notes],
                [number[value] for value in operator.writes if value not in notes],
            ]
            for operator in self.traced
        ]


def _digest(data: object) -> str:
    text = json.dumps(data, separators=(",", ":"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]
