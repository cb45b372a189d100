"""Guards: whether an implementation's promise holds for the weights of this step, checked when it begins."""

import torch

from monetlite.operators.registry import function


class GuardFailed(Exception):
    """Weights that some operators' implementations can't be run with; nothing of the step has run yet.

    Attributes:
        operators: their names.
    """

    def __init__(self, operators: list[str]) -> None:
        super().__init__(", ".join(operators))
        self.operators = operators


@function("require")
def require(operators: list[str], *holds: torch.Tensor) -> None:
    """Raise `GuardFailed` with the operators whose guard, a 0-d bool tensor each, doesn't hold."""
    if not all(found := torch.stack(holds).tolist()):
        raise GuardFailed([name for name, held in zip(operators, found, strict=True) if not held])
