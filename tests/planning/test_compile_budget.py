"""`torch.compile` within a budget: peaks, gradients and errors, and peaks that rise with the budget."""

import copy
import importlib
import sys

import pytest
import torch
from layered_models import Transformer
from torch import nn

import monetlite
from monetlite.checking.trainee import Trainee, default_loss
from monetlite.core.errors import BudgetError, ModelError
from monetlite.fx.torch_internals.torch_inductor import partitioning_backend
from monetlite.planning import compile_budget

SMALL = 0.05
"""A share of plain training's peak that is too small."""


@pytest.fixture(autouse=True)
def _forgotten():
    yield
    torch._dynamo.reset()


def trainee(model: nn.Module, inputs) -> Trainee:
    return Trainee(model, inputs, {}, default_loss, "cpu")


def compiled(model: nn.Module, budget) -> nn.Module:
    return monetlite.compile_within(copy.deepcopy(model), budget, backend=partitioning_backend())


def test_peaks_rise_with_budgets_and_stay_within_them(monkeypatch):
    solvers = []
    original = compile_budget.PartitionSolver

    def noted(budget_bytes, outputs):
        solvers.append(original(budget_bytes, outputs))
        return solvers[-1]

    monkeypatch.setattr(compile_budget, "PartitionSolver", noted)
    torch.manual_seed(0)
    model, inputs = Transformer(layers=2).train(), (torch.randint(0, 50, (4, 128)),)
    plain = trainee(model, inputs)
    plain.step()
    peak_bytes, expected = plain.memory().peak_bytes, plain.snapshot(1)
    measured = []
    for share in (SMALL, 0.75, 1.0):
        budget_bytes = int(share * peak_bytes)
        contender = trainee(compiled(model, budget_bytes), inputs)
        if share == SMALL:
            with pytest.raises(Exception, match="smallest peak"):
                contender.snapshot(1)
            continue
        found = contender.snapshot(1)
        gradients = {name.removeprefix("_orig_mod."): item for name, item in found.gradients.items()}
        torch.testing.assert_close(gradients, expected.gradients, rtol=1e-4, atol=1e-6)
        measured.append(contender.memory().peak_bytes)
        assert measured[-1] <= solvers[-1].peak_bytes * 1.001 <= budget_bytes * 1.001
    assert measured == sorted(measured)


def test_budgets_are_read_at_once():
    with pytest.raises(BudgetError):
        monetlite.compile_within(nn.Linear(2, 2), "much")
    with pytest.raises(ModelError, match="outputs 'some' is unknown"):
        monetlite.compile_within(nn.Linear(2, 2), "1GB", outputs="some")


def test_a_torch_that_takes_no_solver_is_named(monkeypatch):
    importlib.import_module("torch._inductor.compile_fx")  # which needs that module itself
    monkeypatch.setitem(sys.modules, "torch._inductor.custom_graph_pass", None)
    with pytest.raises(ModelError, match="takes no solver of others"):
        monetlite.compile_within(nn.Linear(2, 2), "1GB")
