"""Whole numbers that vary, taken out of a captured graph: what is computed of them is computed beside the step.

Code such as `self.steps += 1` in a forward pass, or `min(1.0, step / 1000) * loss`, reads a number that changes.
Taken as a constant, each of its values would be captured by itself. So it is a symbol of the graph. Numbers that
are computed of it stay Python's. Those that tensors take are handed in as tensors without dimensions, by which
torch computes the same bits as by numbers (`_Rest`).
"""

import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from monetlite.core.errors import TraceError
from monetlite.fx.storages import ancestors
from monetlite.fx.torch_internals.torch_graph_modules import graph_module
from monetlite.fx.torch_internals.torch_symbols import SYMBOLIC, captured_number, expression, tensor_of_number


def _divided_by(tensor: torch.Tensor, number: Any) -> torch.Tensor:
    """A number divided by a tensor, as torch computes it."""
    return torch.mul(tensor.reciprocal(), number)


_SWAPPED: dict[Any, Callable[..., Any]] = {
    **{item: item for item in (operator.add, operator.mul, operator.eq, operator.ne)},
    operator.lt: operator.gt,
    operator.gt: operator.lt,
    operator.le: operator.ge,
    operator.ge: operator.le,
    operator.sub: torch.rsub,
    operator.truediv: _divided_by,
}
"""Functions of a number and a tensor, and those of the tensor and the number by which torch computes them."""
_IN_PLACE = (operator.iadd, operator.isub, operator.imul, operator.itruediv, "add_", "sub_", "mul_", "div_")
_TWO = (*_SWAPPED, *_IN_PLACE, torch.add, torch.sub, torch.mul, torch.div, "add", "sub", "mul", "div")
"""Functions and methods of a tensor and a number, without options, whose bits don't depend on which kind it is."""
_FILLED = {torch.full: 1, torch.full_like: 1, "new_full": 2, tensor_of_number: 0}
"""Functions and methods that make a tensor of one number, by the number's place among the arguments."""


class WithoutNumbers:
    """A captured graph whose whole numbers that vary are taken out.

    Args:
        graph: as TorchDynamo captures it. It is not changed.
        inputs: that it is captured with.
        as_tensors: whether tensors may take numbers, which are tensors then.

    Attributes:
        graph, inputs: what is left to compile.

    Raises:
        TraceError: a tensor depends on a number in a way in which it can't be a tensor.
    """

    def __init__(self, graph: fx.GraphModule, inputs: Sequence[Any], *, as_tensors: bool) -> None:
        self.graph, self.inputs = graph, list(inputs)
        given = graph.graph.find_nodes(op="placeholder")
        numbers = _computed_from(graph, _varying(given))
        self._has_none = not numbers
        if self._has_none:
            return
        results: Any = graph.graph.output_node().args[0]
        self._counted = [at for at, item in enumerate(results) if item in numbers]
        self._others = [at for at, item in enumerate(results) if item not in numbers]
        rest = _Rest(graph, numbers, [results[at] for at in self._others])
        if rest.taken and not as_tensors:
            raise TraceError(f"a tensor depends on {next(iter(rest.taken)).name}, a number that varies")
        wanted = [*(results[at] for at in self._counted), *rest.taken]
        needed = ancestors(wanted)
        self._count = _part(graph, filter(needed.__contains__, graph.graph.nodes), wanted)
        self._of_count = [node in needed for node in given]
        self._of_rest = [node not in numbers for node in given]
        self.graph = rest.module
        self.inputs = [*itertools.compress(inputs, self._of_rest), *map(_captured_tensor, rest.taken)]

    def joined(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """The whole graph as a function, of one that runs what is left."""
        if self._has_none:
            return run

        def both(*arguments: Any) -> list[Any]:
            numbers = self._count(*itertools.compress(arguments, self._of_count))
            tensors = map(_tensor, numbers[len(self._counted) :])
            made = run(*itertools.compress(arguments, self._of_rest), *tensors)
            found = dict(zip(self._counted, numbers, strict=False)) | dict(zip(self._others, made, strict=True))
            return [found[at] for at in range(len(found))]

        return both


def _varying(given: Sequence[fx.Node]) -> list[fx.Node]:
    """The inputs that are numbers, and the size of no tensor among the inputs."""
    values = [node.meta.get("example_value") for node in given]
    sizes = {
        symbol
        for value in values
        if isinstance(value, torch.Tensor)
        for size in (*value.shape, *value.stride())
        if isinstance(size, torch.SymInt)
        for symbol in expression(size).free_symbols
    }
    return [
        node
        for node, value in zip(given, values, strict=True)
        if isinstance(value, torch.SymInt) and not expression(value).free_symbols & sizes
    ]


def _computed_from(graph: fx.GraphModule, varying: Sequence[fx.Node]) -> set[fx.Node]:
    """Numbers that vary, and those that are computed of them and of nothing else that is no number."""
    found = set(varying)
    for node in graph.graph.nodes:
        used = (node, *node.all_input_nodes)
        if not found.isdisjoint(used) and all(
            isinstance(item.meta.get("example_value"), SYMBOLIC) for item in used
        ):
            found.add(node)
    return found


def _tensor(number: int | float) -> torch.Tensor:
    dtype = torch.float64 if isinstance(number, float) else torch.int64
    return torch.tensor(number, dtype=dtype, device="cpu")


def _captured_tensor(node: fx.Node) -> torch.Tensor:
    """A number of the step that is captured, as a tensor."""
    number = captured_number(node.meta["example_value"])
    assert number is not None
    return _tensor(number)


def _part(graph: fx.GraphModule, nodes: Iterable[fx.Node], results: Sequence[fx.Node]) -> fx.GraphModule:
    made, copied = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in nodes:
        copied[node] = made.node_copy(node, copied.__getitem__)
    made.output(tuple(copied[item] for item in results))
    return graph_module(graph, made)


class _Rest:
    """The rest of a graph without its numbers: those that tensors take come as tensors after the inputs.

    torch computes with a tensor without dimensions, on the CPU, as with a number, as long as the results have the
    same dtype: by the same kernels, in the same precision. Beside a tensor that has no dimensions itself, its dtype
    would count for more than a number's. So that gets a dimension for the time.

    Attributes:
        module: the graph.
        taken: the numbers that tensors take, in order, and the inputs that they are.

    Raises:
        TraceError: a number is taken in another way.
    """

    def __init__(self, graph: fx.GraphModule, numbers: set[fx.Node], results: Sequence[Any]) -> None:
        self._numbers, self._made = numbers, fx.Graph()
        self._copied: dict[fx.Node, fx.Node] = {}
        given = graph.graph.find_nodes(op="placeholder")
        for node in given:
            if node not in numbers:
                self._copied[node] = self._made.node_copy(node)
        takers = [
            node for node in graph.graph.nodes if node not in numbers and node.op not in ("placeholder", "output")
        ]
        taken = dict.fromkeys(item for node in takers for item in node.all_input_nodes if item in numbers)
        self.taken = {item: self._made.placeholder(f"{item.name}_as_tensor") for item in taken}
        for node in takers:
            takes = not numbers.isdisjoint(node.all_input_nodes)
            self._copied[node] = (
                self._with_tensor(node) if takes else self._made.node_copy(node, self._copied.__getitem__)
            )
        self._made.output(tuple(self._copied[item] if isinstance(item, fx.Node) else item for item in results))
        self.module = graph_module(graph, self._made)

    def _with_tensor(self, node: fx.Node) -> fx.Node:
        """A call that takes a number, as one that takes a tensor."""
        made = None
        if node.target in _FILLED:
            made = self._filled(node, _FILLED[node.target])
        elif node.target in _TWO and len(node.args) == 2 and not node.kwargs:
            made = self._of_two(node)
        if made is None:
            raise TraceError(f"{node.name} depends on a number that varies")
        return made

    def _of_two(self, node: fx.Node) -> fx.Node | None:
        """A function of a tensor and a number."""
        function: Any = node.target
        operands: tuple[Any, ...] = node.args
        tensor, number = operands
        if self._is_number(tensor):
            tensor, number, function = number, tensor, _SWAPPED.get(function)
        if function is None or not isinstance(tensor, fx.Node) or not self._is_number(number):
            return None
        example, of_number = tensor.meta["example_value"], _captured_tensor(number)
        with_dimension = torch.empty(1, dtype=example.dtype, device="meta")
        by_number = torch.result_type(with_dimension, of_number.item())
        alike = by_number == torch.result_type(with_dimension, of_number)
        alone = example.dim() == 0
        if not alike or (alone and function in _IN_PLACE):
            return None
        own = self._copied[tensor]
        if alone:
            own = self._made.call_method("reshape", (own, (1,)))
        kind = "call_method" if isinstance(function, str) else "call_function"
        made = self._made.create_node(kind, function, (own, self.taken[number]))
        return self._made.call_method("reshape", (made, ())) if alone else made

    def _filled(self, node: fx.Node, place: int) -> fx.Node | None:
        """A tensor of one number."""
        number: Any = node.args[place] if len(node.args) > place else None
        if not self._is_number(number) or self._numbers.intersection(node.all_input_nodes) != {number}:
            return None
        args, kwargs = fx.map_arg(
            (node.args, node.kwargs), lambda item: 0 if item is number else self._copied[item]
        )
        options = {**kwargs, "dtype": node.meta["example_value"].dtype}
        zeros = self._made.create_node(node.op, node.target, args, options)
        return self._made.call_function(torch.fill, (zeros, self.taken[number]))

    def _is_number(self, item: Any) -> bool:
        """True for a number that varies, other than a truth value, or one that depends on the data."""
        if not isinstance(item, fx.Node) or item not in self._numbers:
            return False
        number = item.meta["example_value"]
        return not isinstance(number, torch.SymBool) and captured_number(number) is not None
