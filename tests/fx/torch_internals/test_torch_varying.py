"""Numbers and sizes that vary are symbols in what is captured."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo import config

from monetlite.fx.torch_internals import torch_varying
from monetlite.fx.torch_internals.patching import patched
from monetlite.fx.torch_internals.torch_dynamo import taken_apart
from monetlite.fx.torch_internals.torch_varying import VaryingNumbers, VaryingSizes


class Compiled:
    """A backend that runs graphs as they are, and keeps the shapes of their inputs."""

    def __init__(self) -> None:
        self.all: list[list[Any]] = []

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        self.all.append([list(item.shape) if isinstance(item, torch.Tensor) else item for item in inputs])
        return graph.forward


def reads(x: torch.Tensor) -> torch.Tensor:
    mean = x.mean().item()
    torch._dynamo.graph_break()
    return x * 2 if mean < 1e9 else x


def test_functions_are_compiled_for_any_number() -> None:
    graphs, counts, before = Compiled(), list[int](), config.get_config_copy()
    with taken_apart(), VaryingNumbers().captured():
        compiled = torch.compile(reads, backend=graphs, dynamic=False)
        for number in (1.0, 2.0, 3.0, 4.0, 5.0):
            assert compiled(torch.full((2,), number)).tolist() == [2 * number, 2 * number]
            counts.append(len(graphs.all))
    assert counts[2:] == [counts[1]] * 3, "compiled for each number"
    assert torch_varying.VariableBuilder.wrap_symfloat is torch_varying._wrap_float
    assert config.get_config_copy() == before


def halves(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[0] // 2
    torch._dynamo.graph_break()
    return x[:half] * half


def test_a_size_that_has_varied_is_a_symbol_and_so_is_what_is_computed_of_it() -> None:
    graphs, sizes, counts = Compiled(), VaryingSizes(), list[int]()
    with taken_apart(), sizes.captured():
        compiled = torch.compile(halves, backend=graphs, dynamic=False)
        for length in (9, 12, 7, 20, 31):
            assert torch.equal(compiled(torch.ones(length)), torch.full((length // 2,), length // 2))
            sizes.first_step = False
            counts.append(len(graphs.all))
    assert counts[1:] == [counts[1]] * 4, "captured for each size"
    assert torch_varying._builder._automatic_dynamic is torch_varying._dynamic_sizes


def doubles(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_in_the_first_step_and_beside_the_most_similar_shape_nothing_varies() -> None:
    """Layers of two widths have a function in common; only the batch varies."""
    graphs, sizes = Compiled(), VaryingSizes()
    with patched(sizes.captured()):
        compiled = torch.compile(doubles, backend=graphs, dynamic=False)
        for shape in ((4, 8), (4, 16)):
            compiled(torch.ones(shape))
        assert graphs.all == [[[4, 8]], [[4, 16]]]
        sizes.first_step = False
        for shape in ((5, 16), (5, 8), (6, 16), (7, 8)):
            assert torch.equal(compiled(torch.ones(shape)), torch.full(shape, 2.0))
    assert len(graphs.all) == 4
    for taken in graphs.all[2:]:
        (size,) = (item for item in taken if isinstance(item, torch.SymInt))
        assert size in (5, 7), "the size that varies, and no other"


def test_a_function_that_is_captured_again_has_each_size_by_itself() -> None:
    sizes, shapes = VaryingSizes(), list[Any]()
    sizes.first_step = False

    def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        if any(isinstance(item, torch.SymInt) for item in inputs):
            raise sizes.capture_again()
        shapes.append([list(item.shape) for item in inputs])
        return graph.forward

    with patched(sizes.captured()):
        compiled = torch.compile(doubles, backend=backend, dynamic=False)
        for length in (4, 5, 6, 5):
            assert compiled(torch.ones(length)).tolist() == [2.0] * length
    assert shapes == [[[4]], [[5]], [[6]]]
