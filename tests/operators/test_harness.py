"""The harness finds what is wrong with an implementation, whatever it is."""

from unittest import mock

import pytest
import torch
from contents import plain
from torch import nn

from monetlite.core.graph import Call
from monetlite.operators import implementations
from monetlite.operators.implementations import alternatives_for, function


@pytest.fixture
def offer(monkeypatch):
    """Offer a function as another way to run `tanh`, for as long as the test takes."""
    monkeypatch.setattr(implementations, "_alternatives", {})

    def register(run, **details):
        function("under_test")(run)

        @alternatives_for("aten.tanh.default")
        def other(kernel):
            if details.get("over"):
                details["overwrites"] = kernel.over(kernel.call.args[0])
            rest = {name: item for name, item in details.items() if name != "over"}
            yield kernel.implement("other", run, **rest)

    with mock.patch.dict(implementations.FUNCTIONS), mock.patch.dict(implementations._names):
        yield register


def check(kind="normal"):
    seen = plain((5, 6), kinds=(kind,)).check(nn.Tanh())
    assert ("tanh", "other") in seen.compared


def exactly(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x)


def in_place(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh_(x)


def test_what_keeps_its_promises_passes(offer):
    offer(exactly)
    check()


def test_what_overwrites_as_it_says_passes(offer):
    offer(in_place, over=True)
    check()


def nearly(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x).nextafter(torch.ones(()))


def unsigned_zero(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x) + 0.0


def hides_nan(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x).nan_to_num()


def changes_its_operand(x: torch.Tensor) -> torch.Tensor:
    result = torch.tanh(x)
    x[0, 0] += 1
    return result


def a_view(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.tanh(x), x])[: len(x)]


def transposed(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x).t().contiguous().t()


def other_type(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x).double()


def draws(x: torch.Tensor) -> torch.Tensor:
    torch.rand(1)
    return torch.tanh(x)


@pytest.mark.parametrize(
    ("run", "kind", "complaint"),
    [
        (nearly, "normal", "elements differ"),
        (unsigned_zero, "zeros", "elements differ"),
        (hides_nan, "one nan", "elements differ"),
        (changes_its_operand, "normal", "changes"),
        (in_place, "normal", "changes"),
        (a_view, "normal", "of .5, 6. torch.float32"),
        (transposed, "normal", "not .6, 1."),
        (other_type, "normal", "of .5, 6. torch.float32"),
        (draws, "normal", "generator"),
    ],
)
def test_what_is_not_the_same_is_found(offer, run, kind, complaint):
    offer(run)
    with pytest.raises(AssertionError, match=complaint):
        check(kind)


def test_what_says_that_it_overwrites_and_does_not_is_found(offer):
    offer(exactly, over=True)
    with pytest.raises(AssertionError, match="overwritten: False"):
        check()


def test_what_differs_when_run_again_is_found(offer):
    offer(exactly)
    captured = plain((5, 6)).capture(nn.Tanh())
    operator = captured.operator("tanh")
    call = operator.implementations[0].call
    wrong = Call(target="aten.sin.default", args=call.args, outputs=call.outputs)
    object.__setattr__(operator.implementations[0], "again", wrong)
    with pytest.raises(AssertionError, match="elements differ"):
        captured.check(lambda spec: torch.ones(spec.shape))


def test_what_reads_more_than_it_says_is_found(offer):
    offer(exactly)
    captured = plain((5, 6)).capture(nn.Tanh())
    object.__setattr__(captured.operator("tanh").implementations[1], "reads", ())
    with pytest.raises(AssertionError, match="without saying so"):
        captured.check(lambda spec: torch.ones(spec.shape))
