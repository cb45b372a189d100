"""Inductor compiles functions alone, where regions are found again, without checks of their arguments."""

from pathlib import Path
from typing import Any

import pytest
import torch
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


def test_its_folder_is_the_one_that_the_environment_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "own"))
    assert cache_folder() == str(tmp_path / "own")


def test_arguments_are_checked_unless_it_is_told_not_to(lowered: list[GraphLowering]) -> None:
    x = torch.randn(6, 4).t()
    with FakeTensorMode():
        fake = torch.empty(4, 6)
    with config.patch(fx_graph_cache=False):
        alone = compile_alone(run, [((4, 6), (6, 1), torch.float32, torch.device("cpu"))], [(6, 1)])
        checked = compile_program(make_fx(run, decompositions())(fake), [fake])
    assert alone([x])[0].shape == x.shape
    with pytest.raises(AssertionError, match="stride"):
        checked([x])
    of_alone, of_checked = lowered
    assert of_alone.user_visible_output_strides
    assert not of_checked.user_visible_output_strides


def test_results_come_in_the_strides_that_are_asked_for() -> None:
    alone = compile_alone(run, [((4, 6), (6, 1), torch.float32, torch.device("cpu"))], [(1, 4)])
    x = torch.randn(4, 6)
    (found,) = alone([x])
    assert found.stride() == (1, 4)
    assert torch.allclose(found, torch.sin(x))


@pytest.mark.parametrize("name", ["size_asserts", "alignment_asserts"])
def test_checks_have_settings(name: str) -> None:
    assert getattr(config, name) in (True, False)
