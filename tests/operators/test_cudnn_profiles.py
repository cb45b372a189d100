"""Measured profiles with cuDNN's plans: which ones are measured, left out and kept."""

import random
from dataclasses import replace

import pytest
import torch
from cudnn_graphs import Block, convolutions, plans_of, traced
from fake_cudnn import PLANS, install

import monetlite
from monetlite.core.choices import Choices
from monetlite.core.costs import Cost, Profile, ProfileKind
from monetlite.core.errors import CudnnError, ProfileError
from monetlite.core.simulate import simulate
from monetlite.operators import cudnn
from monetlite.profiling import measured
from monetlite.profiling.plan_front import on_front, pareto


@pytest.fixture
def frontend(monkeypatch):
    return install(monkeypatch)


def cost(latency_ms, workspace_bytes):
    return Cost(latency_ms=latency_ms, workspace_bytes=workspace_bytes)


class TestPareto:
    def test_front(self):
        assert pareto([cost(3, 0), cost(1, 9), cost(2, 5), cost(2, 6), cost(4, 1), cost(1, 10)]) == [0, 1, 2]
        assert pareto([]) == []

    def test_of_equals_the_first_stays(self):
        assert pareto([cost(1, 5), cost(1, 5), cost(2, 5)]) == [0]

    def test_against_the_definition(self):
        numbers = random.Random(0)
        for _ in range(300):
            costs = [cost(numbers.randint(1, 6), numbers.randint(0, 6)) for _ in range(numbers.randint(1, 9))]
            pairs = [(item.latency_ms, item.workspace_bytes) for item in costs]
            beaten = {
                at
                for at, (latency, workspace) in enumerate(pairs)
                for other, (faster, smaller) in enumerate(pairs)
                if faster <= latency
                and smaller <= workspace
                and ((latency, workspace) != pairs[other] or other < at)
            }
            assert pareto(costs) == [at for at in range(len(costs)) if at not in beaten]


def priced(graph, price):
    """A profile in which `price(operator, implementation)` is (latency, workspace)."""
    costs = tuple(
        tuple(cost(*price(operator, item)) for item in operator.implementations) for operator in graph.operators
    )
    return Profile(graph=graph, device="cuda", kind=ProfileKind.MEASURED, costs=costs)


def kept(profile):
    return {
        operator.name: [item.name for item in plans_of(operator)] for operator, _ in convolutions(profile.graph)
    }


class TestOnFront:
    """Of two plans, PLANS[0] and PLANS[1], beside `default` and, for input gradients, `transposed`."""

    def test_a_plan_that_is_beaten_by_the_default_goes(self, frontend):
        prices = {"default": (5, 100), PLANS[0]: (6, 100), PLANS[1]: (6, 99)}
        graph = cudnn.offer_plans(traced())
        profile = on_front(priced(graph, lambda _, item: prices.get(item.name, (9, 999))))
        assert set(map(tuple, kept(profile).values())) == {(PLANS[1],)}
        assert [len(costs) for costs in profile.costs] == [
            len(op.implementations) for op in profile.graph.operators
        ]

    def test_the_default_does_not_beat_a_plan_that_reads_less(self, frontend):
        graph = cudnn.offer_plans(traced())
        prices = {"default": (1, 0), "transposed": (5, 50), PLANS[0]: (4, 60), PLANS[1]: (5, 51)}
        profile = on_front(priced(graph, lambda _, item: prices.get(item.name, (9, 999))))
        for operator, role in convolutions(profile.graph):
            assert kept(profile)[operator.name] == ([PLANS[0]] if role == "input_gradient" else [])

    def test_everything_else_stays(self, frontend):
        graph = cudnn.offer_plans(traced())
        profile = on_front(priced(graph, lambda operator, item: (1, 0)))
        others = [[item for item in op.implementations if item.name not in PLANS] for op in graph.operators]
        assert [list(operator.implementations) for operator in profile.graph.operators] == others

    def test_operators_are_judged_apart(self, frontend):
        graph = cudnn.offer_plans(traced())
        chosen = {"conv2": PLANS[0], "conv3": PLANS[1]}
        profile = on_front(
            priced(graph, lambda operator, item: (1 if chosen.get(operator.name) == item.name else 2, 0))
        )
        assert {name: plans for name, plans in kept(profile).items() if plans} == {
            name: [plan] for name, plan in chosen.items()
        }


class FakeMeter:
    """Runs every call once on the CPU; a plan is fast and takes a workspace."""

    device = "cpu"

    def latency_ms(self, run, recent=None, room_bytes=0):
        run()
        return 1.0

    def host_ms(self, run):
        return 0.0

    def growth_bytes(self, run):
        return 0

    def kept_bytes(self, runs):
        return 0

    def environment(self):
        return {"device": "a fake GPU"}


@pytest.fixture
def meter(monkeypatch):
    made = FakeMeter()
    monkeypatch.setattr(measured, "meter_for", lambda device: made)
    return made


def block():
    return replace(monetlite.trace(Block(), torch.randn(2, 3, 8, 8)), device="cuda")


class TestMeasured:
    def measure(self, monkeypatch, price):
        """A profile of the block in which implementations cost what `price` says, by name."""
        measure = measured.measure_call

        def priced_after_running(candidate, meter, room_bytes):
            measure(candidate, meter, room_bytes)
            return cost(*price(candidate.name.rpartition(", ")[2].rstrip(")")))

        monkeypatch.setattr(measured, "measure_call", priced_after_running)
        return monetlite.profile(block(), "cuda")

    def test_plans_on_the_front_are_in_the_profile(self, frontend, meter, monkeypatch):
        profile = self.measure(monkeypatch, lambda name: (1, 7) if name == PLANS[0] else (2, 3))
        assert set(map(tuple, kept(profile).values())) == {(PLANS[0],)}
        for operator, costs in zip(profile.graph.operators, profile.costs, strict=True):
            for item, found in zip(operator.implementations, costs, strict=True):
                assert (found.latency_ms, found.workspace_bytes) == (
                    (1, 7) if item.name == PLANS[0] else (2, 3) if item.call and item.call.outputs else (0, 0)
                )
        last = [op.implementations[-1].name in PLANS for op in profile.graph.operators]
        steps = [
            (index, len(op.implementations) - 1 if last[index] else 0)
            for index, op in enumerate(profile.graph.operators)
            if not op.derived
        ]
        named = Choices.of_steps(profile.graph, steps).implementations
        assert [how for how in named.values() if how.startswith("cudnn.")] == [PLANS[0]] * 14
        assert simulate(profile, [(index, 0) for index, _ in steps]).latency_ms > 0

    def test_a_plan_that_fails_is_left_out(self, frontend, meter, monkeypatch):
        frontend.failing = {"eng0"}
        profile = self.measure(
            monkeypatch, lambda name: (1 if name == PLANS[1] else 2, 5 if name == PLANS[0] else 9)
        )
        assert set(map(tuple, kept(profile).values())) == {(PLANS[0],)}

    @pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), CudnnError("no handle")])
    def test_so_is_one_that_runs_out_of_memory(self, frontend, meter, monkeypatch, error):
        def fail(*_):
            raise error

        monkeypatch.setattr("monetlite.operators.cudnn.convolution_parts.run_plan", fail)
        told = []
        profile = monetlite.profile(block(), "cuda", progress=lambda done, total: told.append((done, total)))
        assert not any(kept(profile).values())
        assert told[-1][0] == told[-1][1] == len(told)

    def test_any_other_operator_must_run(self, frontend, meter, monkeypatch):
        def fail(name):
            if name == "transposed":
                raise ProfileError("transposed can't be measured")
            return 1, 1

        with pytest.raises(ProfileError, match="transposed"):
            self.measure(monkeypatch, fail)

    def test_plans_that_were_built_to_be_measured_are_dropped(self, frontend, meter, monkeypatch):
        self.measure(monkeypatch, lambda name: (1, 1))
        assert not cudnn.execution_plans._local.__dict__

    def test_on_the_cpu_there_are_none(self, frontend, meter):
        profile = monetlite.profile(replace(block(), device="cpu"), "cpu")
        assert not any(kept(profile).values())
        assert not frontend.graphs
