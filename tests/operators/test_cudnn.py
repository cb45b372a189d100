"""cuDNN's plans: enumerated from a description of a device, and run on a stand-in for cuDNN that has a CPU."""

import json
import re
import subprocess
import sys
import threading

import pytest
import torch
from fake_cudnn import PLANS, FakeGraph, install

from monetlite.core.devices import known_devices
from monetlite.core.errors import ConvolutionError, CudnnError, DeviceError, MonetliteError
from monetlite.operators import cudnn
from monetlite.operators.cudnn import library
from monetlite.operators.cudnn.convolution_parts import PLAN_NAME
from monetlite.operators.cudnn.work import ConvolutionWork

DEVICES = [name for name, device in known_devices().items() if device.cuda]
ROLES = ("forward", "input_gradient", "weight_gradient")
needs_cudnn = pytest.mark.skipif(not cudnn.available(), reason=f"no cuDNN to ask: {cudnn.problem()}")


def strides(shape, channels_last=False):
    order = [0, *range(2, len(shape)), 1] if channels_last else range(len(shape))
    result, step = [0] * len(shape), 1
    for dimension in reversed(list(order)):
        result[dimension], step = step, step * shape[dimension]
    return tuple(result)


def convolution(
    role="forward",
    image=(32, 64, 56, 56),
    weight=(64, 64, 3, 3),
    stride=1,
    padding=1,
    dilation=1,
    dtype="float32",
    channels_last=False,
    **rest,
):
    space = len(image) - 2
    made = [
        (size + 2 * padding - dilation * (window - 1) - 1) // stride + 1
        for size, window in zip(image[2:], weight[2:], strict=True)
    ]
    result = (image[0], weight[0], *made)
    tensors = {"image": image, "weight": weight, "result": result}
    layouts = {
        name: (shape, rest.pop(f"{name}_stride", strides(shape, channels_last))) for name, shape in tensors.items()
    }
    return ConvolutionWork(
        role=role,
        **layouts,
        dtype=dtype,
        stride=(stride,) * space,
        padding=(padding,) * space,
        dilation=(dilation,) * space,
        **rest,
    )


# ResNet-50's first layer, a 3 × 3 and a strided 1 × 1.
RESNET = (
    {"image": (32, 3, 224, 224), "weight": (64, 3, 7, 7), "stride": 2, "padding": 3},
    {"image": (32, 64, 56, 56), "weight": (64, 64, 3, 3)},
    {"image": (32, 256, 56, 56), "weight": (512, 256, 1, 1), "stride": 2, "padding": 0},
)


def enumerate_for(work, device="h100"):
    return cudnn.enumerate_plans(work, cudnn.properties_json(device))


def names(work, device="h100"):
    return [plan.name for plan in enumerate_for(work, device)]


class TestWork:
    def test_overlapping_empty_and_very_large_tensors_are_not_planned(self):
        assert convolution().plannable
        assert not convolution(image=(0, 64, 56, 56)).plannable
        assert not convolution(result_stride=(0, 0, 0, 0)).plannable
        assert not convolution(image=(16384, 64, 56, 56)).plannable


class TestProperties:
    def test_devices_are_those_that_can_be_estimated(self):
        for name in DEVICES:
            device, fields = known_devices()[name], json.loads(cudnn.properties_json(name))
            assert fields["totalGlobalMem"] == pytest.approx(device.memory_bytes, rel=0.1)
            assert divmod(fields["deviceVer"], 100) == (
                device.compute_capability[0],
                10 * device.compute_capability[1],
            )
            assert len(device.cuda) == 9
            assert all(value >= 0 for value in fields.values() if isinstance(value, int))

    def test_unknown_device(self):
        with pytest.raises(DeviceError, match=r"'p100' without having it; known: t4, .*h200"):
            cudnn.properties_json("p100")


class TestMissing:
    def test_without_the_frontend_the_error_says_what_to_install(self, monkeypatch):
        monkeypatch.setattr(library.importlib.util, "find_spec", lambda name: None)
        library.problem.cache_clear()
        try:
            assert not cudnn.available()
            with pytest.raises(MonetliteError, match=re.escape('pip install "monetlite[cudnn]"')):
                enumerate_for(convolution())
        finally:
            library.problem.cache_clear()


@needs_cudnn
class TestEnumeration:
    @pytest.mark.parametrize("role", ROLES)
    @pytest.mark.parametrize("dtype", ["float32", "float16"])
    def test_resnet_on_a_described_device(self, role, dtype):
        for shapes in RESNET:
            found = enumerate_for(convolution(role=role, dtype=dtype, **shapes))
            assert len(found) >= 2
            assert len({plan.name for plan in found}) == len(found)
            assert [plan.index for plan in found] == sorted({plan.index for plan in found})
            assert all(plan.workspace_bytes >= 0 for plan in found)
            assert min(plan.workspace_bytes for plan in found) < 2**20
            for plan in found:
                assert PLAN_NAME.fullmatch(plan.name)
                knobs = [int(item.split("=")[0]) for item in plan.name.split(".k")[1:]]
                assert knobs == sorted(knobs)

    def test_names_are_the_same_in_another_process(self):
        work = convolution(role="weight_gradient", tf32=True)
        script = (
            "from monetlite.operators import cudnn\n"
            "from monetlite.operators.cudnn.work import ConvolutionWork\n"
            f"for plan in cudnn.enumerate_plans({work!r}, cudnn.properties_json('h100')):\n"
            "    print(plan.name, plan.workspace_bytes)"
        )
        there = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        here = [f"{plan.name} {plan.workspace_bytes}" for plan in enumerate_for(work)]
        assert there.stdout.split("\n")[:-1] == here

    @pytest.mark.parametrize("role", ROLES)
    def test_strict_float32_leaves_out_tf32(self, role):
        strict, rounded = names(convolution(role=role)), names(convolution(role=role, tf32=True))
        assert strict
        assert set(strict) < set(rounded)

    def test_tf32_means_nothing_to_other_dtypes(self):
        assert names(convolution(dtype="bfloat16")) == names(convolution(dtype="bfloat16", tf32=True))

    @pytest.mark.parametrize("role", ["input_gradient", "weight_gradient"])
    def test_deterministic_leaves_out_what_is_not(self, role):
        work = {"role": role, "tf32": True}
        kept, everything = names(convolution(**work, deterministic=True)), names(convolution(**work))
        assert kept
        assert set(kept) < set(everything)

    @pytest.mark.parametrize("role", ROLES)
    def test_channels_last_saves_conversion_in_half_precision(self, role):
        contiguous = enumerate_for(convolution(role=role, dtype="float16"))
        channels_last = enumerate_for(convolution(role=role, dtype="float16", channels_last=True))
        assert channels_last[0].workspace_bytes < contiguous[0].workspace_bytes
        assert {(plan.name, plan.workspace_bytes) for plan in contiguous} != {
            (plan.name, plan.workspace_bytes) for plan in channels_last
        }

    @pytest.mark.parametrize(
        "shapes",
        [
            {"image": (8, 16, 200), "weight": (32, 16, 5)},
            {"image": (4, 16, 8, 20, 20), "weight": (32, 16, 3, 3, 3)},
            {"image": (8, 16, 20, 20), "weight": (32, 4, 3, 3), "groups": 4},
            {"image": (8, 16, 20, 20), "weight": (16, 1, 3, 3), "groups": 16},
            {"image": (8, 16, 20, 20), "weight": (32, 16, 3, 3), "dilation": 2, "padding": 2},
            {"image": (8, 16, 1, 1), "weight": (4, 16, 1, 1), "padding": 0},
        ],
        ids=["1d", "3d", "grouped", "depthwise", "dilated", "one pixel"],
    )
    def test_every_role_of_other_convolutions_has_plans(self, shapes):
        for role in ROLES:
            assert names(convolution(role=role, **shapes))

    def test_strides_of_dimensions_of_one_mean_nothing(self):
        shapes = {"image": (8, 64, 20, 20), "weight": (128, 64, 1, 1), "padding": 0, "channels_last": True}
        assert enumerate_for(convolution(**shapes)) == enumerate_for(
            convolution(**shapes, weight_stride=(64, 1, 1, 1))
        )

    def test_what_cudnn_cannot_do_has_no_plans(self):
        assert enumerate_for(convolution(result_stride=(0, 0, 0, 0))) == ()

    def test_devices_differ(self):
        assert len({tuple(names(convolution(dtype="float16"), device)) for device in DEVICES}) >= 4

    def test_a_plan_is_found_by_name(self):
        work, h100 = convolution(tf32=True), cudnn.properties_json("h100")
        plan = enumerate_for(work)[-1]
        _, found = cudnn.find_plan(work, plan.name, h100)
        assert found == plan
        assert cudnn.find_plan(work, "cudnn.engine9999", h100) is None

    def test_a_plan_that_is_not_allowed_is_not_found(self):
        allowed, strict = convolution(tf32=True), convolution()
        [*_, excluded] = set(names(allowed)) - set(names(strict))
        assert cudnn.find_plan(strict, excluded, cudnn.properties_json("h100")) is None

    def test_a_description_that_lacks_fields(self):
        with pytest.raises(CudnnError, match="can't read the description"):
            cudnn.enumerate_plans(convolution(), "{}")

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
    def test_no_device_and_no_description(self):
        with pytest.raises(DeviceError, match="no CUDA device"):
            cudnn.enumerate_plans(convolution())


@pytest.fixture
def frontend(monkeypatch):
    return install(monkeypatch)


PLAN = PLANS[0]


def operands(work):
    """Tensors as the work describes them, filled with random numbers."""
    dtype = getattr(torch, work.dtype)
    return [torch.empty_strided(*layout, dtype=dtype).normal_() for layout in work.operands]


def same_by_autograd(work, first, second):
    settings = (work.stride, work.padding, work.dilation, work.groups)
    functions = {1: torch.nn.functional.conv1d, 2: torch.nn.functional.conv2d}
    convolve = functions[len(work.stride)]
    if work.role == "forward":
        return convolve(first, second, None, *settings)
    if work.role == "input_gradient":
        image = torch.zeros(work.image[0], requires_grad=True)
        return torch.autograd.grad(convolve(image, second, None, *settings), image, first)[0]
    weight = torch.zeros(work.weight[0], requires_grad=True)
    return torch.autograd.grad(convolve(first, weight, None, *settings), weight, second)[0]


TILES = ("tile 4", "tile 6", "tile 13")


class TestRun:
    @pytest.mark.parametrize("role", ROLES)
    @pytest.mark.parametrize("channels_last", [False, True])
    def test_operands_reach_cudnn_in_order(self, frontend, role, channels_last):
        work = convolution(
            role, image=(3, 4, 8, 7), weight=(6, 4, 3, 2), stride=2, padding=1, channels_last=channels_last
        )
        first, second = operands(work)
        made = cudnn.run_plan(work, PLAN, first, second)
        assert (tuple(made.shape), made.stride()) == work.made
        torch.testing.assert_close(made, same_by_autograd(work, first, second))

    @pytest.mark.parametrize("role", ROLES)
    def test_one_dimension_of_space(self, frontend, role, monkeypatch):
        monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
        work = convolution(role, image=(3, 4, 9), weight=(5, 4, 3), stride=2)
        first, second = operands(work)
        made = cudnn.run_plan(work, PLAN, first, second)
        assert tuple(made.shape) == work.made[0]
        torch.testing.assert_close(made, same_by_autograd(work, first, second))

    def test_the_named_plan_runs_on_the_current_stream_with_its_workspace(self, frontend, monkeypatch):
        sizes = []
        empty = torch.empty

        def recording(size, **rest):
            sizes.append((size, rest["dtype"]))
            return empty(size, **rest)

        work = convolution(image=(1, 2, 4, 4), weight=(2, 2, 3, 3))
        tensors = operands(work)
        monkeypatch.setattr(torch, "empty", recording)
        cudnn.run_plan(work, PLAN, *tensors)
        [(index, handle, stream, workspace)] = frontend.runs
        assert (index, stream, sizes) == (1, 7, [(100, torch.uint8)])
        assert handle == frontend.handles[0] == frontend.graphs[0].handle
        assert workspace

    def test_a_plan_is_built_once_for_each_work(self, frontend):
        small, large = (convolution(image=(size, 2, 4, 4), weight=(2, 2, 3, 3)) for size in (1, 2))
        for work in (small, large, small, large):
            cudnn.run_plan(work, PLAN, *operands(work))
        assert [graph.built for graph in frontend.graphs] == [[1], [1]]
        cudnn.run_plan(small, "cudnn.engine0", *operands(small))
        assert frontend.graphs[2].built == [2]
        cudnn.forget_plans()
        cudnn.run_plan(small, PLAN, *operands(small))
        assert len(frontend.graphs) == 4
        assert len(frontend.handles) == 1

    def test_every_thread_has_its_own_handle_and_plans(self, frontend):
        work = convolution(image=(1, 2, 4, 4), weight=(2, 2, 3, 3))
        tensors = operands(work)
        cudnn.run_plan(work, PLAN, *tensors)
        thread = threading.Thread(target=cudnn.run_plan, args=(work, PLAN, *tensors))
        thread.start()
        thread.join()
        assert len(frontend.runs) == len(frontend.graphs) == len(set(frontend.handles)) == 2

    def test_a_plan_that_the_device_has_not(self, frontend):
        work = convolution(image=(1, 2, 4, 4), weight=(2, 2, 3, 3))
        for name in ("cudnn.engine7.k2=1", "cudnn.engine8"):
            with pytest.raises(DeviceError, match=f"no plan {re.escape(name)} on cuda:0"):
                cudnn.run_plan(work, name, *operands(work))

    def test_tensors_must_be_what_was_planned_for(self, frontend):
        work = convolution(image=(1, 2, 4, 4), weight=(2, 2, 3, 3))
        image, weight = operands(work)
        for pair in ((image[:, :, 1:], weight), (image.half(), weight)):
            with pytest.raises(ConvolutionError, match="and the plan is for"):
                cudnn.run_plan(work, PLAN, *pair)

    @pytest.mark.parametrize("kind", [RuntimeError, ValueError, TypeError])
    def test_whatever_the_frontend_raises_names_the_plan(self, frontend, monkeypatch, kind):
        work = convolution(image=(1, 2, 4, 4), weight=(2, 2, 3, 3))

        def fail(*_, **__):
            raise kind("incompatible function arguments")

        monkeypatch.setattr(FakeGraph, "execute_plan_at_index", fail)
        with pytest.raises(CudnnError, match=rf"{re.escape(PLAN)} failed on cuda:0.*incompatible"):
            cudnn.run_plan(work, PLAN, *operands(work))

    def test_only_cuda_tensors_run(self):
        work = convolution(image=(1, 2, 4, 4), weight=(2, 2, 3, 3))
        with pytest.raises(DeviceError, match="cpu and cpu"):
            cudnn.run_plan(work, PLAN, *operands(work))

    @pytest.mark.parametrize(
        ("settings", "unwanted"),
        [
            ({}, [["reduced", *TILES, "down", "tensor core"]]),
            ({"tf32": True}, [["reduced", "down"]]),
            ({"tf32": True, "deterministic": True}, [["reduced", "nondeterministic", "down"]]),
            ({"dtype": "bfloat16", "tf32": True}, [["reduced", *TILES]]),
        ],
    )
    def test_what_is_deselected(self, frontend, settings, unwanted):
        cudnn.enumerate_plans(convolution(**settings))
        assert frontend.deselected == unwanted


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@needs_cudnn
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("channels_last", [False, True])
def test_every_plan_agrees_with_autograd_on_a_gpu(role, channels_last):
    work = convolution(role, image=(4, 16, 20, 18), weight=(32, 16, 3, 3), stride=2, channels_last=channels_last)
    first, second = operands(work)
    expected = same_by_autograd(work, first, second)
    found = cudnn.enumerate_plans(work)
    assert found
    for plan in found:
        made = cudnn.run_plan(work, plan.name, first.cuda(), second.cuda())
        torch.testing.assert_close(made.cpu(), expected, rtol=1e-3, atol=1e-3, msg=plan.name)
