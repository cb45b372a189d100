"""Programs as functions: what is called in an operator's place, and which views are left out."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from thoroughness import some
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from monetlite.fx.direct_calls import as_function
from monetlite.fx.view_strides import strides_of_view

aten = torch.ops.aten


def program(trace: Callable[[fx.Graph, list[fx.Node]], Any], *inputs: torch.Tensor) -> fx.GraphModule:
    """A program as a capture makes it: of operators, each node saying in `meta` what it is."""
    graph = fx.Graph()
    placeholders = [graph.placeholder(f"input_{number}") for number in range(len(inputs))]
    graph.output(tuple(trace(graph, placeholders)))
    made = fx.GraphModule(nn.Module(), graph)
    _Described(made).run(*inputs)
    return made


class _Described(fx.Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        with torch.no_grad():
            n.meta["val"] = super().run_node(n)
        return n.meta["val"]


class Calls(TorchDispatchMode):
    """The operators that run, with what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.made.append((func, args, dict(kwargs or {})))
        return func(*args, **(kwargs or {}))


def ran(made: fx.GraphModule, *inputs: torch.Tensor) -> tuple[list[str], tuple[Any, ...]]:
    """The names of the operators that a program runs as a function, and its results."""
    function = as_function(made)
    with torch.no_grad(), Calls() as calls:
        results = function(list(inputs))
    return [str(func) for func, _, _ in calls.made], results


def by_python_functions(made: fx.GraphModule) -> list[str]:
    """Names of the methods and functions of PyTorch's that a program calls as a function."""
    as_function(made)
    return [
        str(node.target) if node.op == "call_method" else node.target.function.__name__
        for node in made.graph.nodes
        if node.op in ("call_method", "call_function")
    ]


X = torch.randn(4, 6)


def test_operators_are_called_as_plain_training_calls_them() -> None:
    def trace(graph: fx.Graph, inputs: list[fx.Node]) -> Any:
        product = graph.call_function(aten.mm.default, (inputs[0], inputs[1]))
        turned = graph.call_function(aten.transpose.int, (product, 0, 1))
        return [graph.call_function(aten.relu_.default, (turned,))]

    made = program(trace, X, X.t().contiguous())
    assert by_python_functions(made) == ["mm", "transpose", "relu_"]


@pytest.mark.parametrize(
    ("target", "arguments"),
    [
        (aten.mul.Scalar, (2.0,)),  # torch.mul(x, 2.0) reaches mul.Tensor
        (aten.linear.default, (torch.randn(3, 6),)),  # reaches the operators that it is made of
        (aten.threshold_backward.default, (X, 0)),  # which has no function in Python
        (aten.scalar_tensor.default, ()),
    ],
    ids=["mul", "linear", "threshold_backward", "scalar_tensor"],
)
def test_what_would_reach_another_operator_is_not_called(target: Any, arguments: tuple[Any, ...]) -> None:
    def trace(graph: fx.Graph, inputs: list[fx.Node]) -> Any:
        first: tuple[Any, ...] = (3.0,) if target is aten.scalar_tensor.default else (inputs[0],)
        given = [inputs[1] if isinstance(item, torch.Tensor) else item for item in arguments]
        return [graph.call_function(target, (*first, *given))]

    inputs = (X, *(item for item in arguments if isinstance(item, torch.Tensor)))
    made = program(trace, *inputs)
    (node,) = (item for item in made.graph.nodes if item.op == "call_function")
    _, (result,) = ran(made, *inputs)
    assert node.target.function is target._op
    with torch.no_grad():
        assert torch.equal(result, node.meta["val"])


def test_a_function_takes_no_device_from_the_context() -> None:
    def trace(graph: fx.Graph, inputs: list[fx.Node]) -> Any:
        return [graph.call_function(aten.full.default, ([2], 1.0)), inputs[0]]

    function = as_function(program(trace, X))
    with torch.device("meta"):
        ones, _ = function([X])
    assert ones.device.type == "cpu"


views = st.lists(
    st.sampled_from(
        [
            (aten.view.default, ([24],)),
            (aten.view.default, ([4, 6],)),
            (aten.view.default, ([6, 4],)),
            (aten.view.default, ([4, -1],)),
            (aten.view.dtype, (torch.int32,)),
            (aten.t.default, ()),
            (aten.expand.default, ([4, 6],)),
            (aten.expand.default, ([2, 4, 6],)),
            (aten.slice.Tensor, (0, 0, 9223372036854775807)),
            (aten.slice.Tensor, (0, 1, 3)),
            (aten.detach.default, ()),
            (aten.alias.default, ()),
            (aten.unsqueeze.default, (0,)),
            (aten.squeeze.dim, (0,)),
            (aten._unsafe_view.default, ([4, 6],)),
            (aten.view.default, ([4, 1, 6],)),
            (aten.view.default, ([1, 4, 6],)),
            (aten.view.default, ([1, 24, 1],)),
            (aten.transpose.int, (0, 1)),
        ]
    ),
    max_size=6,
)


ROWS_FIRST = [(aten.view.default, ([4, 1, 6],)), (aten.transpose.int, (0, 1)), (aten.view.default, ([1, 4, 6],))]
"""The last one leaves all but a stride of one as it is, as where attention pools."""


@settings(deadline=None, max_examples=some(150))
@example(chain=ROWS_FIRST, transposed=False, returned=False, changed=False)
@given(chain=views, transposed=st.booleans(), returned=st.booleans(), changed=st.booleans())
def test_views_left_out_change_nothing(chain: list[Any], transposed: bool, returned: bool, changed: bool) -> None:
    source = torch.randn(6, 4).t() if transposed else torch.randn(4, 6)

    def trace(graph: fx.Graph, inputs: list[fx.Node]) -> Any:
        node, value = graph.call_function(aten.relu.default, (inputs[0],)), source.relu()
        made = [node]
        for target, arguments in chain:
            try:
                value = target(value, *arguments)
            except (RuntimeError, IndexError):
                continue
            node = graph.call_function(target, (node, *arguments))
            made.append(node)
        if changed and value.is_floating_point() and 0 not in value.stride():
            graph.call_function(aten.mul_.Tensor, (node, 3.0))
        return [graph.call_function(aten.mul.Tensor, (node, 2)), *(made if returned else [])]

    made = program(trace, source)
    with Calls() as plain:
        expected = fx.Interpreter(fx.GraphModule(nn.Module(), made.graph)).run(source)
    function = as_function(made)
    with Calls() as calls:
        results = function([source])
    kernels = aten.relu.default, aten.mul_.Tensor, aten.mul.Tensor
    read = [[item[0].stride() for func, item, _ in of.made if func in kernels] for of in (plain, calls)]
    assert read[0] == read[1], "a kernel reads a tensor in other strides"
    assert len(results) == len(expected)
    assert len({id(item) for item in results}) == len(results), "a result is returned twice"
    for one, other in zip(results, expected, strict=True):
        assert one.dtype == other.dtype
        assert one.stride() == other.stride()
        assert torch.equal(one, other)


def test_views_that_change_nothing_are_left_out() -> None:
    def trace(graph: fx.Graph, inputs: list[fx.Node]) -> Any:
        flat = graph.call_function(aten.view.default, (inputs[0], [24]))
        back = graph.call_function(aten.view.default, (flat, [4, 6]))
        turned = graph.call_function(aten.t.default, (graph.call_function(aten.t.default, (back,)),))
        same = graph.call_function(aten.expand.default, (turned, [4, 6]))
        return [graph.call_function(aten.relu.default, (graph.call_function(aten.detach.default, (same,)),))]

    names, (result,) = ran(program(trace, X), X)
    assert names == ["aten.relu.default"]
    assert torch.equal(result, X.relu())


@settings(deadline=None, max_examples=some(150))
@given(data=st.data())
def test_strides_of_views_are_those_of_kernels(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=4))
    source = torch.empty(shape).permute(data.draw(st.permutations(range(len(shape)))))
    flat = source.is_contiguous() and data.draw(st.booleans())
    viewed = [source.numel()] if flat else [size for size in source.shape if size > 1]
    for at in data.draw(st.lists(st.integers(0, len(viewed)), max_size=2)):
        viewed.insert(at, 1)
    view = source.view(viewed)
    without_ones = [stride if size > 1 else 0 for size, stride in zip(viewed, view.stride(), strict=True)]
    assert strides_of_view(viewed, without_ones, source) == list(view.stride())


def test_arguments_die_at_their_last_use() -> None:
    def trace(graph: fx.Graph, inputs: list[fx.Node]) -> Any:
        first = graph.call_function(aten.relu.default, (inputs[0],))
        return [graph.call_function(aten.add.Tensor, (first, first))]

    made = program(trace, X)
    function = as_function(made)
    storages: list[bool] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is aten.add.Tensor:
                storages.append(given() is None)
            return func(*args, **(kwargs or {}))

    arguments = [torch.randn(4, 6)]
    given = weakref.ref(arguments[0])
    with torch.no_grad(), Watch():
        function(arguments)
    assert storages == [True]
    assert not arguments
