"""State of an optimizer that a plan doesn't count: a person is told, once."""

import gc
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

import monetlite


def network() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """The warnings of three steps."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(32, 64)).sum().backward()
            optimizer.step()
    assert all(item.filename == __file__ for item in caught)
    return [str(item.message) for item in caught]


def within(**options: object) -> nn.Module:
    return monetlite.within(network(), budget="100%", time_limit=0.3, wait=True, **options)


KINDS = {
    "adamw": (torch.optim.AdamW, {}, "200 kB", "Give optimizer='adamw' beside the budget"),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}, "99.8 kB", "Give optimizer='momentum' beside the budget"),
    "other": (torch.optim.RMSprop, {}, "99.9 kB", "Lower the budget by as much"),
    "none": (torch.optim.SGD, {}, "", ""),
}


@pytest.mark.parametrize(("made", "settings", "size", "advice"), KINDS.values(), ids=KINDS)
def test_state_that_no_budget_counts_is_told_once(made, settings, size, advice):
    model = within()
    told = train(model, made(model.parameters(), lr=0.01, **settings))
    assert len(told) == bool(size)
    assert all(words in message for message in told for words in (f"keeps {size} of state", advice))


def test_state_that_is_counted_is_not_told():
    model = within(optimizer="adamw")
    assert not train(model, torch.optim.AdamW(model.parameters()))


def test_a_schedule_is_solved_with_the_optimizer():
    model = network()
    schedule = monetlite.optimize(model, torch.randn(32, 64), "100%", time_limit=0.3)
    (told,) = train(monetlite.MONeTWrapper(model, schedule), torch.optim.Adam(model.parameters()))
    assert "Solve a schedule with optimizer='adam' (--optimizer adam)" in told


def test_other_models_optimizers_are_not_looked_at():
    model, other = within(), network()
    assert not train(other, torch.optim.AdamW(other.parameters()))
    assert len(train(model, torch.optim.AdamW(model.parameters()))) == 1


def test_two_models_of_one_optimizer_are_told_once_and_its_other_hooks_are_called():
    models = [within(), within()]
    optimizer = torch.optim.AdamW([item for model in models for item in model.parameters()])
    called = []
    handle = torch_optimizer.register_optimizer_step_post_hook(lambda *_: called.append(True))
    try:
        assert len(train(nn.Sequential(*models), optimizer)) == 1
    finally:
        handle.remove()
    assert len(called) == 3


def test_nothing_holds_a_model_that_is_gone():
    model = within()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_state_of_an_optimizer_that_steps_in_the_backward_pass_is_told():
    """Its first updates are of one parameter each."""
    model = within(optimizer="sgd", step_in_backward=True)
    (told,) = train(model, monetlite.step_in_backward(torch.optim.AdamW(model.parameters())))
    assert "keeps 200 kB of state" in told
