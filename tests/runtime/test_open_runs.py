"""A model that runs several times before a backward pass: all of its runs keep to the budget together."""

import warnings

import pytest
import torch
from small_models import twin
from torch import nn

import monetlite
from monetlite.core.errors import InfeasibleBudget
from monetlite.profiling.memory_records import peak_growth_bytes

RUNS = 3


def network(blocks=4):
    layers = [module for _ in range(blocks) for module in (nn.Linear(128, 128), nn.GELU(), nn.LayerNorm(128))]
    return nn.Sequential(*layers)


def triplet(model, inputs):
    model.zero_grad()
    first, second, third = (model(x) for x in inputs)
    ((first - second).square().mean() - (first - third).square().mean()).backward()


@pytest.fixture
def inputs():
    return [torch.randn(1024, 128) for _ in range(RUNS)]


def own_bytes(model, inputs):
    return sum(item.nbytes for item in (*model.parameters(), *inputs))


def test_runs_keep_to_the_budget_together(inputs):
    plain = network()
    resident_bytes = own_bytes(plain, inputs)
    budget = resident_bytes + int(0.7 * peak_growth_bytes(lambda: triplet(plain, inputs)))
    trained = monetlite.within(twin(plain), budget=budget, device="cpu", time_limit=3, wait=True)
    for _ in range(3):
        triplet(trained, inputs)
    assert peak_growth_bytes(lambda: triplet(trained, inputs)) + resident_bytes <= budget
    triplet(plain, inputs)
    for mine, theirs in zip(trained.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    schedule = monetlite.schedule_of(trained)
    triplet(trained, inputs)
    assert monetlite.schedule_of(trained) is schedule, "planned once"


@pytest.mark.parametrize("order", [1, -1])
def test_shares_are_as_large_as_the_runs(order):
    """The larger one of two has more than half of what they don't have in common."""
    inputs, budgets = [torch.randn(size, 128) for size in (1024, 256)][::order], set()

    def both(model):
        model.zero_grad()
        losses = []
        for x in inputs:
            losses.append(model(x).square().mean())
            if model is not plain:
                budgets.add(monetlite.schedule_of(model).budget_bytes)
        sum(losses).backward()

    plain = network()
    resident_bytes, twice_bytes = own_bytes(plain, inputs), 2 * own_bytes(plain, [])
    budget = resident_bytes + int(0.7 * peak_growth_bytes(lambda: both(plain)))
    trained = monetlite.within(twin(plain), budget=budget, device="cpu", time_limit=3, wait=True)
    for _ in range(3):
        for x in inputs:
            trained(x).square().mean().backward()  # one after the other: this is no share
        both(trained)
    assert peak_growth_bytes(lambda: both(trained)) + resident_bytes <= budget
    assert 0.6 < (max(budgets - {budget}) - twice_bytes) / (budget - twice_bytes) < 0.9
    both(plain)
    for mine, theirs in zip(trained.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def test_a_run_whose_loss_is_left_out_shares_no_budget(inputs):
    """Its loss is there until the next one takes its name."""
    plain = network()
    resident_bytes = own_bytes(plain, inputs[:1])
    peak_bytes = resident_bytes + peak_growth_bytes(lambda: plain(inputs[0]).square().mean().backward())
    trained = monetlite.within(twin(plain), budget=peak_bytes, device="cpu", time_limit=3, wait=True)
    budgets = set()
    for number in range(6):
        loss = trained(inputs[0] if number != 2 else inputs[0] * torch.nan).square().mean()
        if loss.isfinite():
            loss.backward()
        budgets.add(monetlite.schedule_of(trained).budget_bytes)
    assert budgets == {peak_bytes}


@pytest.mark.parametrize("always", [False, True])
def test_a_run_without_a_backward_pass_shares_the_budget_if_each_step_has_one(always, inputs):
    """An interrupted step leaves one while a traceback is kept, and a comparison may hold one in each step."""
    plain = network()
    peak_bytes = own_bytes(plain, inputs) + 2 * peak_growth_bytes(lambda: triplet(plain, inputs))
    trained = monetlite.within(twin(plain), budget=peak_bytes, device="cpu", time_limit=0.3)
    left = []
    for number in range(5):
        if always or number == 1:
            left.append(trained(inputs[1]))
        trained(inputs[0]).square().mean().backward()
        if number > 2:
            left.clear()
    assert (monetlite.schedule_of(trained).budget_bytes < peak_bytes) == always


def test_a_share_of_plain_training_is_one_of_each_run(inputs):
    trained = monetlite.within(network(), budget="70%", device="cpu", time_limit=3, wait=True)
    for _ in range(3):  # after which the loss is known
        triplet(trained, inputs)
    schedule = monetlite.schedule_of(trained)
    assert 0.65 * schedule.plain_peak_bytes < schedule.budget_bytes < 0.75 * schedule.plain_peak_bytes
    triplet(trained, inputs)
    assert monetlite.schedule_of(trained) is schedule


@pytest.mark.thorough
def test_a_share_that_is_too_small_is_told_of(inputs):
    with pytest.raises(InfeasibleBudget) as smallest:
        monetlite.optimize(network(), inputs[0], "1%", device="cpu", time_limit=0.3)
    budget = int(1.4 * smallest.value.reached_bytes)
    refused = monetlite.within(network(), budget=budget, device="cpu", time_limit=0.3)
    triplet(refused, inputs)
    says = r"runs 3 times before a backward pass, so this one gets .* of .*raise the budget to .* \(\d+ bytes\)"
    with pytest.raises(InfeasibleBudget, match=says) as found:
        triplet(refused, inputs)
    assert found.value.budget_bytes == budget
    assert found.value.reached_bytes > budget
    trained = monetlite.within(network(), budget=int(1.01 * found.value.reached_bytes), device="cpu", time_limit=2)
    for _ in range(2):
        triplet(trained, inputs)


def test_a_schedule_that_several_runs_exceed_is_told_of_once(inputs):
    model = network()
    trained = monetlite.MONeTWrapper(
        model, monetlite.optimize(model, inputs[0], "70%", device="cpu", time_limit=0.3)
    )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            triplet(trained, inputs)
    assert ["before a backward pass" in str(item.message) for item in told].count(True) == 1


@pytest.mark.thorough
def test_runs_in_pieces_are_told_of_once(inputs):
    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = network(2), network(2)

        def forward(self, x):
            found = self.first(x)
            return self.second(found if found.mean() > 0 else -found)

    trained = monetlite.within(Looks(), budget="100%", device="cpu", time_limit=0.3)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(4):
            triplet(trained, inputs)
    assert ["the budget is of one run" in str(item.message) for item in told].count(True) == 1


def test_a_run_in_pieces_that_was_interrupted_is_no_second_one(inputs):
    """Its output is held, as a traceback does in a notebook."""

    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = network(1), network(1)

        def forward(self, x):
            found = self.first(x)
            return self.second(found if found.mean() > 0 else -found)

    trained, held = monetlite.within(Looks(), budget="100%", device="rtx-3090", time_limit=0.3), []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for number in range(4):
            output = trained(inputs[0])
            if number == 1:
                held.append(output)
            else:
                output.sum().backward()
    assert not any("the budget is of one run" in str(item.message) for item in told)


@pytest.mark.thorough
def test_an_output_that_is_kept_is_no_run(inputs):
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.third, self.kept = network(1), network(1), network(1), None

        def forward(self, x):
            found = self.first(x)
            self.kept = self.second(found if found.mean() > 0 else -found)  # to look at, not in the loss
            return self.third(found) if self.kept.mean() < 1e9 else found

    trained = monetlite.within(Keeps(), budget="100%", device="cpu", time_limit=0.3)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(4):
            trained(inputs[0]).sum().backward()
    assert not any("the budget is of one run" in str(item.message) for item in told)
