"""What a schedule doesn't know of: a loss that is computed outside of the model."""

from monetlite.core.graph import OperatorGraph, ValueKind
from monetlite.core.units import format_bytes

NOTEWORTHY = 0.02
"""The share of a budget that a model's outputs take where a loss of them may break the budget: what predictions are
held to."""


_LEAST_BYTES = 2**18
"""Nobody minds less."""


def unplanned_loss(graph: OperatorGraph, budget_bytes: int) -> str:
    """What to know of the loss where a model returns much of the budget to compute one of; empty where it doesn't.

    A model that returns its loss is captured with it, and returns one number to differentiate.
    """
    outputs_bytes = sum(value.size_bytes for value in graph.values if value.kind is ValueKind.TANGENT)
    if outputs_bytes < max(_LEAST_BYTES, NOTEWORTHY * budget_bytes):
        return ""
    return (
        f"what a loss of the model's outputs ({format_bytes(outputs_bytes)}) keeps and takes is not counted "
        "(cross-entropy: as much once or twice more); a model that returns its loss has it planned"
    )
