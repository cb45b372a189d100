"""Where gradients are handed to autograd while the backward pass goes on (`runtime.gradient_delivery`)."""

import torch
from torch.fx.node import has_side_effect

from monetlite.operators.registry import function


@function("deliver", passes=0.0)
def deliver(*gradients: torch.Tensor) -> None:
    """Marks, in a backward program, where some of its results are final. Does nothing when it is run."""


has_side_effect(deliver)
