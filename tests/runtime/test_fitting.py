"""Steps that are larger than a schedule was solved for though no input's shape shows it."""

import dataclasses
import warnings
from collections import UserDict
from dataclasses import replace

import pytest
import torch
from small_models import assert_same, step, twin
from step_lists import free_profile, recompute_everything, schedule_of
from thoroughness import often
from torch import nn

import monetlite
from monetlite.core.errors import InfeasibleBudget, ModelError
from monetlite.core.steps import plain_steps
from monetlite.profiling.step_additions import with_accumulation, with_optimizer


def schedule_for(model, inputs, budget_bytes=None):
    graph = monetlite.trace(model, inputs)
    return schedule_of(free_profile(graph), recompute_everything(graph), budget_bytes)


class Repeats(nn.Module):
    """A batch repeated as often as a number says: an argument, or an attribute."""

    def __init__(self):
        super().__init__()
        self.layer, self.times = nn.Linear(16, 16), 1

    def forward(self, x, reps=1):
        return torch.tanh(self.layer(x.repeat(reps * self.times, 1))) * 2


class Offset(nn.Module):
    """A tensor that is neither a parameter nor a buffer."""

    def __init__(self):
        super().__init__()
        self.layer, self.offset = nn.Linear(16, 16), torch.randn(4, 16)

    def forward(self, x):
        return torch.tanh(self.layer(x[:, None] * self.offset)) * 2


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.narrow, self.wide = nn.Linear(16, 4), nn.Linear(16, 256)

    def forward(self, x, wide=False):
        return torch.tanh((self.wide if wide else self.narrow)(x))


@dataclasses.dataclass
class Batch:
    x: torch.Tensor

    def __getitem__(self, name):
        return getattr(self, name)


class OfObjects(nn.Module):
    """Its input is inside of an object that torch's pytrees don't look into."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, batch):
        return torch.tanh(self.layer(batch["x"])) * 2


X = torch.randn(4, 16)
TOO_LARGE = r"this step takes at least .* were predicted and .* are the budget\. .*Solve a schedule"


def test_a_larger_number_as_an_argument():
    model = Repeats()
    wrapper = monetlite.MONeTWrapper(twin(model), schedule_for(model, {"x": X, "reps": 2}))
    with pytest.raises(ModelError, match=TOO_LARGE):
        wrapper(x=X, reps=8)
    for reps in (2, 1):
        assert_same(step(wrapper, {"x": X, "reps": reps}), step(model, {"x": X, "reps": reps}))
    with pytest.raises(ModelError, match=TOO_LARGE):
        wrapper(x=X, reps=8)


def test_a_larger_number_as_an_attribute_after_the_first_step():
    model = Repeats()
    wrapper = monetlite.MONeTWrapper(model, schedule_for(model, X))
    step(wrapper, (X,))
    model.times = 4
    with pytest.raises(ModelError, match=TOO_LARGE):
        wrapper(X)
    model.times = 1
    assert_same(step(wrapper, (X,)), step(twin(model), (X,)))


def test_a_larger_tensor_as_an_attribute():
    model = Offset()
    wrapper = monetlite.MONeTWrapper(model, schedule_for(model, X))
    model.offset = torch.randn(64, 16)
    with pytest.raises(ModelError, match=TOO_LARGE):
        wrapper(X)


def test_a_flag_for_a_wider_head():
    model = TwoHeads()
    with pytest.raises(ModelError, match=TOO_LARGE):
        monetlite.MONeTWrapper(model, schedule_for(model, (X, False)))(X, True)


@pytest.mark.parametrize("make", often([Batch, lambda x: UserDict(x=x)], Batch))
def test_larger_tensors_inside_of_objects(make):
    model = OfObjects()
    wrapper = monetlite.MONeTWrapper(twin(model), schedule_for(model, (make(X),)))
    for rows in (4, 3):
        wrapper(make(X[:rows])).sum().backward()
        model(make(X[:rows])).sum().backward()
    assert torch.equal(wrapper.layer.weight.grad, model.layer.weight.grad)
    with pytest.raises(ModelError, match=TOO_LARGE):
        wrapper(make(torch.randn(256, 16)))


def test_of_several_schedules_one_that_is_large_enough_is_taken():
    model = OfObjects()
    schedules = [schedule_for(model, (Batch(torch.randn(rows, 16)),)) for rows in (256, 4)]
    wrapper = monetlite.MONeTWrapper(model, schedules)
    wrapper(Batch(torch.randn(200, 16)))
    assert wrapper.schedule is schedules[0]
    wrapper(Batch(torch.randn(3, 16)))
    assert wrapper.schedule is schedules[1]


def test_a_narrower_models_schedule():
    narrow, wide = (nn.Sequential(nn.Linear(16, n), nn.ReLU(), nn.Linear(n, 2)) for n in (8, 512))
    with pytest.raises(ModelError, match=TOO_LARGE):
        monetlite.MONeTWrapper(wide, schedule_for(narrow, X))(X)
    monetlite.MONeTWrapper(narrow, schedule_for(wide, X))(X)


def test_with_a_budget_the_larger_step_is_solved_for():
    model = Repeats()
    wrapper = monetlite.MONeTWrapper(twin(model), budget="110%", device="rtx-4090", time_limit=0.5)
    for reps, solved in ((1, 1), (8, 2), (2, 2)):
        inputs = {"x": X, "reps": reps}
        assert_same(step(wrapper, inputs), step(model, inputs))
        assert len(wrapper._training.schedules.known) == solved
    tight = monetlite.MONeTWrapper(model, budget=20_000, device="rtx-4090", time_limit=0.5)
    tight(x=X, reps=1)
    with pytest.raises(InfeasibleBudget):
        tight(x=X, reps=64)


def test_more_than_predicted_within_the_budget_is_warned_of():
    model = Repeats()
    wrapper = monetlite.MONeTWrapper(twin(model), schedule_for(model, (X, 1), budget_bytes=10**6))
    with pytest.warns(UserWarning, match="takes at least"):
        found = step(wrapper, (X, 8))
    assert_same(found, step(model, (X, 8)))


def test_workspace_is_taken_to_be_what_it_is_for_the_inputs_solved_for():
    """What operators need beside values is not known of a captured graph, and hides nothing once it is."""
    model = Repeats()
    schedule = schedule_for(model, (X, 4))
    schedule = replace(schedule, peak_bytes=schedule.peak_bytes + 10**5, budget_bytes=schedule.budget_bytes + 10**5)
    wrapper = monetlite.MONeTWrapper(model, schedule)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for reps in (4, 1):
            wrapper(X, reps)
    with pytest.raises(ModelError, match=TOO_LARGE):
        wrapper(X, 8)


@pytest.mark.parametrize(
    "wrapped",
    often([with_accumulation, lambda profile: with_optimizer(profile, "adam")], with_accumulation),
)
def test_what_a_schedule_counts_beside_the_step_is_counted_here(wrapped):
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2))
    profile = wrapped(free_profile(monetlite.trace(model, X)))
    schedule = schedule_of(profile, plain_steps(profile.graph))
    schedule = replace(schedule, optimizer=profile.optimizer, accumulate=profile.accumulate)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monetlite.MONeTWrapper(model, schedule)(X[:3])
    wider = nn.Sequential(nn.Linear(16, 72), nn.ReLU(), nn.Linear(72, 2))
    with pytest.raises(ModelError, match=TOO_LARGE):
        monetlite.MONeTWrapper(wider, schedule)(X)


def test_a_batch_that_is_part_of_a_data_set_counts_by_itself():
    model, everything = nn.Sequential(nn.Linear(16, 4), nn.ReLU()), torch.randn(10_000, 16)
    wrapper = monetlite.MONeTWrapper(model, schedule_for(model, X))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrapper(everything[100:103])


def test_torch_compile_with_a_schedule_file_of_smaller_inputs(tmp_path):
    model, file = nn.Sequential(nn.Linear(16, 4), nn.ReLU()), str(tmp_path / "small.yaml")
    options = {"budget": "100%", "schedule": file, "device": "rtx-4090", "time_limit": 1}

    def compiled():
        torch.compiler.reset()
        return torch.compile(model, backend="monetlite", options=options, dynamic=False)

    compiled()(X).sum().backward()
    with pytest.raises(Exception, match="this step takes at least"):
        compiled()(torch.randn(64, 16)).sum().backward()
