"""Calls of compiled models are surrounded, and tell their model and arguments."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import fx, nn

from monetlite.fx.torch_internals import torch_compiled_calls as calls
from monetlite.fx.torch_internals.torch_dynamo import taken_apart


class Seen:
    """A backend that notes the calls that its graphs are of."""

    def __init__(self) -> None:
        self.graphs: list[calls.CompiledCall] = []
        self.around: list[calls.CompiledCall] = []

    def __call__(self, graph: fx.GraphModule, _: Any, **given: Any) -> Any:
        call = calls.current_call()
        assert call is not None
        self.graphs.append(call)
        assert call.given == given
        return graph

    @contextlib.contextmanager
    def surround(self) -> Iterator[None]:
        call = calls.current_call()
        assert call is not None
        self.around.append(call)
        yield


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    torch._dynamo.reset()
    before = vars(torch._TorchCompileWrapper).get("compiler_fn", property())
    monkeypatch.setattr(torch._TorchCompileWrapper, "compiler_fn", before, raising=False)  # put back in the end
    found = Seen()
    calls.surround_calls(found, found.surround)
    return found


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x))


class Loops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            if x.sum() > 1e9:
                break
        return x


@pytest.mark.parametrize(
    ("build", "in_place"), [(Layer, False), (Layer, True), (lambda: nn.Sequential(Layer(), Layer()), False)]
)
def test_a_whole_model_starts_where_its_call_does(build: Any, in_place: bool, seen: Seen) -> None:
    model, x = build(), torch.randn(2, 4)
    if in_place:
        model.compile(backend=seen)
    compiled = model if in_place else torch.compile(model, backend=seen)
    for _ in range(2):
        compiled(x)
    (call,) = seen.graphs
    assert call.model is model
    assert call.starts_here
    assert call.args == (x,)
    assert len(seen.around) == 2
    call.notes["known"] = True
    assert seen.around[1].notes == {"known": True}
    assert calls.current_call() is None


def test_functions_of_a_model_do_not_start_where_its_call_does(seen: Seen) -> None:
    """TorchDynamo leaves out a function that has a loop with a break; `taken_apart` has it captured."""
    model, x = Loops(), torch.randn(2, 4)
    torch.compile(model, backend=seen)(x)
    assert seen.graphs
    assert not any(call.starts_here for call in seen.graphs)
    torch._dynamo.reset()
    seen.graphs.clear()
    stack = nn.Sequential(Layer(), Layer())
    stack.compile(backend=seen)
    stack(x)
    whole = torch.__version__ >= "2.14"  # before, a torch.nn.Sequential itself was left out, too
    assert any(call.starts_here for call in seen.graphs[-2:]) is whole
    assert {call.model for call in seen.graphs[-2:]} == {stack}
    torch._dynamo.reset()
    seen.graphs.clear()
    with taken_apart():
        assert torch.equal(torch.compile(model, backend=seen)(x), model(x))
    first, *rest = (call.starts_here for call in seen.graphs)
    assert first
    assert rest
    assert not any(rest)


def test_code_that_was_compiled_with_other_arguments_serves_other_calls(seen: Seen) -> None:
    first, second = (torch.compile(Layer(), backend=seen) for _ in range(2))
    first(torch.randn(2, 4))
    second(torch.randn(2, 4))
    assert len(seen.graphs) == 1
    seen.graphs[0].given["own"] = object()
    second(torch.randn(2, 4))
    assert len(seen.graphs) == 2
    first(torch.randn(2, 4))
    assert len(seen.graphs) == 2


def test_others_compilations_are_as_they_were(seen: Seen) -> None:
    own, other = (torch._TorchCompileWrapper(backend, None, None, None) for backend in (seen, "eager"))
    assert hasattr(own, "backend_ctx_ctor")
    assert not hasattr(other, "backend_ctx_ctor")
    torch.compile(Layer(), backend="eager")(torch.zeros(2, 4))
    assert not seen.around
