"""Schedules that name cuDNN's plans: run where those are, run otherwise where they are not, refused if hostile."""

import copy
import re
import warnings
from dataclasses import replace
from functools import cache

import pytest
import torch
from cudnn_graphs import Block, convolutions, naming, plans_of, traced
from fake_cudnn import PLANS, UNBUILT, install
from small_models import assert_same, step, twin
from step_lists import free_profile, recompute, schedule_of
from torch import nn

import monetlite
from monetlite.core.choices import Choices
from monetlite.core.errors import CudnnError, ScheduleMismatch
from monetlite.core.steps import check_legal
from monetlite.operators import cudnn
from monetlite.operators.cudnn import library
from monetlite.runtime import fitting

needs_cudnn = pytest.mark.skipif(not cudnn.available(), reason=f"no cuDNN to ask: {cudnn.problem()}")


@pytest.fixture
def frontend(monkeypatch):
    return install(monkeypatch)


@pytest.fixture
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def planned(model, *inputs):
    """A schedule that runs every convolution by a plan, and every one again before its gradients."""
    graph = cudnn.offer_plans(replace(monetlite.trace(model, inputs), device="cuda"))

    def choose(index):
        items = graph.operators[index].implementations
        return next((at for at, item in enumerate(items) if item.name == PLANS[0]), 0)

    return schedule_of(free_profile(graph), recompute(graph, lambda _: True, choose))


@cache
def planned_block():
    """A schedule of `planned` for any `Block` and image of this size."""
    return planned(Block(), torch.randn(4, 3, 12, 12))


def chosen(graph, choices):
    """The implementations that choices name for the convolutions of a graph, by role."""
    return {
        role: {
            choices.implementations.get(operator.name, "default")
            for operator, of in convolutions(graph)
            if of == role
        }
        for role in ("forward", "input_gradient", "weight_gradient")
    }


class TestWhereThePlansAre:
    @pytest.mark.usefixtures("quiet")
    def test_they_become_implementations(self, frontend):
        graph = traced()
        choices = naming(graph, PLANS[1])
        found, unchanged = cudnn.with_named_plans(graph, choices)
        assert unchanged == choices
        for operator, _ in convolutions(found):
            assert [item.name for item in plans_of(operator)] == [PLANS[1]]
        assert cudnn.with_named_plans(found, choices) == (found, choices)
        offered = cudnn.offer_plans(graph)
        for operator, other in zip(found.operators, offered.operators, strict=True):
            assert set(operator.implementations) <= set(other.implementations)

    def test_each_is_looked_for_once(self, frontend):
        graph = traced()
        cudnn.with_named_plans(graph, naming(graph, PLANS[0]))
        assert len(frontend.graphs) == 11, "conv3 is conv2 again"

    @pytest.mark.usefixtures("quiet")
    def test_in_what_is_run_again_too(self, frontend):
        graph = traced()
        choices = Choices(before={"conv3.backward_weight": (("conv2", PLANS[0]), ("conv2", "default"))})
        found, unchanged = cudnn.with_named_plans(graph, choices)
        assert unchanged == choices
        assert [operator.name for operator, _ in convolutions(found) if plans_of(operator)] == ["conv2"]

    @pytest.mark.usefixtures("quiet")
    def test_a_schedule_without_plans_is_left_alone(self, frontend):
        graph, choices = traced(), Choices(implementations={"relu": "inplace"})
        assert cudnn.with_named_plans(graph, choices) == (graph, choices)
        assert not frontend.graphs

    @pytest.mark.usefixtures("quiet")
    def test_a_model_trains_by_them(self, frontend, monkeypatch):
        """cuDNN is a fake that computes on the CPU, where the model is."""
        model, image, schedule = Block(), torch.randn(4, 3, 12, 12), planned_block()
        runs = sum(
            how == PLANS[0]
            for how in (
                *schedule.choices.implementations.values(),
                *(how for runs in schedule.choices.before.values() for _, how in runs),
            )
        )

        def on_cuda(graph, choices):
            return cudnn.with_named_plans(replace(graph, device="cuda"), choices)

        monkeypatch.setattr(fitting, "with_named_plans", on_cuda)
        expected = step(twin(model), (image,))
        made = step(monetlite.MONeTWrapper(model, schedule), (image,))
        assert len(frontend.runs) == runs > 14
        assert {index for index, *_ in frontend.runs} == {1}
        for name, gradient in expected.gradients.items():
            torch.testing.assert_close(made.gradients[name], gradient, rtol=1e-3, atol=1e-4)

    @needs_cudnn
    @pytest.mark.usefixtures("quiet")
    def test_on_a_described_device(self):
        h100 = cudnn.properties_json("h100")
        graph = traced(shape=(32, 3, 64, 64))
        offered = cudnn.offer_plans(graph, h100)
        named = {operator.name: plans_of(operator)[-1].name for operator, _ in convolutions(offered)}
        choices = Choices(implementations=named)
        found, unchanged = cudnn.with_named_plans(graph, choices, h100)
        assert unchanged == choices
        for operator, _ in convolutions(found):
            assert plans_of(operator) == plans_of(offered.operators[offered.by_name[operator.name]])[-1:]


class TestWhereTheyAreNot:
    def replaced(self, graph, choices, **rest):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            found = cudnn.with_named_plans(graph, choices, **rest)
        [warning] = seen
        return *found, str(warning.message)

    @pytest.mark.parametrize(
        ("what", "message"),
        [
            ("on the CPU", "the model is on the cpu; solve a schedule for it there"),
            ("no frontend", 'not installed; pip install "monetlite[cudnn]"'),
            ("no GPU", "there is no GPU that torch can use"),
            (
                "another GPU",
                "cuDNN doesn't offer them for these shapes and settings on a fake GPU; solve again there",
            ),
            ("cuDNN fails", "CUDNN_STATUS_NOT_INITIALIZED"),
        ],
    )
    def test_others_that_read_the_same_run_and_one_warning_says_so(self, frontend, monkeypatch, what, message):
        graph, plan = traced(), PLANS[0]
        if what == "on the CPU":
            graph = replace(graph, device="cpu")
        elif what == "no frontend":
            monkeypatch.setattr(library, "problem", lambda: 'not installed; pip install "monetlite[cudnn]"')
        elif what == "no GPU":
            frontend.present = False
        elif what == "another GPU":
            plan = UNBUILT
        else:

            def refuse(device):
                raise CudnnError("CUDNN_STATUS_NOT_INITIALIZED")

            monkeypatch.setattr(library, "thread_handle", refuse)
        choices = naming(graph, plan)
        found, instead, warning = self.replaced(graph, choices)
        assert chosen(graph, instead) == {
            "forward": {"default"},
            "input_gradient": {"transposed_reordered" if graph.device == "cpu" else "transposed"},
            "weight_gradient": {"default"},
        }
        assert found == graph
        assert warning.startswith(
            f"14 operators don't run by the cuDNN plans that the schedule names, stem ({plan}"
        )
        assert warning.count(plan) == 3
        assert "and 11 more" in warning
        assert message in warning
        assert warning.count(message) == 1

    def test_some_of_them(self, frontend):
        graph = traced()
        choices = Choices(
            implementations={"conv1": PLANS[0], "conv2": UNBUILT, "bn1": "default"},
            before={"conv3.backward_weight": (("conv2", PLANS[0]), ("conv1", UNBUILT))},
        )
        found, instead, warning = self.replaced(graph, choices)
        assert instead == Choices(
            implementations={"conv1": PLANS[0], "conv2": "default", "bn1": "default"},
            before={"conv3.backward_weight": (("conv2", PLANS[0]), ("conv1", "default"))},
        )
        assert {operator.name for operator, _ in convolutions(found) if plans_of(operator)} == {"conv1", "conv2"}
        assert warning.startswith("2 operators")

    def test_a_schedule_for_a_gpu_trains_on_the_cpu(self, frontend):
        model, image, schedule = Block(), torch.randn(4, 3, 12, 12), planned_block()
        expected = step(twin(model), (image,))
        with pytest.warns(UserWarning, match="the model is on the cpu"):
            made = step(monetlite.MONeTWrapper(model, schedule), (image,))
        assert_same(made, expected)
        assert not frontend.runs

    def test_without_the_image_where_nothing_offered_does_without(self, frontend):
        """With a weight in channels-last, the transposed convolution is not offered: the image's layout will do."""
        model, image = Block().to(memory_format=torch.channels_last), torch.randn(4, 3, 12, 12)
        schedule = planned(model, image)
        graph = monetlite.trace(model, image)
        found, instead, _ = self.replaced(graph, schedule.choices)
        assert chosen(graph, instead)["input_gradient"] == {"transposed_reordered", "unread"}
        check_legal(found, instead.steps(found))
        expected = step(twin(model), (image,))
        with pytest.warns(UserWarning, match="the model is on the cpu"):
            made = step(monetlite.MONeTWrapper(copy.deepcopy(model), schedule), (image,))
        assert_same(made, expected)


class TestRefused:
    @pytest.mark.parametrize(
        "name",
        [
            "cudnn.",
            "cudnn.engine",
            "cudnn.engine1.k2",
            "cudnn.engine1.k2=",
            "cudnn.engine1.k2=4\n",
            "cudnn.engine١",
            "cudnn.engine1.k2=--1",
            "cudnn.engine12345678",
            "cudnn.engine1" + ".k2=4" * 65,
            "cudnn.engine1" + "0" * 10**6,
            "cudnn.../../../etc/passwd",
            "cudnn.engine1;import os",
            "cudnn.engine1 ",
            "cudnn.ENGINE1",
        ],
    )
    @pytest.mark.parametrize("again", [False, True])
    def test_what_is_not_the_name_of_a_plan(self, frontend, name, again):
        graph = traced()
        choices = (
            Choices(before={"loss": (("conv1", name),)}) if again else Choices(implementations={"conv1": name})
        )
        with pytest.raises(ScheduleMismatch, match="not the name of a cuDNN plan") as refused:
            cudnn.with_named_plans(graph, choices)
        assert len(str(refused.value)) < 500
        assert not frontend.graphs

    def test_in_a_file(self, tmp_path, frontend):
        model, image, schedule = Block(), torch.randn(4, 3, 12, 12), planned_block()
        schedule.save(tmp_path / "good.yaml")
        text = (tmp_path / "good.yaml").read_text()
        (tmp_path / "bad.yaml").write_text(text.replace(PLANS[0], "cudnn.$(touch x)"))
        frontend.graphs.clear()
        with pytest.raises(ScheduleMismatch, match=re.escape("'cudnn.$(touch x)', which is not the name")):
            step(monetlite.MONeTWrapper(model, tmp_path / "bad.yaml"), (image,))
        assert not frontend.graphs

    def test_a_plan_for_what_is_not_a_convolution(self, frontend):
        choices = Choices(implementations={"bn1": PLANS[0]})
        with pytest.raises(ScheduleMismatch, match=r"runs bn1 by the cuDNN plan .* not a convolution"):
            cudnn.with_named_plans(traced(), choices)

    def test_another_model_is_refused_as_such(self, frontend):
        schedule = planned_block()
        other = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
        with pytest.raises(ScheduleMismatch, match="the schedule was solved for Block"):
            step(monetlite.MONeTWrapper(other, schedule), (torch.randn(4, 3, 12, 12),))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@needs_cudnn
@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_model_trains_by_measured_plans_on_a_gpu(channels_last, tmp_path):
    model, image = Block(64).cuda(), torch.randn(16, 3, 64, 64, device="cuda")
    if channels_last:
        model, image = (item.to(memory_format=torch.channels_last) for item in (model, image))
    profile = monetlite.profile(monetlite.trace(model, image), "cuda")

    def choose(index):
        items = profile.graph.operators[index].implementations
        return max(at for at, item in enumerate(items) if at == 0 or cudnn.is_plan(item.name))

    schedule = schedule_of(profile, recompute(profile.graph, lambda _: True, choose))
    assert "cudnn." in str(schedule.choices)
    schedule.save(tmp_path / "s.yaml")
    expected = step(twin(model), (image,))
    made = step(monetlite.MONeTWrapper(model, tmp_path / "s.yaml"), (image,))
    for name, _ in model.named_parameters():
        gradient = expected.gradients[name]
        gap = (made.gradients[name] - gradient).abs().max() / gradient.abs().max()
        assert gap < 2e-2, name


def test_a_file_keeps_the_names_of_plans(tmp_path, frontend):
    schedule = planned_block()
    schedule.save(tmp_path / "s.yaml")
    assert monetlite.load_schedule(tmp_path / "s.yaml") == schedule
    assert f"conv2: {PLANS[0]}" in (tmp_path / "s.yaml").read_text()
