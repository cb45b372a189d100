"""A schedule from elsewhere: what doesn't exist here runs by default, said once, and the training is the same."""

import functools
import random
import warnings
from dataclasses import replace

import pytest
import torch
from small_models import assert_same, step, twin
from step_lists import free_profile, recompute, recompute_with_any_reads, schedule_of, with_random_implementations
from torch import nn

import monetlite
from monetlite.core.binding import bind
from monetlite.core.errors import ScheduleMismatch
from monetlite.core.graph import Implementation
from monetlite.core.simulate import simulate
from monetlite.core.steps import plain_steps


def network():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 12, 3),
        nn.GELU(),
        nn.Dropout(0.3),
        nn.Flatten(),
        nn.Linear(12 * 36, 10),
    )
    return model, (torch.randn(6, 3, 16, 16),)


@functools.cache
def traced():
    return monetlite.trace(*network())


@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_missing_the_schedule_stays_legal(seed):
    """Any schedule, on a graph that lacks a random part of the implementations that it runs."""
    rng = random.Random(seed)
    graph = traced()
    steps = recompute_with_any_reads(graph, rng, 0.5)
    steps = with_random_implementations(graph, steps, rng)
    schedule = schedule_of(free_profile(graph), steps)
    gone: set[Implementation] = set()

    def kept(item):
        if rng.random() < 0.4:
            gone.add(item.name)
        return item.name not in gone

    lacking = graph.restricted(kept)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ported = bind(schedule, lacking)
    simulate(free_profile(lacking), ported)
    assert [index for index, _ in ported] == [index for index, _ in steps]


def test_what_the_default_reads_is_not_written_over_before():
    """A batch norm over its input, where its gradient can't be made from its output."""
    graph, chosen = traced(), {"1": "inplace", "1.backward": "from_output"}

    def choose(index):
        operator = graph.operators[index]
        names = [item.name for item in operator.implementations]
        return names.index(chosen.get(operator.name, names[0]))

    steps = recompute(graph, lambda _: False, choose)
    profile, lacking = free_profile(graph), graph.restricted(lambda item: item.name != "from_output")
    with pytest.warns(UserWarning, match=r"1\.backward as from_output, which"):
        ported = bind(schedule_of(profile, steps), lacking)
    assert not any(choice for _, choice in ported)
    kept_bytes = graph.values[graph.operators[graph.by_name["1"]].implementations[0].reads[0]].size_bytes
    peaks = [simulate(free_profile(of), made).peak_bytes for of, made in ((graph, steps), (lacking, ported))]
    assert peaks[1] <= peaks[0] + kept_bytes


def test_one_warning_says_what_runs_otherwise_and_what_it_takes():
    model, x = network()
    graph = monetlite.trace(model, x)
    chosen = dict(plain_steps(graph))
    for name, how in (("5", "chunks9"), ("1.backward", "from_elsewhere"), ("0", "winograd"), ("2", "fancy")):
        assert graph.operators[graph.by_name.get(name, 0)].find(how) is None
    schedule = schedule_of(free_profile(graph), tuple(chosen.items()), budget_bytes=10**9)
    foreign = {"0": "winograd", "1.backward": "from_elsewhere", "2": "fancy", "5": "chunks9"}
    schedule = replace(schedule, device="a100-40gb", choices=replace(schedule.choices, implementations=foreign))
    wrapper = monetlite.MONeTWrapper(twin(model), schedule)
    with pytest.warns(UserWarning, match="they run by default instead") as caught:
        assert_same(step(wrapper, x), step(model, x))
    (message,) = [str(item.message) for item in caught if "by default instead" in str(item.message)]
    assert (
        "solved for a100-40gb and runs 0 as winograd, 1.backward as from_elsewhere, 2 as fancy and 1 more"
        in message
    )
    assert "on this cpu" in message
    assert "of the 1 GB budgeted" in message
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(wrapper, x)


def test_more_than_the_budget_is_said():
    model, x = network()
    graph = monetlite.trace(model, x)
    schedule = schedule_of(free_profile(graph), plain_steps(graph), budget_bytes=10**9)
    schedule = replace(
        schedule, budget_bytes=1000, choices=replace(schedule.choices, implementations={"0": "winograd"})
    )
    with pytest.warns(UserWarning, match="MORE than the budget"):
        step(monetlite.MONeTWrapper(twin(model), schedule), x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="MORE than the budget"):
            step(monetlite.MONeTWrapper(twin(model), schedule), x)


def test_what_runs_on_another_device_only_is_not_run_here():
    """On a GPU, a schedule that was measured on a CPU leaves out what is only right on a CPU."""
    graph = monetlite.trace(*network())
    only_cpu = {
        (operator.name, item.name)
        for operator in graph.operators
        for item in operator.implementations
        if item.devices == ("cpu",)
    }
    assert only_cpu
    elsewhere = graph.available("cuda")
    assert not only_cpu & {
        (operator.name, item.name) for operator in elsewhere.operators for item in operator.implementations
    }
    steps = []
    for index, _ in plain_steps(graph):
        names = [item.name for item in graph.operators[index].implementations]
        steps.append((index, names.index("channels_last") if "channels_last" in names else 0))
    schedule = schedule_of(free_profile(graph), steps)
    with pytest.warns(UserWarning, match="channels_last"):
        ported = bind(schedule, elsewhere)
    assert all(choice == 0 for _, choice in ported)


def test_a_schedule_of_another_model_is_refused_for_inputs_of_any_size():
    """Fewer inputs of the same model may run other operators (a batch of one); another model is no such case."""
    graph = traced()
    schedule = schedule_of(free_profile(graph), plain_steps(graph))
    schedule = replace(schedule, budget_bytes=10**9, operator_digests=graph.operator_digests)
    trained = monetlite.MONeTWrapper(nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 10)), schedule)
    with pytest.raises(ScheduleMismatch):
        trained(torch.randn(2, 3, 8, 8))
