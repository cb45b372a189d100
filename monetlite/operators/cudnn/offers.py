"""Offering cuDNN's plans to a graph, and finding those that a schedule names on the machine that it runs on."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

import torch

from monetlite.core.announcing import warn
from monetlite.core.choices import Choices, Run
from monetlite.core.errors import CudnnError, ScheduleMismatch
from monetlite.core.graph import Implementation, Operator, OperatorGraph
from monetlite.operators.cudnn import execution_plans, library
from monetlite.operators.cudnn.convolution_parts import PLAN_NAME, ConvolutionPart, is_plan, layouts_of, part_of
from monetlite.operators.cudnn.execution_plans import ExecutionPlan
from monetlite.operators.cudnn.work import ConvolutionWork

MAX_BETTER_RANKED = 4
"""A plan is not offered if so many that cuDNN ranks before it need no more workspace. cuDNN lists some forty for a
convolution on tensor cores, and all that are offered are measured."""

_log = logging.getLogger(__name__)


def offer_plans(graph: OperatorGraph, device_properties: str | None = None) -> OperatorGraph:
    """The same graph, with cuDNN's plans among the implementations of its convolutions.

    The plans are for the current CUDA device, or for a described one (`properties_json`). A graph that was not
    traced on CUDA comes back as it is, and so does any where cuDNN's frontend can't be used.
    """
    present = torch.cuda.is_available() and torch.backends.cudnn.enabled
    if graph.device != "cuda" or not (present or device_properties) or not library.available():
        return graph
    layouts = layouts_of(graph)
    known: dict[ConvolutionWork, tuple[ExecutionPlan, ...]] = {}

    def offered(operator: Operator) -> Operator:
        part = part_of(graph, operator, layouts)
        if part is None:
            return operator
        if part.work not in known:
            known[part.work] = _enumerated(part.work, device_properties)
        found = [part.implementation(plan.name) for plan in known[part.work] if operator.find(plan.name) is None]
        return replace(operator, implementations=(*operator.implementations, *found))

    return replace(graph, operators=tuple(map(offered, graph.operators)))


def _enumerated(work: ConvolutionWork, device_properties: str | None) -> tuple[ExecutionPlan, ...]:
    try:
        return ranked(execution_plans.enumerate_plans(work, device_properties))
    except CudnnError as error:
        _log.warning("no cuDNN plans are offered for a convolution: %s", error)
        return ()


def ranked(found: Sequence[ExecutionPlan]) -> tuple[ExecutionPlan, ...]:
    """Of plans in cuDNN's order, those that are worth measuring."""
    return tuple(
        plan
        for at, plan in enumerate(found)
        if sum(other.workspace_bytes <= plan.workspace_bytes for other in found[:at]) < MAX_BETTER_RANKED
    )


def with_named_plans(
    graph: OperatorGraph, choices: Choices, device_properties: str | None = None
) -> tuple[OperatorGraph, Choices]:
    """The same graph and choices, with the plans that the choices name among the graph's implementations.

    Where there is no plan of that name (another GPU or version of cuDNN, another shape, no cuDNN, a graph on the
    CPU), an implementation that reads and writes the same values is chosen in its place, and one warning says so
    for all of them.

    Raises:
        ScheduleMismatch: a name that begins like a plan's and is not one, or a plan for an operator that is not a
            convolution which plans can do; names the operator. Operators that the graph does not have are left for
            `Choices.steps` to refuse.
    """
    runs = [*choices.implementations.items(), *chain.from_iterable(choices.before.values())]
    wanted = dict.fromkeys(run for run in runs if is_plan(run[1]))
    if not wanted:
        return graph, choices
    for operator_name, plan_name in wanted:
        if PLAN_NAME.fullmatch(plan_name) is None:
            raise ScheduleMismatch(
                f"the schedule runs {operator_name:.200} as {plan_name!r:.80}, which is not the name of a cuDNN "
                "plan; such names read cudnn.engine11.k2=4.k12=-1. Get the schedule file again, or solve it again"
            )
    layouts, missing = layouts_of(graph), _missing(graph, device_properties)
    reasons: dict[tuple[ConvolutionWork, str], str | None] = {}
    operators = list(graph.operators)
    taken: dict[Run, str] = {}
    for operator_name, plan_name in wanted:
        index = graph.by_name.get(operator_name)
        if index is None or operators[index].find(plan_name) is not None:
            continue
        operator, part = operators[index], part_of(graph, operators[index], layouts)
        if part is None:
            raise ScheduleMismatch(
                f"the schedule runs {operator.name} by the cuDNN plan {plan_name}, but here that is not a "
                "convolution that plans can do; solve the schedule again for this model"
            )
        key = (part.work, plan_name)
        if key not in reasons:
            reasons[key] = missing or _problem(*key, device_properties)
        found = part.implementation(plan_name)
        if reasons[key] is not None:
            found = _instead(graph.device, operator, part, found)
            taken[operator_name, plan_name] = found.name
        if found not in operator.implementations:
            operators[index] = replace(operator, implementations=(*operator.implementations, found))
    if taken:
        warn(_replaced(taken, dict.fromkeys(filter(None, reasons.values()))))
    return replace(graph, operators=tuple(operators)), _renamed(choices, taken)


def _missing(graph: OperatorGraph, device_properties: str | None) -> str | None:
    """The reason why no plan can run; None if there is none."""
    if graph.device != "cuda":
        return f"they run on a GPU, and the model is on the {graph.device}; solve a schedule for it there"
    if (problem := library.problem()) is not None:
        return problem
    if device_properties is None and not torch.cuda.is_available():
        return "there is no GPU that torch can use; solve a schedule for this machine"
    return None


def _problem(work: ConvolutionWork, plan_name: str, device_properties: str | None) -> str | None:
    """The reason why a plan can't run; None if it can."""
    try:
        if execution_plans.find_plan(work, plan_name, device_properties) is not None:
            return None
    except CudnnError as error:
        return str(error)
    where = "the described device" if device_properties else torch.cuda.get_device_name()
    return f"cuDNN doesn't offer them for these shapes and settings on {where}; solve again there"


def _instead(device: str, operator: Operator, part: ConvolutionPart, wanted: Implementation) -> Implementation:
    alike = [
        item
        for item in operator.implementations
        if set(item.reads) == set(wanted.reads)
        and item.writes == wanted.writes
        and not item.overwrites
        and item.guard is None
        and not is_plan(item.name)
        and (not item.devices or device in item.devices)
    ]
    return min(alike, key=lambda item: item.tolerance) if alike else part.stand_in()


def _renamed(choices: Choices, taken: Mapping[Run, str]) -> Choices:
    """Choices with some implementations replaced by others."""
    before = {
        operator: tuple((name, taken.get((name, how), how)) for name, how in runs)
        for operator, runs in choices.before.items()
    }
    first = {operator: taken.get((operator, how), how) for operator, how in choices.implementations.items()}
    return replace(choices, before=before, implementations=first)


def _replaced(taken: Mapping[Run, str], reasons: Iterable[str]) -> str:
    operators = list(dict.fromkeys(operator for operator, _ in taken))
    listed = ", ".join(f"{operator} ({name}, now {other})" for (operator, name), other in list(taken.items())[:3])
    more = f" and {len(taken) - 3} more" if len(taken) > 3 else ""
    return (
        f"{len(operators)} operators don't run by the cuDNN plans that the schedule names, {listed}{more}: "
        f"{'; '.join(reasons)}. What runs instead reads and writes the same, so the training is the same within "
        "the schedule's tolerance; step time and peak can be other than predicted"
    )
