"""Inductor compiles functions alone, where regions are found again, with checks of their arguments."""

import operator
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._guards import TracingContext, tracing
from torch._inductor import config
from torch._inductor.graph import GraphLowering
from torch.fx.experimental.proxy_tensor import make_fx

from monetlite.fx.torch_internals.torch_dispatch import FakeTensorMode
from monetlite.fx.torch_internals.torch_inductor import cache_folder, compile_alone, compile_program, decompositions


def run(x: torch.Tensor) -> tuple[torch.Tensor]:
    return (torch.sin(x),)


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> list[GraphLowering]:
    """Graphs that Inductor has compiled, in no cache of others."""
    found: list[GraphLowering] = []
    own = GraphLowering.run

    def run_noted(graph: GraphLowering, *args: Any) -> Any:
        found.append(graph)
        return own(graph, *args)

    monkeypatch.setattr(GraphLowering, "run", run_noted)
    return found


def test_operators_are_decomposed_before_anything_is_compiled() -> None:
    """Some of the functions look at modules that the compiler imports."""
    program = (
        "import torch\n"
        "from monetlite.fx.torch_internals.torch_dispatch import FakeTensorMode\n"
        "from monetlite.fx.torch_internals.torch_inductor import decomposed\n"
        "with FakeTensorMode() as mode:\n"
        "    image = torch.empty(1, 1, 4, 4)\n"
        "assert decomposed(lambda x: torch.ops.aten.max_pool2d_with_indices(x, [2, 2]), [image], mode)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_its_folder_is_the_one_that_the_environment_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "own"))
    assert cache_folder() == str(tmp_path / "own")


def test_strides_of_arguments_are_checked(lowered: list[GraphLowering]) -> None:
    """A region would read other elements."""
    with FakeTensorMode():
        fake = torch.empty(4, 6)
    with config.patch(fx_graph_cache=False, size_asserts=False):
        alone = compile_alone(run, [((4, 6), (6, 1), torch.float32, torch.device("cpu"))], [(6, 1)])
        compile_program(make_fx(run, decompositions())(fake), [fake])
    assert alone([torch.randn(4, 6)])[0].shape == (4, 6)
    with pytest.raises(AssertionError, match="stride"):
        alone([torch.randn(6, 4).t()])
    of_alone, of_other = lowered
    assert of_alone.user_visible_output_strides
    assert not of_other.user_visible_output_strides


def test_a_function_is_found_in_the_cache_by_a_cpu_of_its_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    given = [((5, 7), (7, 1), torch.float32, torch.device("cpu"))]
    found = []
    for kind in ("AVX512", "AVX512", "AVX2"):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda kind=kind: kind)
        counters.clear()
        compile_alone(run, given, [(7, 1)])
        found.append((counters["inductor"]["fxgraph_cache_miss"], counters["inductor"]["fxgraph_cache_hit"]))
    assert found == [(1, 0), (0, 1), (1, 0)]


def test_it_is_compiled_while_dynamo_captures_something_else() -> None:
    mode = FakeTensorMode()
    with tracing(TracingContext(mode)), torch.autocast("cpu", torch.bfloat16):
        alone = compile_alone(
            lambda x, y: (x @ y,), [((3, 3), (3, 1), torch.float32, torch.device("cpu"))] * 2, [(3, 1)]
        )
    x = torch.randn(3, 3)
    assert torch.equal(alone([x, x])[0], x @ x)


def test_results_come_in_the_strides_that_are_asked_for() -> None:
    alone = compile_alone(run, [((4, 6), (6, 1), torch.float32, torch.device("cpu"))], [(1, 4)])
    x = torch.randn(4, 6)
    (found,) = alone([x])
    assert found.stride() == (1, 4)
    assert torch.allclose(found, torch.sin(x))


@pytest.mark.parametrize("name", ["size_asserts", "alignment_asserts", "triton.cudagraphs"])
def test_checks_have_settings(name: str) -> None:
    assert operator.attrgetter(name)(config) in (True, False)
