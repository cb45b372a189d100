"""Regions: what lies between matrix products, convolutions and attention, as one operator.

A region is a small program of pointwise operators, reductions and copies. Run one by one, its operators make the
bits of plain training. Compiled by Inductor, they are a loop or two, and what they compute on the way is never
stored. Both are functions that calls name, by a digest of the program and its sizes: equal regions of a model are
compiled once, measured once, and found in Inductor's cache on disk by the next process.

`monetlite.tracing.region_finder` finds regions in a captured graph.
"""

import hashlib
import json
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from monetlite.core.errors import CompileError, first_line
from monetlite.core.graph import Implementation, TensorRef, TorchConstant
from monetlite.fx import storages
from monetlite.fx.call_encoding import decode_argument, encode_arguments, spec_of
from monetlite.fx.direct_calls import as_function
from monetlite.fx.torch_internals import torch_pytree as pytree
from monetlite.fx.torch_internals.patching import patched
from monetlite.fx.torch_internals.torch_dispatch import without_modes
from monetlite.fx.torch_internals.torch_graph_modules import graph_module
from monetlite.operators.implementations import FUNCTIONS, PREFIX, TracedKernel, function, target_of

REGION_CALLS = "monetlite_region_calls"
"""Key of a region's node's `meta`: its `RegionCall`s."""
Over: TypeAlias = tuple[int, int]
"""Positions of a result and of the argument that it overwrites."""
TEXTS: dict[str, str] = {}
"""Descriptions of regions that are still to be compiled in this process, by the target of their calls."""
_ITEM = "item"
_COMPILED = "compiled_region"


@dataclass(frozen=True, kw_only=True)
class RegionCall:
    """A call that runs a region in place of the default one.

    Attributes:
        name: of the implementation.
        run: registered function.
        args: nodes of the captured graph.
        tolerance: see `Implementation`.
        over: the result that overwrites an argument, if one does.
    """

    name: str
    run: Callable[..., Any]
    args: tuple[fx.Node, ...]
    tolerance: float = 0.0
    over: Over | None = None


def implement(kernel: TracedKernel, call: RegionCall, args: tuple[TensorRef, ...]) -> Implementation | None:
    """The implementation of a region's kernel by a call; None if it can't overwrite what it would."""
    overwrites: tuple[int, ...] = ()
    if call.over is not None:
        result, position = call.over
        source, written = args[position].value, kernel.default.writes[result]
        if source is None or kernel.values[source].held:
            return None
        if kernel.values[source].size_bytes != kernel.values[written].size_bytes:
            return None
        overwrites = (source,)
    return kernel.implement(call.name, call.run, args=args, tolerance=call.tolerance, overwrites=overwrites)


def one_by_one(program: fx.GraphModule) -> Callable[..., Any]:
    """The registered function that runs a region's operators in order, each value freed after its last use."""
    kernels = [node for node in program.graph.nodes if storages.is_kernel(node)]
    moved = sum(_bytes(item) for node in kernels for item in (*node.all_input_nodes, *storages.results(node)))
    count, inner_bytes, kept = len(kernels), _inner_bytes(program), _copied(program)
    return _registered(
        "region",
        described(program),
        lambda: as_function(kept),
        passes=moved / max(1, moved_bytes(program)),
        launches=lambda _: count,
        workspace_bytes=lambda _: inner_bytes,
    )


def is_compiled(target: str) -> bool:
    """True if calls of this target run a region as Inductor compiles it."""
    return target.startswith(PREFIX + _COMPILED)


def is_region(target: str) -> bool:
    """True if calls of this target run a region, in any way."""
    return is_compiled(target) or target.startswith(f"{PREFIX}region.")


def compiled(program: fx.GraphModule, over: Over | None = None) -> Callable[..., Any]:
    """The registered function that runs a region as Inductor compiles it, when it is first called.

    It raises CompileError if Inductor can't.

    Args:
        over: the result that overwrites an argument, if one does.
    """
    text = described(program, over)

    def make() -> Callable[[list[Any]], Any]:
        try:
            return compile_text(text)
        except Exception as error:
            raise CompileError(
                f"Inductor can't compile a region of operators: {first_line(error)}. Solve with costs that "
                "are measured here (no device's name), which leaves such regions out, or without compile=True"
            ) from error

    inner_bytes = _inner_bytes(program)  # at most, if Inductor makes several kernels of it
    kind = _COMPILED if over is None else f"{_COMPILED}_"
    return _registered(kind, text, make, workspace_bytes=lambda _: inner_bytes)


def _registered(
    kind: str, text: str, make: Callable[[], Callable[[list[Any]], Any]], **costing: Any
) -> Callable[..., Any]:
    name = f"{kind}.{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    if PREFIX + name in FUNCTIONS:
        return FUNCTIONS[PREFIX + name].run
    made: Callable[[list[Any]], Any] | None = None

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        nonlocal made
        if made is None:
            with patched():  # compiling changes torch's state
                made = make()
            TEXTS.pop(PREFIX + name, None)
        results: tuple[Tensor, ...] = made(list(tensors))
        return results

    run.__name__ = run.__qualname__ = name.replace(".", "_")  # by which generated code calls it
    if kind.startswith(_COMPILED):
        TEXTS[PREFIX + name] = text
    return function(name, **costing)(run)


def compile_text(text: str) -> Callable[[list[Any]], Any]:
    """Compile a region from its description.

    It is traced on tensors of its own, so that nothing of the capture that it was found in stays alive.
    """
    from monetlite.fx.torch_internals.torch_inductor import compile_alone
    from monetlite.operators import resolve

    region = json.loads(text)
    over: Over | None = region["over"]
    inputs = [
        (tuple(shape), tuple(stride), getattr(torch, dtype), torch.device(device))
        for shape, stride, dtype, device in region["inputs"]
    ]

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        values: list[Any] = list(tensors)

        def value(argument: Any) -> Any:
            if isinstance(argument, list):
                return [value(item) for item in argument]
            if not isinstance(argument, dict):
                return argument
            ((kind, content),) = argument.items()
            if kind == "node":
                return values[content]
            return decode_argument(TorchConstant(kind=kind, name=content), lambda _: None)

        for target, args, kwargs in region["calls"]:
            arguments = [value(item) for item in args]
            if target == _ITEM:
                values.append(operator.getitem(*arguments))
            else:
                call: Any = resolve(target)
                values.append(call(*arguments, **{name: value(item) for name, item in kwargs.items()}))
        results = [values[number] for number in region["results"]]
        if over is not None:
            made = results.pop(over[0])
            tensors[over[1]].view(made.shape).copy_(made)
        return tuple(results)

    strides = [tuple(stride) for stride in region["strides"]]
    if over is None:
        return compile_alone(run, inputs, strides)
    result, argument = over
    shape = region["shapes"][result]
    changing = compile_alone(run, inputs, strides[:result] + strides[result + 1 :])

    def run_over(args: list[Any]) -> tuple[Tensor, ...]:
        overwritten = args[argument].view(shape)
        made = list(changing(args))
        return (*made[:result], overwritten, *made[result:])

    return run_over


def described(program: fx.GraphModule, over: Over | None = None) -> str:
    """All that a region computes, as text: operators, constants, and layouts of operands and results."""
    numbers: dict[fx.Node, int] = {}

    def plain(argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return {"node": numbers[argument]}
        if isinstance(argument, (list, tuple)):
            return [plain(item) for item in argument]
        encoded = encode_arguments(argument, lambda _: None)
        return {encoded.kind: encoded.name} if isinstance(encoded, TorchConstant) else encoded

    calls = []
    for node in program.graph.nodes:
        if node.op == "call_function":
            target = _ITEM if storages.is_item(node) else target_of(node)
            kwargs = {name: plain(item) for name, item in node.kwargs.items()}
            calls.append([target, [plain(item) for item in node.args], kwargs])
        numbers[node] = len(numbers)
    results = program.graph.output_node().all_input_nodes
    return json.dumps(
        {
            "inputs": [_layout(node) for node in program.graph.find_nodes(op="placeholder")],
            "calls": calls,
            "results": [numbers[node] for node in results],
            "shapes": [_layout(node)[0] for node in results],
            "strides": [_layout(node)[1] for node in results],
            "over": over,
        }
    )


def _layout(node: fx.Node) -> tuple[list[int], list[int], str, str]:
    value = node.meta["val"]
    spec = spec_of(value)
    return list(map(int, spec.shape)), list(map(int, spec.stride)), spec.dtype, str(value.device)


def _copied(program: fx.GraphModule) -> fx.GraphModule:
    """A copy whose captured tensors keep nothing of the capture alive: their shapes and strides are enough."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(program.graph, {}))
    with without_modes():
        for node in graph.nodes:
            node.meta = {"val": pytree.tree_map_only(Tensor, _without_capture, node.meta.get("val"))}
    return graph_module(torch.nn.Module(), graph)


def _without_capture(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def moved_bytes(program: fx.GraphModule) -> int:
    """Bytes that a region reads and writes."""
    ends = (*program.graph.find_nodes(op="placeholder"), *program.graph.output_node().all_input_nodes)
    return sum(map(_bytes, ends))


def over_first(program: fx.GraphModule, args: Sequence[fx.Node]) -> Over | None:
    """The largest result of a region that can take an argument's memory, and that argument; None if none can.

    Args:
        program: of the region.
        args: nodes that it is called with; inputs of the model can't be overwritten.
    """
    found: list[tuple[int, Over]] = []
    for result, made in enumerate(program.graph.output_node().all_input_nodes):
        for position, (node, given) in enumerate(
            zip(args, program.graph.find_nodes(op="placeholder"), strict=True)
        ):
            if node.op == "call_function" and _is_like(given.meta["val"], made.meta["val"]):
                found.append((_bytes(made), (result, position)))
    return max(found, key=lambda item: item[0])[1] if found else None


def _is_like(given: Tensor, made: Tensor) -> bool:
    """True for an argument in whose memory a result can be, as a view of it."""
    alike = (given.dtype, given.numel()) == (made.dtype, made.numel())
    return alike and (
        (given.shape, given.stride()) == (made.shape, made.stride())
        or (given.is_contiguous() and made.is_contiguous())
    )


def _bytes(node: fx.Node | None) -> int:
    value = None if node is None else node.meta.get("val")
    return int(value.numel() * value.element_size()) if isinstance(value, torch.Tensor) else 0


def _inner_bytes(program: fx.GraphModule) -> int:
    """Most memory of what a region computes and doesn't return, when its operators run one by one."""
    nodes = list(program.graph.nodes)
    returned = set(program.graph.output_node().all_input_nodes)
    last: dict[fx.Node, int] = {}
    for at, node in enumerate(nodes):
        last.update((storages.base(item), at) for item in node.all_input_nodes)
    held = peak = 0
    made: dict[int, int] = {}
    for at, node in enumerate(nodes):
        for item in storages.results(node) if storages.is_kernel(node) else ():
            if item is not None and item not in returned:
                held += _bytes(item)
                made[last.get(item, at)] = made.get(last.get(item, at), 0) + _bytes(item)
        peak = max(peak, held)
        held -= made.pop(at, 0)
    return peak
