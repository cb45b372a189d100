"""TorchDynamo's settings, errors and logs are as monetlite relies on."""

import contextlib
import logging
import operator
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from noted_graphs import Graphs
from torch import fx, nn
from torch.ao.quantization.quantize import get_default_custom_config_dict

from monetlite.fx.torch_internals import torch_dynamo
from monetlite.fx.torch_internals.torch_dynamo import (
    FailOnRecompileLimitHit,
    TorchDynamoException,
    allow_programs,
    break_reason,
    draws_like_numpy,
    dynamo_settings,
    left_alone,
    reason_text,
    recompile_reason,
    skipped_function,
    while_compiling,
)

log = logging.getLogger(__name__)
config = torch_dynamo._config


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("name", "default"),
    [
        ("use_numpy_random_stream", False),
        ("skip_nnmodule_hook_guards", True),
        ("optimize_ddp", True),
        ("skip_tensor_guards_with_matching_dict_tags", True),
        ("recompile_limit", 8),
        ("accumulated_recompile_limit", 256),
    ],
)
def test_settings_that_captures_change(name: str, default: Any) -> None:
    """A setting with another default may have another meaning."""
    assert getattr(config, name) == default


def test_the_limit_of_programs() -> None:
    class Counter(nn.Module):
        number = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.number

    model = Counter()
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=False)
    with dynamo_settings(recompile_limit=2, specialize_int=True):
        for model.number in range(1, 3):
            compiled(torch.ones(2))
        assert "number == 1" in recompile_reason()
        model.number = 9
        with pytest.raises(FailOnRecompileLimitHit):
            compiled(torch.ones(2))
        with allow_programs(3):
            compiled(torch.ones(2))
        assert config.recompile_limit == 2


def test_no_order_of_threads_raises_the_limit_for_good() -> None:
    before = config.recompile_limit
    entered, leave = threading.Barrier(2), threading.Barrier(2)

    def first() -> None:
        with allow_programs(before + 5):
            entered.wait()
            leave.wait()

    thread = threading.Thread(target=first)
    thread.start()
    entered.wait()
    with allow_programs(before + 5):
        assert config.recompile_limit == before + 5
        leave.wait()
        thread.join()
    assert config.recompile_limit == before


def test_refusals_have_a_class_and_the_persons_frames() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum() > 0 else x

    with pytest.raises(TorchDynamoException) as caught:
        torch.compile(run, backend="eager", fullgraph=True)(torch.ones(2))
    assert [frame.name for frame in caught.value.real_stack][-1] == "run"


def test_what_a_backend_raises_is_kept() -> None:
    class Ours(Exception):
        pass

    def backend(*_: Any) -> Any:
        raise Ours

    with pytest.raises(TorchDynamoException) as caught:
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert isinstance(caught.value.inner_exception, Ours)


def test_a_function_is_left_out_and_those_that_it_calls_are_captured() -> None:
    def inner(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    def outer(x: torch.Tensor) -> torch.Tensor:
        return inner(x).cos()

    captured: list[list[Any]] = []

    def backend(graph: fx.GraphModule, _: Any) -> Any:
        names = [node.target for node in graph.graph.nodes if node.op.startswith("call")]
        if "cos" in names:
            raise torch_dynamo.LeftOut("it")
        captured.append(names)
        return graph

    assert torch.equal(torch.compile(outer, backend=backend)(torch.ones(2)), torch.ones(2).sin().cos())
    assert captured == [["sin"]]


class _Counts(nn.Module):
    """Counts its runs in a part of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Identity()
        self.part.count = 0  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.part.count += 1  # type: ignore[assignment,operator]
        return x + 1


class _Breaks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 1e9 else x + 1


@pytest.mark.parametrize("own", [lambda parts: nn.Sequential(*parts), nn.ModuleList, list])
def test_what_a_loop_with_breaks_sets_is_its_own_modules(own: Callable[[list[nn.Module]], Any]) -> None:
    counts = [_Counts() for _ in range(4)]
    parts = own([_Breaks(), counts[0], _Breaks(), *counts[1:]])

    def run(x: torch.Tensor) -> torch.Tensor:
        for part in parts[1:] if x.sum() > 1e9 else list(parts):
            x = part(x)
        return x

    with torch_dynamo.taken_apart():
        assert torch.equal(torch.compile(run, backend="eager")(torch.zeros(2)), torch.full((2,), 6.0))
    assert [item.part.count for item in counts] == [1, 1, 1, 1]


def test_settings_are_there_whenever_a_function_is_compiled_and_at_no_other_time() -> None:
    present: list[str] = []

    @contextlib.contextmanager
    def settings() -> Iterator[None]:
        present.append("settings")
        yield
        present.pop()

    def keep(graph: fx.GraphModule, _: object) -> Callable[..., Any]:
        compiled.append(list(present))
        return graph.forward

    @left_alone
    def look() -> None:
        ran.append(list(present))

    def function(x: torch.Tensor) -> torch.Tensor:
        x = x.sin()
        look()
        return x.cos()

    compiled: list[list[str]] = []
    ran: list[list[str]] = []
    step = torch.compile(function, backend=keep, dynamic=False)
    for size in (2, 2, 3):
        with while_compiling(settings):
            step(torch.ones(size))
    assert compiled == [["settings"]] * 4, "two pieces, for each of two sizes"
    assert ran == [[]] * 3
    step(torch.ones(4))
    assert compiled[4:] == [[], []]


def test_numpy_draws_are_torchs() -> None:
    import numpy as np

    graphs = Graphs()
    torch.compile(lambda x: x + torch.from_numpy(np.random.rand(2)), backend=graphs)(torch.ones(2))
    nodes = [node for graph in graphs.all for node in graph.graph.nodes]
    assert any(map(draws_like_numpy, nodes))
    torch._dynamo.reset()
    graphs = Graphs()
    torch.compile(lambda x: x + torch.rand(2), backend=graphs)(torch.ones(2))
    assert not any(draws_like_numpy(node) for graph in graphs.all for node in graph.graph.nodes)


def finds(x: torch.Tensor) -> Any:
    return x.sum() if x.sum() > 0 else None


def scales(x: torch.Tensor, by: torch.Tensor | None) -> torch.Tensor:
    return x if by is None else x * by


def looks(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    found = finds(x)
    return scales(x if found is None else x + found, by.to(torch.float64))


def traces(x: torch.Tensor | None) -> bool:
    return torch.compiler.is_compiling()


def asks(x: torch.Tensor) -> torch.Tensor:
    return x if traces(None) else x + int(traces(x))


def test_a_function_says_false_of_none() -> None:
    x = torch.ones(2)
    with torch_dynamo.calls_changed({}, [], asking=[traces]):
        assert torch.equal(torch.compile(asks, backend=Graphs(), fullgraph=True)(x), x + 1)


def ignores(x: torch.Tensor, padding_mask: torch.Tensor | None) -> bool:
    return not traces(x) and (padding_mask is None or bool(padding_mask.all()))


def expands(mask: torch.Tensor) -> torch.Tensor | None:
    return None if not traces(mask) and bool(mask.all()) else mask.double()


def masks(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """As transformers does before 5.0: it asks whether it is traced beside asking for a mask."""
    expanded = expands(mask)
    x = x if expanded is None else x + expanded
    return x if ignores(x, padding_mask=mask) else x * int(traces(x)) * 2


def test_functions_without_a_mask_are_told_that_they_are_not_traced() -> None:
    x, ones = torch.full((2, 3), 4.0), torch.tensor(True).expand(2, 3)
    changes = torch_dynamo.calls_changed({}, [ignores], none_of_ones=[expands], asking=[traces])
    with changes:
        compiled = torch.compile(masks, backend=Graphs(), fullgraph=True)
        assert torch.equal(compiled(x, ones), x)
        assert torch.equal(compiled(x, ones.contiguous()), (x + 1) * 2)


def test_results_are_known_and_repeated_elements_left_out() -> None:
    graphs, x = Graphs(), torch.ones(2, 3)
    by = torch.tensor(2).expand(2, 3)
    with torch_dynamo.calls_changed({finds: None}, [scales]):
        compiled = torch.compile(looks, backend=graphs, fullgraph=True)
        assert torch.equal(compiled(x, by), x)
        assert torch.equal(compiled(x, by.contiguous()), 2 * x.double())
    assert len(graphs.all) == 2, "the strides of an input are not guarded"


def makes(x: torch.Tensor) -> torch.Tensor:
    by = x.new_ones(2, 3).bool()
    return scales(x, by.view(2, 3))


def writes(x: torch.Tensor) -> torch.Tensor:
    by = torch.ones(2, 3)
    by[:, 1:] = 0
    return scales(x, by.to(torch.float64))


def writes_to_a_view(x: torch.Tensor) -> torch.Tensor:
    by = torch.ones(6)
    by.view(2, 3)[:, 1:] *= 0
    return scales(x, by.view(2, 3))


def test_ones_that_are_made_are_left_out_unless_they_are_written_to() -> None:
    x = torch.full((2, 3), 4.0)
    for function, calls in ((makes, 0), (writes, 1), (writes_to_a_view, 1)):
        graphs = Graphs()
        with torch_dynamo.calls_changed({}, [scales]):
            found = torch.compile(function, backend=graphs, fullgraph=True)(x)
        assert torch.equal(found.double(), function(x).double())
        (graph,) = graphs.all
        assert sum(node.target is operator.mul for node in graph.graph.nodes) == calls, function.__name__


def test_a_function_that_is_left_alone_is_named() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        return x * len(get_default_custom_config_dict())

    with pytest.raises(Exception, match="skipped") as refused:
        torch.compile(run, backend="eager", fullgraph=True)(torch.ones(2))
    assert "does not look into get_default_custom_config_dict (" in skipped_function(str(refused.value))


def test_a_branch_on_data_has_one_name_wherever_it_is() -> None:
    def branches(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        return x * 2 if x.sum() > 0 else x

    def calls(x: torch.Tensor) -> torch.Tensor:
        return branches(x * 3)

    for function in (branches, calls):
        graphs = Graphs()
        torch.compile(function, backend=graphs)(torch.ones(2))
        assert reason_text(break_reason(graphs.all[0])) == "Data-dependent branching"
        torch._dynamo.reset()
