"""TorchDynamo's code around a branch is as monetlite relies on."""

import pytest
import torch

from monetlite.fx.torch_internals.torch_branches import branches_captured


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def too_large(x: torch.Tensor) -> torch.Tensor:
    if x.max() >= 3:
        raise ValueError(f"Values must be below 3: {x.max()}")
    return x * 2


def not_finite(x: torch.Tensor) -> torch.Tensor:
    if not torch.isfinite(x).all():
        problem = "infinite"
        raise ValueError(problem)
    return x * 2


def else_raises(x: torch.Tensor) -> torch.Tensor:
    if (x < 3).all():
        y = x * 2
    else:
        raise ValueError("too large")
    return y


def inlined(x: torch.Tensor) -> torch.Tensor:
    return too_large(x) + 1


def caught(x: torch.Tensor) -> torch.Tensor:
    try:
        return too_large(x)
    except ValueError:
        return x


def chooses(x: torch.Tensor) -> torch.Tensor:
    if x.max() >= 3:
        return x
    return x * 2


def raises_sometimes(x: torch.Tensor) -> torch.Tensor:
    if x.max() >= 3:
        if x.shape[0] > 4:
            raise ValueError("too many")
        x = x - 1
    return x * 2


def captured(function):
    return torch.compile(function, backend="eager", fullgraph=True)


RAISING = [too_large, not_finite, else_raises, inlined]


@pytest.mark.parametrize("function", RAISING, ids=lambda function: function.__name__)
def test_branches_that_only_raise_are_assertions(function):
    x = torch.tensor([1.0, 2.0])
    with branches_captured():
        compiled = captured(function)
        assert torch.equal(compiled(x), function(x))
        with pytest.raises(RuntimeError, match=r"test_torch_branches\.py:\d+: \w+ raises an exception"):
            compiled(x * torch.inf)


@pytest.mark.parametrize("function", RAISING, ids=lambda function: function.__name__)
def test_without_it_they_are_refused(function):
    with pytest.raises(torch._dynamo.exc.Unsupported):
        captured(function)(torch.tensor([1.0, 2.0]))


@pytest.mark.parametrize("function", [caught, chooses, raises_sometimes], ids=lambda function: function.__name__)
def test_branches_that_do_anything_else_are_not(function):
    with branches_captured(), pytest.raises(torch._dynamo.exc.Unsupported):
        captured(function)(torch.tensor([1.0, 2.0]))


def never_left_out(x: torch.Tensor) -> torch.Tensor:
    if torch.rand([]) < 0.0:
        return x
    return x * torch.rand(2)


def always_kept(x: torch.Tensor) -> torch.Tensor:
    keep = torch.rand(1, dtype=torch.bfloat16) <= 1
    return x * torch.rand(2) if keep else x


def may_be_left_out(x: torch.Tensor) -> torch.Tensor:
    return x if torch.rand([]) < 0.1 else x * 2


def scaled_draw(x: torch.Tensor) -> torch.Tensor:
    return x if torch.rand([]).sub_(0.5) < 0 else x * 2


def other_draw(x: torch.Tensor) -> torch.Tensor:
    return x if torch.randn([]) < 0 else x * 2


@pytest.mark.parametrize("function", [never_left_out, always_kept], ids=lambda function: function.__name__)
def test_branches_on_draws_whose_side_is_known(function):
    x = torch.tensor([1.0, 2.0])
    with branches_captured():
        compiled = captured(function)
        for seed in range(3):
            torch.manual_seed(seed)
            expected, state = function(x), torch.get_rng_state()
            torch.manual_seed(seed)
            assert torch.equal(compiled(x), expected)
            assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "function", [may_be_left_out, scaled_draw, other_draw], ids=lambda function: function.__name__
)
def test_branches_on_other_draws_are_not_known(function):
    with branches_captured(), pytest.raises(torch._dynamo.exc.Unsupported):
        captured(function)(torch.tensor([1.0, 2.0]))


def test_a_loss_of_torch_that_looks_at_variances():
    def loss(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gaussian_nll_loss(x, x + 1, x)

    x = torch.tensor([1.0, 2.0])
    with pytest.raises(torch._dynamo.exc.UserError):
        captured(loss)(x)
    torch._dynamo.reset()
    with branches_captured():
        compiled = captured(loss)
        assert torch.equal(compiled(x), loss(x))
        with pytest.raises(RuntimeError, match="gaussian_nll_loss raises an exception"):
            compiled(-x)


def test_torch_is_as_it_was():
    translators = [torch._dynamo.symbolic_convert.InstructionTranslator.dispatch_table]
    with branches_captured():
        assert torch._dynamo.symbolic_convert.InstructionTranslator.dispatch_table is not translators[0]
    assert torch._dynamo.symbolic_convert.InstructionTranslator.dispatch_table is translators[0]
