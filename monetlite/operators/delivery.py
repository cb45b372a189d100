"""Where gradients are handed over to autograd while the backward pass goes on (`monetlite.runtime.delivery`)."""

import torch
from torch.fx.node import has_side_effect

from monetlite.operators.registry import function


@function("deliver", passes=0.0)
def deliver(*gradients: torch.Tensor) -> None:
    """Marks, in a backward program, where some of its results are final. Does nothing when it is run."""


has_side_effect(deliver)
