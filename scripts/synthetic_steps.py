"""Training steps of any size, made up, for measuring how the solver scales: a transformer, and a chain."""

from typing import NamedTuple

from monetlite.core.costs import Cost, Profile, ProfileKind
from monetlite.core.graph import Implementation, Operator, OperatorGraph, Phase, Resident, Value, ValueKind

BYTES_PER_MS = 700e6
FLOPS_PER_MS = 10e9
"""About what a large consumer GPU moves and computes in single precision."""

LAUNCH_MS = 0.004
FLOAT_BYTES = 4


class _Layer(NamedTuple):
    """A forward operator as its gradient sees it."""

    family: str
    inputs: list[int]
    saved: list[int]
    output: int
    flops: float
    weight_bytes: int
    module: str


class _Step:
    """Collects operators and values; an operator takes what its traffic or its arithmetic takes."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.operators: list[Operator] = []
        self.costs: list[tuple[Cost, ...]] = []
        self.layers: list[_Layer] = []

    def value(self, kind: ValueKind, size_bytes: int) -> int:
        self.values.append(Value(name=f"v{len(self.values)}", kind=kind, size_bytes=size_bytes))
        return len(self.values) - 1

    def operator(
        self, family: str, phase: Phase, reads: list[int], writes: list[int], flops: float, module: str
    ) -> None:
        reads = list(dict.fromkeys(reads))
        traffic = sum(self.values[value].size_bytes for value in (*reads, *writes))
        way = Implementation(name="default", reads=tuple(reads), writes=tuple(writes))
        name = f"{family}{len(self.operators)}"
        self.operators.append(
            Operator(name=name, family=family, phase=phase, implementations=(way,), module=module)
        )
        latency_ms = LAUNCH_MS + max(traffic / BYTES_PER_MS, flops / FLOPS_PER_MS)
        self.costs.append((Cost(latency_ms=latency_ms, workspace_bytes=0),))

    def layer(
        self,
        family: str,
        inputs: list[int],
        size_bytes: int,
        *,
        module: str,
        saves: str = "inputs",
        flops: float = 0.0,
        weight_bytes: int = 0,
    ) -> int:
        """A forward operator whose gradient reads its inputs, or `both` inputs and output, or `nothing`."""
        output = self.value(ValueKind.ACTIVATION, size_bytes)
        self.operator(family, Phase.FORWARD, inputs, [output], flops, module)
        saved = {"inputs": inputs, "both": [*inputs, output], "nothing": []}[saves]
        self.layers.append(_Layer(family, inputs, saved, output, flops, weight_bytes, module))
        return output

    def differentiate(self, result: int) -> None:
        """The backward part: input gradients, weight gradients, and sums where a value was read twice."""
        gradient_of = {result: self.value(ValueKind.TANGENT, self.values[result].size_bytes)}
        self.operator("loss", Phase.BACKWARD, [result], [gradient_of[result]], 0.0, "")
        for layer in reversed(self.layers):
            incoming = gradient_of.pop(layer.output)
            if layer.weight_bytes:
                weight = self.value(ValueKind.PARAM_GRAD, layer.weight_bytes)
                self.operator(
                    "weight_gradient",
                    Phase.BACKWARD,
                    [*layer.inputs, incoming],
                    [weight],
                    layer.flops,
                    layer.module,
                )
            reads = [incoming] if layer.weight_bytes else [*layer.saved, incoming]
            outgoing = [self.value(ValueKind.GRADIENT, self.values[value].size_bytes) for value in layer.inputs]
            if outgoing:
                self.operator(
                    f"{layer.family}_gradient", Phase.BACKWARD, reads, outgoing, layer.flops, layer.module
                )
            for value, gradient in zip(layer.inputs, outgoing, strict=True):
                if value in gradient_of:
                    total = self.value(ValueKind.GRADIENT, self.values[value].size_bytes)
                    both = [gradient_of[value], gradient]
                    self.operator("sum_gradients", Phase.BACKWARD, both, [total], 0.0, layer.module)
                    gradient = total
                gradient_of[value] = gradient

    def profile(self, name: str) -> Profile:
        graph = OperatorGraph(
            name=name,
            operators=tuple(self.operators),
            values=tuple(self.values),
            resident=Resident(parameters=sum(layer.weight_bytes for layer in self.layers)),
        )
        return Profile(graph=graph, device="made up", kind=ProfileKind.ESTIMATED, costs=tuple(self.costs))


def transformer_step(layers: int, tokens: int = 4096, width: int = 1024) -> Profile:
    """A training step of a pre-norm transformer in single precision, about 39 operators a layer."""
    step = _Step()
    small = FLOAT_BYTES * tokens * width

    def linear(value: int, inputs: int, outputs: int, module: str) -> int:
        return step.layer(
            "linear",
            [value],
            FLOAT_BYTES * tokens * outputs,
            flops=2.0 * tokens * inputs * outputs,
            weight_bytes=FLOAT_BYTES * inputs * outputs,
            module=module,
        )

    stream = step.layer("embedding", [], small, module="embedding")
    for number in range(layers):
        module = f"layers.{number}"
        normed = step.layer("layer_norm", [stream], small, module=module)
        heads = [linear(normed, width, width, module) for _ in range(3)]
        mixed = step.layer(
            "attention", heads, small, saves="both", flops=4.0 * tokens * 1024 * width, module=module
        )
        mixed = linear(mixed, width, width, module)
        mixed = step.layer("scale", [mixed], small, saves="nothing", module=module)
        stream = step.layer("add", [stream, mixed], small, saves="nothing", module=module)
        normed = step.layer("layer_norm", [stream], small, module=module)
        wide = linear(normed, width, 4 * width, module)
        wide = step.layer("gelu", [wide], 4 * small, module=module)
        narrow = linear(wide, 4 * width, width, module)
        stream = step.layer("add", [stream, narrow], small, saves="nothing", module=module)
    step.differentiate(stream)
    return step.profile(f"transformer of {layers} layers")


def chain_step(length: int, size_bytes: int = 8 * 2**20) -> Profile:
    """A chain of layers whose outputs are as large as each other; a gradient reads its layer's input."""
    step = _Step()
    value = step.layer("embedding", [], size_bytes, module="embedding")
    for number in range(length):
        value = step.layer("layer", [value], size_bytes, flops=(1 + number % 3) * 2e9, module=f"layers.{number}")
    step.differentiate(value)
    return step.profile(f"chain of {length} layers")
