"""Checks of schedule files: their figures and choices are compared with those that the present code gives."""

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from os import PathLike

from monetlite.allocator import reserve
from monetlite.core.binding import first_difference
from monetlite.core.costs import Profile, ProfileKind, without_costs
from monetlite.core.devices import find_device
from monetlite.core.errors import IllegalSchedule, ModelError, MonetliteError
from monetlite.core.graph import AS_TRACED, LOSS_ONLY, OperatorGraph
from monetlite.core.schedule import Schedule, read_schedule, schedule_problems
from monetlite.core.simulate import simulate
from monetlite.core.source import ModelSource, is_shareable
from monetlite.core.steps import plain_steps
from monetlite.models import BuiltModel, build_model
from monetlite.profiling.step_additions import with_additions
from monetlite.zoo.collection import file_name

SAME = 1e-6
"""Largest relative difference between a latency in a file and the same one computed again."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    """Result of checking a file. It is sound if there are no problems."""

    file: str
    problems: tuple[str, ...]
    schedule: Schedule | None = None

    @property
    def passed(self) -> bool:
        return not self.problems


class Checker:
    """Checks files, tracing each model once.

    A file is sound if it can be read, follows the schema, names a model that traces to the graph that it was
    solved for, and its choices make a legal schedule within the budget. Where costs were estimated, the peak and
    the latency must be those in the file. A measured file can't be measured again without its device: its peak must
    be at least what tensors alone take.
    """

    def __init__(self) -> None:
        self._profiles: dict[tuple[object, ...], Profile] = {}

    def check(self, path: str | PathLike[str], expected_name: str | None = None) -> Checked:
        """Check one file; `expected_name` is its path in a collection, if it is in one."""
        try:
            schedule = read_schedule(path)
            problems = list(schedule_problems(path))
            if expected_name is not None and file_name(schedule) != expected_name:
                problems.append(f"belongs at {file_name(schedule)}, by what it says")
            problems += self._problems(schedule)
        except MonetliteError as error:
            return Checked(file=str(path), problems=(str(error),))
        return Checked(file=str(path), problems=tuple(problems), schedule=schedule)

    def _problems(self, schedule: Schedule) -> Iterator[str]:
        if schedule.source is None:
            yield "doesn't say how to build its model, so that nothing else can be checked"
            return
        profile = self.profile(schedule).within(schedule.tolerance)
        graph = profile.graph
        if graph.fingerprint != schedule.fingerprint:
            where = first_difference(schedule, graph) if graph.structure != schedule.structure else ""
            what = "operators" if graph.structure != schedule.structure else "sizes"
            yield (
                f"{schedule.source.model} now traces to other {what} (fingerprint {graph.fingerprint}, in the file "
                f"{schedule.fingerprint}). {where}".strip()
            )
            return
        if schedule.kind == ProfileKind.MEASURED:
            profile, schedule = _without_plans(profile, schedule)
        try:
            timeline = simulate(profile, schedule, schedule.budget_bytes)
        except IllegalSchedule as error:
            yield str(error)
            return
        if profile.kind is ProfileKind.ESTIMATED and schedule.kind == "estimated":
            as_it_is = self.profile(schedule, plain=True)
            plain = simulate(as_it_is, plain_steps(as_it_is.graph))
            yield from _other("predicted.peak_bytes", schedule.peak_bytes, timeline.peak_bytes)
            yield from _other("predicted.latency_ms", schedule.latency_ms, timeline.latency_ms)
            limit_bytes = schedule.reserved_bytes
            if limit_bytes and not reserve(profile, schedule, expandable=True, limit_bytes=limit_bytes).fits:
                yield f"predicted.reserved_bytes is {limit_bytes}, within which requests find no room"
            yield from _other("plain.peak_bytes", schedule.plain_peak_bytes, plain.peak_bytes)
            yield from _other("plain.latency_ms", schedule.plain_latency_ms, plain.latency_ms)
        elif timeline.peak_bytes > schedule.peak_bytes:
            yield f"predicted.peak_bytes is {schedule.peak_bytes}; tensors alone take {timeline.peak_bytes}"
        if schedule.peak_bytes > schedule.budget_bytes:
            yield f"predicted.peak_bytes is {schedule.peak_bytes}, over the budget of {schedule.budget_bytes}"

    def profile(self, schedule: Schedule, plain: bool = False) -> Profile:
        """Price a schedule's model again: estimated as it was solved, or without costs if it was measured.

        Args:
            schedule: with a source.
            plain: of plain training, in the layout that the model has.
        """
        from monetlite.profiling.estimate import estimate_profile

        layout = AS_TRACED if plain else schedule.layout
        priced = schedule.device if schedule.kind == "estimated" else ""
        form = (schedule.autocast, layout, priced or None, schedule.outputs)
        counted = schedule.optimizer, schedule.accumulate, schedule.step_in_backward
        key = (schedule.source, *form, *counted)
        if key not in self._profiles:
            assert schedule.source is not None
            graph = traced(schedule.source, *form)
            self._profiles[key] = (
                with_additions(estimate_profile(graph, find_device(priced).name), schedule)
                if priced
                else without_costs(graph)
            )
        return self._profiles[key]


def build(source: ModelSource, meta: bool = True) -> BuiltModel:
    """Build a model and its inputs, on the meta device unless said otherwise.

    Raises:
        ModelError: the name is not one of a built-in or a library's model, or the model can't be built.
    """
    import torch

    if not is_shareable(source.model):
        raise ModelError(f"{source.model!r:.80} is not the name of a built-in, hf:, timm: or torchvision: model")
    return build_model(
        source.model,
        batch=source.batch,
        input_size=source.input_size,
        sequence_length=source.sequence_length,
        dtype=None if source.dtype is None else getattr(torch, source.dtype),
        meta=meta,
    )


def traced(
    source: ModelSource,
    autocast: str = "",
    layout: str = AS_TRACED,
    device: str | None = None,
    outputs: str = LOSS_ONLY,
) -> OperatorGraph:
    """Trace the training step of a model, on a named device if one is given."""
    from monetlite.tracing import trace
    from monetlite.tracing.step_inputs import autocast_to

    built = build(source)
    with autocast_to("cpu", autocast):
        graph = trace(built.model, built.example_inputs, device=device, layout=layout, outputs=outputs)
    return replace(graph, name=built.name)


def _without_plans(profile: Profile, schedule: Schedule) -> tuple[Profile, Schedule]:
    """Replace cuDNN plans, which only a GPU has, by implementations that read and write the same."""
    from monetlite.operators.cudnn import with_named_plans

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph, choices = with_named_plans(profile.graph, schedule.choices)
    return without_costs(graph), replace(schedule, choices=choices)


def _other(name: str, written: float, found: float) -> Iterator[str]:
    if not math.isclose(written, found, rel_tol=SAME if isinstance(written, float) else 0.0):
        yield f"{name} is {written}; it comes to {found} now"
