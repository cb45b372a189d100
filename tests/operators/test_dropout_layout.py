"""Gradients that a CPU's dropout makes are captured in the strides that they have."""

import pytest
import torch

from monetlite.fx.torch_internals.torch_dispatch import FakeTensorMode
from monetlite.tracing.whole_kernels import kernels_kept_whole


@pytest.mark.parametrize("turned", [(0, 2, 1), (2, 0, 1), (0, 1, 2)])
def test_strides_are_those_of_the_gradient_that_is_read(turned):
    gradient, mask = torch.randn(4, 6, 8).permute(turned), torch.rand(4, 6, 8).permute(turned).contiguous() > 0.5
    real = torch.ops.aten.native_dropout_backward(gradient, mask, 2.0)
    mode = FakeTensorMode()
    with kernels_kept_whole(), mode:
        fake = torch.ops.aten.native_dropout_backward(mode.from_tensor(gradient), mode.from_tensor(mask), 2.0)
    assert fake.stride() == real.stride()
