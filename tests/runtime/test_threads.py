"""A wrapped model that several threads train."""

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from small_models import TinyCNN, assert_same, step, twin
from step_lists import free_profile, recompute_everything, schedule_of
from torch import nn

import monetlite
from monetlite.core.errors import CudnnError
from monetlite.core.steps import plain_steps
from monetlite.runtime.fitting import Fitting
from monetlite.tracing.operator_graph import Traced


def test_the_first_steps_in_several_threads():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    schedule = monetlite.optimize(model, torch.randn(6, 4), "100%", device="t4", time_limit=1)
    wrapper, inputs = monetlite.MONeTWrapper(twin(model), schedule), torch.randn(3, 6, 4)
    with ThreadPoolExecutor(3) as pool:
        losses = list(pool.map(lambda x: wrapper(x).square().mean(), inputs))
    assert [loss.item() for loss in losses] == [model(x).square().mean().item() for x in inputs]


def test_re_runs_on_another_thread_are_plain_trainings_bit_for_bit(monkeypatch):
    """As on a GPU, where backward passes run on a thread of autograd's."""
    model, images = TinyCNN(), torch.randn(4, 3, 12, 12)
    graph = monetlite.trace(model, images)
    schedule = schedule_of(free_profile(graph), recompute_everything(graph))
    expected = step(twin(model), (images,))
    backward, threads = torch.Tensor.backward, []

    def elsewhere(loss):
        threads.append(threading.Thread(target=backward, args=(loss,)))
        threads[-1].start()
        threads[-1].join()

    monkeypatch.setattr(torch.Tensor, "backward", elsewhere)
    assert_same(step(monetlite.MONeTWrapper(twin(model), schedule), (images,)), expected)
    assert len(threads) == 1


def test_a_re_run_is_not_tuned(monkeypatch):
    graph = monetlite.trace(TinyCNN(), torch.randn(4, 3, 12, 12))
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)

    def fit(steps, device):
        schedule = schedule_of(free_profile(graph), steps)
        traced = Traced(graph=dataclasses.replace(graph, device=device), joint=None)
        return Fitting().fit(traced, schedule, graph.resident.total)

    with pytest.raises(CudnnError, match=r"re-runs stem in the backward pass.*benchmark = False"):
        fit(recompute_everything(graph), "cuda")
    fit(plain_steps(graph), "cuda")
    fit(recompute_everything(graph), "cpu")
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    fit(recompute_everything(graph), "cuda")
