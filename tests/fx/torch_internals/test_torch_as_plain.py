"""Captured code takes the way that plain training takes."""

from typing import Any

import pytest
import torch

from monetlite.fx.torch_internals.torch_as_plain import asked_gradients_left_out, classes_known, said_to_be_plain


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "asks",
    [
        torch.compiler.is_compiling,
        torch.compiler.is_dynamo_compiling,
        torch._dynamo.is_compiling,
        torch._utils.is_compiling,
    ],
)
def test_code_is_told_that_it_is_not_compiled(asks: Any) -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if asks() else x * 3

    for told, times in (("another", 3), (__name__, 2)):
        with said_to_be_plain(but_in=[told]):
            assert torch.compile(run, backend="eager", fullgraph=True)(torch.ones(1)).item() == times
        torch._dynamo.reset()


def by_method(tensor: torch.Tensor) -> None:
    tensor.requires_grad_(True)


def by_attribute(tensor: torch.Tensor) -> None:
    tensor.requires_grad = True


@pytest.mark.parametrize("ask", [by_method, by_attribute])
def test_a_gradient_of_what_is_computed_is_not_asked_for(ask: Any) -> None:
    def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = x.sin()
        ask(hidden)
        return hidden * y

    x, y = torch.ones(2), torch.ones(2, requires_grad=True)
    with asked_gradients_left_out():
        result = torch.compile(run, backend="eager", fullgraph=True)(x, y)
    result.sum().backward()
    assert y.grad is not None
    assert torch.equal(y.grad, x.sin())


@pytest.mark.parametrize("ask", [by_method, by_attribute])
def test_a_gradient_of_an_argument_is_not_left_out(ask: Any) -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        ask(x)
        return x.sin()

    with asked_gradients_left_out(), pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(run, backend="eager", fullgraph=True)(torch.ones(2))


class Kind:
    """A class of a person's own."""


@pytest.mark.parametrize(
    "ask",
    [
        lambda x, _: type(x).__module__.startswith("torch"),
        lambda x, _: type(x).__module__.startswith("torchao."),
        lambda x, _: type(x).__name__.lower() == "parameter",
        lambda x, _: torch.jit.isinstance(x, torch.Tensor),
        lambda x, _: torch.jit.isinstance(x, torch.nn.Module),
        lambda _, kind: torch.jit.isinstance(kind, Kind),
        lambda _, kind: torch.jit.isinstance(kind.__class__, int),
    ],
)
def test_classes_are_known(ask: Any) -> None:
    def run(x: torch.Tensor, kind: Kind) -> torch.Tensor:
        return x * 2 if ask(x, kind) else x * 3

    x, kind = torch.nn.Parameter(torch.ones(1)), Kind()
    with classes_known():
        found = torch.compile(run, backend="eager", fullgraph=True)(x, kind)
    assert torch.equal(found, run(x, kind))


def test_elements_are_not_told_by_classes() -> None:
    def run(x: list[torch.Tensor]) -> torch.Tensor:
        return x[0] * 2 if torch.jit.isinstance(x, list[torch.Tensor]) else x[0] * 3

    with classes_known():
        assert torch.compile(run, backend="eager")([torch.ones(1)]).item() == 2
