"""Messages of captured code take no graph apart, and prints and warnings of a model are seen."""

import logging
import random
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from noted_graphs import Graphs
from torch import nn
from torch.utils.checkpoint import checkpoint

from monetlite.fx.torch_internals import torch_messages
from monetlite.fx.torch_internals.torch_dynamo import break_reason, dynamo_settings
from monetlite.fx.torch_internals.torch_messages import LoggerMethods, leave_messages_out, messages_left_out

log = logging.getLogger(__name__)
config = torch_messages._config
CALL = torch_messages.DebuggingVariable.call_function


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As before `leave_messages_out`, which an earlier test of this process may have called."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch_messages._utils, "_get_dynamo_config_for_logging", torch_messages._log_settings)
    monkeypatch.setattr(torch_messages.DebuggingVariable, "call_function", CALL)
    monkeypatch.setattr(torch_messages, "_warned", torch_messages.defaultdict(dict))
    monkeypatch.setattr(torch_messages, "_told", set())
    with dynamo_settings(ignore_logging_functions=set(), reorderable_logging_functions=set()):
        yield


def talks(x: torch.Tensor) -> torch.Tensor:
    x = x + 1
    log.warning("a message")
    warnings.warn("a warning", stacklevel=1)
    print("a line", 3)  # noqa: T201  # as a model may
    return x * 2


def test_messages_take_a_graph_apart() -> None:
    """Without this, `messages_left_out` would not be needed."""
    graphs = Graphs()
    torch.compile(talks, backend=graphs)(torch.ones(2))
    assert len(graphs.all) > 1
    assert break_reason(graphs.all[0]).user_stack[-1].name == "talks"
    assert str(break_reason(graphs.all[0]).reason)


def test_advice_to_write_to_pytorch_is_left_out(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """Torch 2.13 gives it for a function that draws; 2.14 doesn't."""

    def draws(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if random.random() < 2 else x

    monkeypatch.setattr(torch_messages._utils, "warn_once_cache", set())
    with messages_left_out():
        assert torch.compile(draws, backend=Graphs())(torch.ones(2)).tolist() == [2, 2]
    assert not any("please file an issue" in str(item.message) for item in recwarn)


def test_messages_are_left_out_for_a_time(capfd: pytest.CaptureFixture[str]) -> None:
    before = config.get_config_copy()
    graphs = Graphs()
    with messages_left_out():
        compiled = torch.compile(talks, backend=graphs, fullgraph=True)
        with pytest.warns(UserWarning, match="a warning"):
            result = compiled(torch.ones(2))
    assert result.tolist() == [4, 4]
    out, err = capfd.readouterr()
    assert "a line" in out
    assert "Traceback" not in err
    (graph,) = graphs.all
    assert break_reason(graph) is None
    assert config.get_config_copy() == before
    assert torch_messages._utils._get_dynamo_config_for_logging is torch_messages._log_settings


def test_loggers_methods_that_come_later_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def warning_once(self: Any, *_: Any) -> None: ...

    methods = LoggerMethods([print])
    monkeypatch.setattr(logging.Logger, "warning_once", warning_once, raising=False)
    assert warning_once in methods
    assert warning_once in list(methods)
    assert print in methods
    assert logging.Logger.info in methods
    assert test_loggers_methods_that_come_later_are_known not in methods

    def run(x: torch.Tensor) -> torch.Tensor:
        log.warning_once("a message")
        return x + 1

    with messages_left_out():
        torch.compile(run, backend="eager", fullgraph=True)(torch.ones(2))


def test_messages_can_be_left_out_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_messages._utils, "_get_dynamo_config_for_logging", torch_messages._log_settings)
    before = set(config.ignore_logging_functions)
    with dynamo_settings(
        ignore_logging_functions=config.ignore_logging_functions,
        reorderable_logging_functions=config.reorderable_logging_functions,
    ):
        leave_messages_out()
        leave_messages_out()
        with pytest.warns(UserWarning, match="a warning"):
            torch.compile(talks, backend="eager", fullgraph=True)(torch.ones(2))
    assert set(config.ignore_logging_functions) == before


class Talks(nn.Module):
    """A submodule that says something, in ways in which models do."""

    def forward(self, x: torch.Tensor, say: Any) -> torch.Tensor:
        say(x)
        return x * 2


def in_submodule(say: Any, x: torch.Tensor) -> None:
    graphs, inner = Graphs(), Talks()

    def outer(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = inner(x, say) + 1
        return result

    with messages_left_out():
        compiled = torch.compile(outer, backend=graphs, fullgraph=True)
        for _ in range(2):
            assert torch.equal(compiled(x), x * 2 + 1)
    assert len(graphs.all) == 1


def test_a_submodule_s_prints_come_in_each_run(capfd: pytest.CaptureFixture[str]) -> None:
    in_submodule(lambda x: print("rows:", len(x), f"of {x.shape[1]}"), torch.ones(2, 3))  # noqa: T201  # as models do
    assert capfd.readouterr().out == "rows: 2 of 3\n" * 2


def test_a_submodule_s_warning_comes_once_with_its_class_and_line() -> None:
    with pytest.warns(FutureWarning, match="is deprecated") as caught:
        in_submodule(lambda _: warnings.warn("it " + "is deprecated", FutureWarning, stacklevel=2), torch.ones(2))
    (warning,) = caught
    assert warning.filename == __file__
    with pytest.warns(DeprecationWarning, match="old"):
        in_submodule(lambda _: warnings.warn("old", category=DeprecationWarning, stacklevel=2), torch.ones(2))


def test_a_print_of_a_tensor_is_left_out_and_told_of_once(capfd: pytest.CaptureFixture[str]) -> None:
    def say(x: torch.Tensor) -> None:
        print(f"mean {x.mean()}", x)  # noqa: T201

    with pytest.warns(UserWarning, match=r"test_torch_messages\.py:\d+: a print of tensors"):
        in_submodule(say, torch.ones(2))
    torch._dynamo.reset()
    in_submodule(say, torch.ones(3))  # where another warning would be an error
    assert capfd.readouterr().out == ""


def test_prints_within_checkpoints_come(capfd: pytest.CaptureFixture[str]) -> None:
    def say(x: torch.Tensor) -> torch.Tensor:
        print("within")  # noqa: T201
        return x.sin()

    in_submodule(lambda x: checkpoint(say, x, use_reentrant=False), torch.ones(2, requires_grad=True))
    assert capfd.readouterr().out == "within\n" * 2
