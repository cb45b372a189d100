"""A check says how much memory it takes before it begins, and doesn't begin where there is less."""

from dataclasses import replace

import pytest
import torch
from commands import run
from step_lists import free_profile, schedule_of
from torch import nn

import monetlite
from monetlite.checking import needed_memory as module
from monetlite.checking import step_differences
from monetlite.checking.needed_memory import needed_memory
from monetlite.checking.verification import verify_own
from monetlite.core.errors import ModelError
from monetlite.core.steps import plain_steps
from monetlite.core.units import format_bytes
from monetlite.profiling.memory_use import high_water_growth_bytes
from monetlite.runtime.measured_peak import state_bytes

NET = """
import torch
from torch import nn

def build():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), (torch.randn(8, 64),)
"""


def wide():
    return nn.Sequential(nn.Linear(3000, 3000), nn.ReLU(), nn.Linear(3000, 3000)).train(), torch.randn(4, 3000)


def schedule_for(model, inputs):
    profile = free_profile(monetlite.trace(model, inputs).available("cpu"))
    return schedule_of(profile, plain_steps(profile.graph), 10**9)


def test_a_check_takes_no_more_than_is_said():
    model, inputs = wide()
    schedule = schedule_for(model, inputs)
    needed = needed_memory(model, [inputs], schedule, on_gpu=False)
    weights = sum(item.nbytes for item in model.parameters())
    assert (needed.weights, needed.gradients, needed.results_to_compare) == (weights, weights, weights)
    grown = high_water_growth_bytes(lambda: verify_own(model, schedule, inputs, repeats=1))
    assert grown is None or grown <= needed.in_all


def test_the_models_own_weights_are_left_alone():
    model, inputs = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).train(), torch.randn(4, 8)
    before = {name: item.clone() for name, item in model.state_dict().items()}
    report = monetlite.verify(model, schedule_for(model, inputs), inputs, repeats=1)
    assert report.exact
    assert all(torch.equal(item, before[name]) for name, item in model.state_dict().items())
    assert all(item.grad is None for item in model.parameters())


def test_differences_in_pieces_are_those_of_the_whole(monkeypatch):
    one, other = torch.randn(7, 5), torch.randn(7, 5)
    expected = ((one - other).double().abs().max() / one.double().abs().max()).item()
    monkeypatch.setattr(step_differences, "PIECE", 3)
    assert step_differences.difference(one, other) == pytest.approx(expected, rel=1e-5)
    for same in (float("nan"), float("inf"), -float("inf")):
        one[3, 3] = other[3, 3] = same
        one[0, 0], other[0, 0] = 8.0, 18.0
        assert step_differences.difference(one, other) == 1.25


@pytest.mark.parametrize("one", [float("inf"), float("nan")])
@pytest.mark.parametrize("other", [-float("inf"), 0.0, 5.0, torch.finfo(torch.float32).max])
def test_a_number_that_is_finite_in_one_step_alone_is_missing(one, other):
    pair = torch.tensor([one, 1.0]), torch.tensor([other, 1.0])
    for expected, found in (pair, pair[::-1]):
        assert step_differences.difference(expected, found) == step_differences.MISSING


def test_an_infinite_gradient_makes_no_others_negligible():
    assert step_differences.negligible([torch.tensor([float("inf"), 2.0]), torch.ones(3)], 0.01) == 2e-3


@pytest.mark.parametrize("there", [100_000, 10**12])
def test_the_command_refuses_what_does_not_fit(tmp_path, monkeypatch, there):
    (tmp_path / "net.py").write_text(NET)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).train()
    schedule_for(model, torch.randn(8, 64)).save(tmp_path / "s.yaml")
    monkeypatch.setattr(module, "available_bytes", lambda: there)
    result = run("check", tmp_path / "s.yaml", "--model", f"{tmp_path}/net.py:build", "--repeats", 1)
    weights = format_bytes(2 * (64 * 64 + 64) * 4)
    assert f"{weights} weights, {weights} gradients" in result.stderr
    if there > 10**9:
        assert result.exit_code == 0, result.output
        assert "this takes about 300 MB of memory" in result.stderr
        return
    assert result.exit_code == 4
    assert "100 kB is available. Check at a smaller size (--batch" in result.stderr
    assert "training" not in result.stderr


def test_an_optimizer_that_nobody_knows_is_named(tmp_path):
    (tmp_path / "net.py").write_text(NET)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).train()
    schedule = replace(schedule_for(model, torch.randn(8, 64)), optimizer="lion")
    schedule.save(tmp_path / "s.yaml")
    for command in ("check", "show"):
        refused = run(command, tmp_path / "s.yaml", "--model", f"{tmp_path}/net.py:build")
        assert refused.exit_code == 2, refused.output
        assert "optimizer 'lion' is unknown; there are sgd, momentum" in refused.stderr
    with pytest.raises(ModelError, match="'lion' is unknown"):
        state_bytes([(4, 1)], "lion")
