"""cuDNN's plans as implementations: where they are offered, what they read and promise, and what they compute."""

from dataclasses import replace

import pytest
import torch
from cudnn_graphs import Block, convolutions, plans_of, traced
from fake_cudnn import PLANS, install
from harness import Captured
from thoroughness import often
from torch import nn

from monetlite.core.devices import find_device
from monetlite.core.graph import TensorRef
from monetlite.fx.call_encoding import decode_argument
from monetlite.operators import cudnn
from monetlite.operators.cudnn import library
from monetlite.operators.cudnn.convolution_parts import PLAN_NAME, cudnn_convolution
from monetlite.operators.cudnn.execution_plans import ExecutionPlan
from monetlite.operators.cudnn.offers import ranked
from monetlite.profiling.estimate import estimate_call

needs_cudnn = pytest.mark.skipif(not cudnn.available(), reason=f"no cuDNN to ask: {cudnn.problem()}")


@pytest.fixture
def frontend(monkeypatch):
    return install(monkeypatch)


@pytest.fixture
def _strict(monkeypatch):
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


def offered_names(graph):
    return {operator.name: [item.name for item in plans_of(operator)] for operator, _ in convolutions(graph)}


def works(graph):
    return {
        operator.name: plans_of(operator)[0].call.args[4]
        for operator, _ in convolutions(graph)
        if plans_of(operator)
    }


def assert_as_promised(graph):
    """Plans read what their arguments are, write what the default writes, and are for CUDA."""
    for operator, role in convolutions(graph):
        default = operator.implementations[0]
        assert not default.name.startswith("cudnn.")
        for item in plans_of(operator):
            assert PLAN_NAME.fullmatch(item.name)
            tensors = list(item.call.tensors())
            assert set(item.reads) == {ref.value for ref in tensors if ref.value is not None} <= set(default.reads)
            assert (item.writes, item.call.outputs) == (default.writes, default.call.outputs)
            assert (item.devices, item.overwrites, item.guard) == (("cuda",), (), None)
            defaults = [arg for arg in default.call.args if isinstance(arg, TensorRef)]
            kept = {"forward": defaults, "input_gradient": [defaults[0], defaults[-1]]}
            assert tensors == kept.get(role, [defaults[1], defaults[0]] if role == "weight_gradient" else None)


@needs_cudnn
class TestDescribed:
    """On an H100 that is described, not there."""

    def offer(self, *args, **rest):
        return cudnn.offer_plans(traced(*args, **rest), cudnn.properties_json("h100"))

    @pytest.mark.parametrize(
        ("dtype", "layout"),
        [
            (torch.float32, "as_traced"),
            (torch.float32, "channels_last"),
            (torch.float16, "channels_last"),
            (torch.bfloat16, "as_traced"),
        ],
    )
    def test_every_convolution_of_a_residual_block_has_plans(self, dtype, layout):
        graph = self.offer(shape=(32, 3, 64, 64), dtype=dtype, layout=layout)
        names = offered_names(graph)
        # conv1, conv2, conv3 and down, forward and two gradients each, and the first, whose image needs none.
        assert len(names) == 5 + 5 + 4
        assert all(names.values())
        assert_as_promised(graph)
        assert names["conv2"] == names["conv3"]

    def test_what_is_offered_is_what_cudnn_lists_for_the_work(self):
        graph = self.offer(shape=(32, 3, 64, 64))
        for operator, role in convolutions(graph):
            work = works(graph)[operator.name]
            assert work.role == role
            listed = [plan.name for plan in cudnn.enumerate_plans(work, cudnn.properties_json("h100"))]
            offered = [item.name for item in plans_of(operator)]
            assert offered == [name for name in listed if name in offered]
            assert 1 <= len(offered) <= 20

    @pytest.mark.usefixtures("_strict")
    def test_strict_float32_is_within_reordered_sums(self):
        graph = self.offer(shape=(32, 3, 64, 64))
        assert {item.tolerance for operator, _ in convolutions(graph) for item in plans_of(operator)} == {1e-5}
        assert not any(work.tf32 for work in works(graph).values())

    def test_a_shape_that_is_not_planned_has_none(self):
        graph = self.offer(lambda: nn.Conv2d(4, 6, 3, dtype=torch.float64), (2, 4, 8, 8), dtype=torch.float64)
        assert not any(offered_names(graph).values())


TOLERANCES = [(torch.float32, 2e-3), (torch.float16, 2e-3), (torch.bfloat16, 1e-2)]


class TestFake:
    def test_convolutions_have_the_plans_that_can_be_built(self, frontend):
        graph = cudnn.offer_plans(traced())
        assert set(map(tuple, offered_names(graph).values())) == {PLANS}
        assert_as_promised(graph)
        assert graph.fingerprint == traced().fingerprint

    def test_an_input_gradient_does_not_keep_the_image(self, frontend):
        graph = cudnn.offer_plans(traced())
        for operator, role in convolutions(graph):
            if role == "input_gradient":
                image = operator.implementations[0].call.args[1].value
                assert image in operator.implementations[0].reads
                assert all(image not in item.reads for item in plans_of(operator))

    def test_the_same_work_is_enumerated_once(self, frontend):
        graph = cudnn.offer_plans(traced())
        distinct = set(works(graph).values())
        assert len(frontend.graphs) == len(distinct) == 3 + 3 + 3 + 2, "conv3 is conv2 again"

    def test_offering_twice_adds_nothing(self, frontend):
        graph = cudnn.offer_plans(traced())
        assert cudnn.offer_plans(graph) == graph

    @pytest.mark.parametrize(("dtype", "tolerance"), often(TOLERANCES, *TOLERANCES[1:]))
    def test_tolerances(self, frontend, dtype, tolerance):
        graph = cudnn.offer_plans(traced(dtype=dtype))
        found = {item.tolerance for operator, _ in convolutions(graph) for item in plans_of(operator)}
        assert found == {tolerance}

    def test_settings_are_part_of_the_work(self, frontend, monkeypatch):
        monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
        work = next(iter(works(cudnn.offer_plans(traced())).values()))
        assert work.deterministic
        assert work.tf32

    def test_layouts_are_the_default_results(self, frontend):
        for layout in ("as_traced", "channels_last"):
            for name, work in works(cudnn.offer_plans(traced(layout=layout))).items():
                for shape, stride in (work.image, work.result):
                    if 1 not in shape:
                        assert (stride[1] == 1) == (layout == "channels_last"), name
                if work.role == "weight_gradient" and 1 not in work.weight[0]:
                    assert (work.weight[1][1] == 1) == (layout == "channels_last"), name

    @pytest.mark.parametrize(
        "model",
        [
            lambda: nn.ConvTranspose2d(3, 4, 3),
            lambda: nn.Conv2d(3, 4, 3, dtype=torch.float64),
            lambda: nn.Sequential(nn.Linear(16, 8), nn.ReLU()),
        ],
        ids=["transposed", "float64", "no convolution"],
    )
    def test_others_have_none(self, frontend, model):
        dtype = next(model().parameters()).dtype
        graph = traced(model, dtype=dtype)
        assert cudnn.offer_plans(graph) == graph

    def test_views_that_may_be_unaligned_have_none(self, frontend):
        class Split(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second, self.whole = (nn.Conv2d(3, 6, 1), nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1))

            def forward(self, x):
                y = self.first(x)
                return self.second(y[:, 3:]).sum() + (self.whole(y[:, :3].contiguous()) * 2).relu().square().sum()

        names = offered_names(cudnn.offer_plans(traced(Split, (4, 3, 5, 5))))
        assert not names["second"]
        assert not names["second.backward_weight"]
        assert not names["second.backward_input"], "its gradient is one number, expanded"
        assert names["whole"]
        assert names["first"]

    @pytest.mark.parametrize("what", ["on the CPU", "no frontend", "no GPU", "cuDNN switched off"])
    def test_nothing_is_offered(self, frontend, monkeypatch, what):
        graph = traced()
        if what == "on the CPU":
            graph = replace(graph, device="cpu")
        elif what == "no frontend":
            monkeypatch.setattr(library, "problem", lambda: "not installed")
        elif what == "no GPU":
            frontend.present = False
        else:
            monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
        assert cudnn.offer_plans(graph) is graph
        assert not frontend.graphs

    def test_work_that_cudnn_refuses_has_none(self, frontend, monkeypatch, caplog):
        def refuse(self):
            raise RuntimeError("CUDNN_STATUS_BAD_PARAM")

        monkeypatch.setattr("fake_cudnn.FakeGraph.validate", refuse)
        assert not any(offered_names(cudnn.offer_plans(traced())).values())
        assert "CUDNN_STATUS_BAD_PARAM" in caplog.text

    def test_a_plan_is_estimated_as_the_convolution_that_it_does(self, frontend):
        device = find_device("h100")
        for layout in ("as_traced", "channels_last"):
            graph = cudnn.offer_plans(traced(shape=(64, 3, 96, 96), layout=layout))
            for operator, _ in convolutions(graph):
                default, *_, plan = operator.implementations
                written_bytes = sum(graph.values[value].size_bytes for value in default.writes)
                costs = [estimate_call(item.call, device, written_bytes) for item in (default, plan)]
                assert costs[1].latency_ms == pytest.approx(costs[0].latency_ms, rel=1e-3), operator.name

    def test_work_survives_being_arguments(self, frontend):
        """Nothing is read again in each step, and the plan is found by it."""
        for work in works(cudnn.offer_plans(traced())).values():
            assert decode_argument((work,), lambda ref: ref)[0] is work


def plan(name, workspace_bytes):
    return ExecutionPlan(name=name, workspace_bytes=workspace_bytes, index=0)


def test_of_plans_with_as_much_workspace_the_favourites_are_measured():
    found = [plan("a", 9), plan("b", 9), plan("c", 5), plan("d", 9), plan("e", 9), plan("f", 5), plan("g", 0)]
    found += [plan("h", 5), plan("i", 7), plan("j", 5), plan("k", 4)]
    assert "".join(item.name for item in ranked(found)) == "abcdfghk"
    assert ranked([]) == ()


MODULES = {
    "block": (Block, (4, 3, 12, 10)),
    "grouped, with bias": (lambda: nn.Conv2d(4, 8, 3, groups=2, padding=2, dilation=2), (3, 4, 9, 8)),
    "depthwise": (lambda: nn.Sequential(nn.Conv2d(3, 6, 1), nn.Conv2d(6, 6, 3, groups=6)), (2, 3, 8, 8)),
    "1d": (lambda: nn.Sequential(nn.Conv1d(3, 6, 3), nn.Conv1d(6, 4, 3, stride=2)), (2, 3, 17)),
    "odd stride": (lambda: nn.Sequential(nn.Conv2d(3, 6, 1), nn.Conv2d(6, 4, 2, stride=3)), (2, 3, 9, 10)),
}


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_offered_implementations_compute_what_the_default_does(frontend, name, channels_last, monkeypatch):
    """In the same layout, from what they say they read and nothing else (`harness`)."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", name != "1d")
    model, shape = MODULES[name]
    model, image = model(), torch.randn(shape)
    if channels_last and len(shape) == 4:
        model, image = (item.to(memory_format=torch.channels_last) for item in (model, image))
    bench = Captured(model, image.requires_grad_())
    graph = cudnn.offer_plans(replace(bench.traced.graph, device="cuda"))
    operators = [
        replace(
            operator,
            implementations=tuple(
                replace(item, devices=()) if item.name.startswith("cudnn.") else item
                for item in operator.implementations
            ),
        )
        for operator in graph.operators
    ]
    assert all(plans_of(operator) for operator, _ in convolutions(graph))
    bench.traced = replace(bench.traced, graph=replace(graph, operators=tuple(operators)))
    seen = bench.check(lambda spec: torch.empty_strided(spec.shape, spec.stride).normal_())
    assert {name for _, name in seen.compared} >= set(PLANS)
    assert len(frontend.runs) == sum(len(plans_of(operator)) for operator in operators)


def test_an_operand_that_is_not_as_captured_is_copied(frontend):
    part = works(cudnn.offer_plans(traced()))["conv2"]
    image, weight = (torch.randn(layout[0]) for layout in part.operands)
    (expected,) = cudnn_convolution(PLANS[0], image, weight, None, part)
    unaligned = torch.empty(image.numel() + 1)[1:].view(image.shape).copy_(image)
    for other in (image.to(memory_format=torch.channels_last), unaligned):
        with pytest.warns(UserWarning, match="copied at every step"):
            (made,) = cudnn_convolution(PLANS[0], other, weight, None, part)
        assert torch.equal(made, expected)


def test_plans_are_listed_with_the_knobs_of_the_index_they_run_by(frontend):
    assert cudnn.find_plan(works(cudnn.offer_plans(traced()))["conv2"], PLANS[1])[1].index == 2
