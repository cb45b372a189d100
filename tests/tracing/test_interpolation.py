"""Interpolation of images whose size varies: one capture, plain training's results, the graph of known sizes."""

import contextlib

import pytest
import torch
from small_models import assert_same, step, twin
from thoroughness import often
from torch import nn
from torch.nn import functional as F

import monetlite
from monetlite.fx.torch_internals.torch_dispatch import decomposition_table
from monetlite.runtime.step_plans import StepPlans
from monetlite.runtime.varying_plans import VaryingPlans
from monetlite.tracing import whole_kernels
from monetlite.tracing.interpolation import interpolated_to_any_size
from monetlite.tracing.whole_kernels import kernels_kept_whole

PLANNING = {"budget": "200%", "device": "rtx-4090", "time_limit": 1}
SIZES = ((16, 20), (24, 12), (18, 30), (40, 22), (12, 36))
OPERATORS = (
    *("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d"),
    *("upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
    *(f"_upsample_nearest_exact{dimensions}d" for dimensions in (1, 2, 3)),
)
ORDERS = {4: torch.channels_last, 5: torch.channels_last_3d}


class Upsampling(nn.Module):
    """Two resolutions of an image, one of which is brought to the size of the other."""

    def __init__(self, mode, target, **options):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.options = {"mode": mode, **options}
        self.target = target

    def forward(self, x):
        fine = self.first(x)
        coarse = self.second(fine).relu()
        target = {"twice": {"scale_factor": 2}, "as fine": {"size": fine.shape[-2:]}, "fixed": {"size": (9, 7)}}
        target["half more"] = {"scale_factor": 1.5}
        return F.interpolate(coarse, **target[self.target], **self.options).square().mean() + fine.square().mean()


MODELS = {
    "nearest, twice": ("nearest", "twice", {}),
    "nearest, half more": ("nearest", "half more", {}),
    "bilinear, as fine": ("bilinear", "as fine", {}),
    "bilinear with corners, twice": ("bilinear", "twice", {"align_corners": True}),
    "bilinear of averages, fixed": ("bilinear", "fixed", {"antialias": True}),
    "bicubic, as fine": ("bicubic", "as fine", {}),
    "nearest exactly, half more": ("nearest-exact", "half more", {}),
}


@pytest.mark.parametrize("name", often(MODELS, "bilinear, as fine"))
def test_one_capture_serves_all_sizes(name, monkeypatch):
    mode, target, options = MODELS[name]
    captured, plan = [], StepPlans.plan

    def noted(self, joint):
        captured.append(joint)
        return plan(self, joint)

    monkeypatch.setattr(StepPlans, "plan", noted)
    plain = Upsampling(mode, target, **options)
    planned = monetlite.within(twin(plain), **PLANNING)
    for size in SIZES:
        x = torch.randn(2, 3, *size)
        assert_same(step(planned, (x,)), step(plain, (x,)))
    assert len(captured) == 2


@pytest.mark.parametrize("name", often(MODELS, *list(MODELS)[::2]))
def test_the_graph_of_known_sizes_is_the_one_that_pytorch_s_own_function_makes(name, monkeypatch):
    mode, target, options = MODELS[name]
    model, x = Upsampling(mode, target, **options), torch.randn(2, 3, 16, 21)
    found = monetlite.trace(model, x)
    monkeypatch.setattr(whole_kernels, "interpolated_to_any_size", lambda _: contextlib.nullcontext())
    assert found.fingerprint == monetlite.trace(model, x).fingerprint


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("last", [False, True])
def test_fake_gradients_are_laid_out_as_the_kernel_does_it(name, last):
    dimensions = int(name.removesuffix("_aa")[-2])
    operator = getattr(torch.ops.aten, f"{name}_backward").default
    gradient = torch.randn(2, 3, *[8] * dimensions)
    if last and gradient.dim() in ORDERS:
        gradient = gradient.to(memory_format=ORDERS[gradient.dim()])
    corners = [] if "nearest" in name else [False]
    sizes = [8] * dimensions, [2, 3, *[4] * dimensions]
    expected = operator(gradient, *sizes, *corners, *[None] * dimensions)
    with kernels_kept_whole():
        faked = decomposition_table[operator](gradient, *sizes, *corners, *[None] * dimensions)
    assert faked.shape == expected.shape
    assert faked.stride() == expected.stride()


def test_torch_is_as_it_was_afterwards():
    operator = torch.ops.aten.upsample_nearest2d.vec
    before = dict(operator.py_kernels)
    with interpolated_to_any_size(whole_kernels._KEYS):
        assert operator.py_kernels != before
    assert operator.py_kernels == before


@pytest.mark.thorough
def test_where_no_plan_is_found_for_the_largest_images_one_is_for_somewhat_larger_ones(monkeypatch):
    """The size at which plain training fits is an estimate."""
    monkeypatch.setattr(
        VaryingPlans, "_plain_limits", lambda _, __, sizes, ___: tuple(100 * size for size in sizes)
    )
    model = monetlite.MONeTWrapper(Upsampling("nearest", "twice"), **{**PLANNING, "budget": 600_000})
    for size in SIZES[:3]:
        model(torch.randn(2, 3, *size)).backward()
    (captured,) = model._training.plans.varying.steps
    assert [version.limits for version in captured.versions] == [(32, 16), (32, 32)]
