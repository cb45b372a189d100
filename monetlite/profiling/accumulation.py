"""What gradient accumulation adds to a step: the gradients of earlier batches, all the time."""

from dataclasses import replace

from monetlite.core.costs import Profile
from monetlite.core.graph import DELIVERY, OPTIMIZER_STEP, ValueKind


def with_accumulation(profile: Profile) -> Profile:
    """Count gradients that are in memory when the step begins, to which the step's own are added.

    A step's own gradient is then there only from when it is computed until it is handed over to autograd, which
    adds it up without a copy.
    """
    graph = profile.graph
    gradients = {index for index, value in enumerate(graph.values) if value.kind is ValueKind.PARAM_GRAD}
    copies = {value for operator in graph.operators if operator.family == DELIVERY for value in operator.writes}
    values = tuple(
        replace(value, kind=ValueKind.GRADIENT, size_bytes=0 if index in copies else value.size_bytes)
        if index in gradients
        else value
        for index, value in enumerate(graph.values)
    )
    operators = tuple(
        replace(
            operator,
            implementations=tuple(
                replace(item, reads=tuple(value for value in item.reads if value not in gradients))
                for item in operator.implementations
            ),
        )
        if operator.family == OPTIMIZER_STEP
        else operator
        for operator in graph.operators
    )
    kept = sum(graph.values[index].size_bytes for index in gradients)
    return replace(
        profile,
        graph=replace(graph, values=values, operators=operators, resident=replace(graph.resident, gradients=kept)),
        accumulate=True,
    )
