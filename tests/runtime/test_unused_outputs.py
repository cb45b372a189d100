"""What only leads to outputs that the loss does not use has no gradient, as in plain training."""

import pytest
import torch
from small_models import twin
from step_lists import free_profile, recompute_everything, schedule_of
from thoroughness import often
from torch import nn

import monetlite
from monetlite.tracing import graph_builder


class Outputs(nn.Module):
    """A trunk and three heads; `how` makes outputs of what they return."""

    def __init__(self, how=lambda *outputs: outputs) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 6)
        self.heads = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.how = how

    def forward(self, x):
        y = self.trunk(x).tanh()
        return self.how(*(head(y).sin() for head in self.heads))


DELIVERIES = {"at once": 2**20, "in parts": 0}
IN_BOTH_WAYS = pytest.mark.parametrize("deliveries", DELIVERIES, indirect=True)


@pytest.fixture(params=often(DELIVERIES, "in parts"))
def deliveries(request, monkeypatch):
    monkeypatch.setattr(graph_builder, "MIN_DELIVERY_BYTES", DELIVERIES[request.param])


def pair(model, x):
    """A model, and a copy of it that is trained by a schedule."""
    graph = monetlite.trace(model, x)
    schedule = schedule_of(free_profile(graph), recompute_everything(graph))
    return model, monetlite.MONeTWrapper(twin(model), schedule)


def gradients(model):
    return [parameter.grad for parameter in model.parameters()]


def assert_equal(found, expected):
    assert [item is None for item in found] == [item is None for item in expected]
    for mine, theirs in zip(found, expected, strict=True):
        assert theirs is None or torch.equal(mine, theirs)


@IN_BOTH_WAYS
@pytest.mark.usefixtures("deliveries")
def test_heads_trained_in_turn():
    """Zeros in place of None would have AdamW move the other heads by their weight decay and momentum."""
    x = torch.randn(4, 6)
    plain, trained = pair(Outputs(), x)
    for owner in (plain, trained):
        optimizer = torch.optim.AdamW(owner.parameters(), lr=0.1, weight_decay=0.5)
        for number in (0, 1, 2, 0):
            optimizer.zero_grad()
            owner(x)[number].square().sum().backward()
            optimizer.step()
    assert_equal(list(trained.parameters()), list(plain.parameters()))


@pytest.mark.usefixtures("deliveries")
def test_outputs_that_are_views_of_one_tensor():
    """Their gradients reach the program through the tensor that they are views of."""

    def views(first, second, third):
        both = torch.cat([first, second])
        return both[:2], both.t(), third.relu()

    x = torch.randn(4, 6)
    plain, trained = pair(Outputs(views), x)
    for used in ([0], [1], [2], [0, 2]):
        for owner in (plain, trained):
            owner.zero_grad()
            outputs = owner(x)
            sum(outputs[number].square().sum() for number in used).backward()
        assert_equal(gradients(trained), gradients(plain))


@IN_BOTH_WAYS
@pytest.mark.usefixtures("deliveries")
def test_an_infinite_derivative_of_an_output_that_is_not_used():
    """Its zeros would become NaN on their way to what other outputs lead to."""

    class Distances(Outputs):
        def forward(self, x):
            y = self.trunk(x).relu()
            apart = (y[:, None] - y[None]).square().sum(-1).sqrt()  # from itself: the square root of 0
            return self.heads[0](y), apart.mean(), torch.stack([apart, self.heads[1](y).norm(dim=1) + apart])

    x = torch.randn(4, 6)
    plain, trained = pair(Distances(), x)
    for used in ([0], [0, 1], [1], [2, 0], [0]):
        for owner in (plain, trained):
            owner.zero_grad()
            outputs = owner(x)
            sum(outputs[number].square().sum() for number in used).backward()
        finite = all(item is None or item.isfinite().all() for item in gradients(plain))
        assert finite == (used == [0])
        for mine, theirs in zip(gradients(trained), gradients(plain), strict=True):
            assert (mine is None) == (theirs is None)
            assert theirs is None or torch.equal(mine.nan_to_num(7), theirs.nan_to_num(7))


@pytest.mark.usefixtures("deliveries")
def test_a_function_that_makes_something_of_a_gradient_of_zeros():
    """Plain training calls it with zeros for its output that is not used."""

    class Couples(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1, x * 2

        @staticmethod
        def backward(ctx, first, second):
            return first * second.cos() + first / (1 + second.abs()) + second.exp()

    class Coupled(Outputs):
        def forward(self, x):
            return Couples.apply(self.trunk(x).tanh())

    x = torch.randn(4, 6)
    plain, trained = pair(Coupled(), x)
    for used in ([0], [1], [0, 1]):
        for owner in (plain, trained):
            owner.zero_grad()
            outputs = owner(x)
            sum(outputs[number].square().sum() for number in used).backward()
        assert_equal(gradients(trained), gradients(plain))


@pytest.mark.usefixtures("deliveries")
def test_one_graph_gone_through_for_each_output():
    x = torch.randn(4, 6)
    plain, trained = pair(Outputs(), x)
    there = []
    for owner in (plain, trained):
        outputs = owner(x)
        other = owner(x * 2)
        there.append([])
        for output in (outputs[1], other[2], outputs[0]):
            output.square().sum().backward(retain_graph=True)
            there[-1] += [None if item is None else item.clone() for item in gradients(owner)]
    assert_equal(there[1], there[0])


@pytest.mark.usefixtures("deliveries")
def test_gradients_asked_for_that_there_are_none_of():
    x = torch.randn(4, 6, requires_grad=True)
    plain, trained = pair(Outputs(), x)
    found, expected = (
        torch.autograd.grad(owner(x)[1].sum(), [x, *owner.parameters()], allow_unused=True)
        for owner in (trained, plain)
    )
    assert_equal(found, expected)
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(trained(x)[1].sum(), list(trained.heads[2].parameters()))


@pytest.mark.usefixtures("deliveries")
def test_an_input_that_is_changed_and_not_used_again():
    """The gradient of what it has become is one of those that may not come in."""

    class Changes(Outputs):
        def forward(self, x):
            x.mul_(self.heads[2].weight[0])
            return super().forward(x.detach())[:2]

    x = torch.randn(4, 6)
    plain, trained = pair(Changes(), x.clone().requires_grad_() * 1.0)
    for used in (False, True):
        leaves = []
        for owner in (plain, trained):
            owner.zero_grad()
            leaves.append(x.clone().requires_grad_())
            given = leaves[-1] * 1.5
            outputs = owner(given)
            (outputs[0].sum() + given.square().sum() if used else outputs[0].sum()).backward()
        assert_equal([leaves[1].grad, *gradients(trained)], [leaves[0].grad, *gradients(plain)])


def test_a_backward_pass_that_fails_leaves_nothing_for_the_next():
    x = torch.randn(4, 6)
    plain, trained = pair(Outputs(), x)
    outputs = trained(x)
    outputs[0].sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        outputs[0].sum().backward()
    for owner in (plain, trained):
        owner.zero_grad()
        sum(item.sum() for item in owner(x)).backward()
    assert_equal(gradients(trained), gradients(plain))


def test_through_torch_compile():
    x = torch.randn(4, 6)
    plain = Outputs()
    trained = torch.compile(twin(plain), backend="monetlite", options={"budget": "100%", "time_limit": 1})
    for owner in (plain, trained):
        owner(x)[1].square().sum().backward()
    assert_equal(gradients(trained), gradients(plain))
