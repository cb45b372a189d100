"""A schedule file as a command's argument: read, its model built again, and priced as it was solved for."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from monetlite.cli.options import SIZE_OPTIONS
from monetlite.cli.pricing import price_layouts
from monetlite.core.errors import ModelError, ScheduleMismatch

if TYPE_CHECKING:
    from monetlite.core.costs import Profile
    from monetlite.core.schedule import Schedule
    from monetlite.core.steps import Step
    from monetlite.models import BuiltModel

_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A schedule with the graph and the costs that it was solved for.

    `steps` is what the schedule amounts to on this device: implementations that it lacks run by default.
    `plain` is the profile of plain training, whose images are laid out as the model has them.
    """

    schedule: "Schedule"
    steps: "tuple[Step, ...]"
    profile: "Profile"
    plain: "Profile"
    built: "BuiltModel"


def opening_options(function: _Function) -> _Function:
    """What a schedule's file may not say: its model and sizes, and where its costs come from."""
    for option in reversed(
        (
            click.option(
                "--model",
                "spec",
                help="The model that it is for, where the file doesn't say how to build it: path/to/file.py:build.",
            ),
            *SIZE_OPTIONS,
            click.option(
                "--device",
                help="cpu or cuda to measure here, or a device to estimate; by default the schedule's own.",
            ),
        )
    ):
        function = option(function)
    return function


def open_schedule(path: str, spec: str | None, device: str | None, quiet: bool, shape: dict[str, Any]) -> Opened:
    """Read a schedule (a file, or `zoo:MODEL@BUDGET`), and trace and price its model.

    Args:
        path: what to read.
        spec: the model, where the file doesn't name it.
        device: whose costs; by default those that the schedule was solved with, which are measured again if this
            machine is where they were measured.
        quiet: show no progress.
        shape: the sizes given as options, which the file's own give way to.

    Raises:
        ScheduleFileError: the file can't be read.
        ScheduleMismatch: it is for another model, or for other sizes.
        ModelError: the file doesn't say how to build its model, or was measured on another machine.
    """
    from monetlite.core.binding import bind
    from monetlite.zoo import load_schedule

    schedule = load_schedule(path)
    spec, sizes = model_of(schedule, path, spec, shape)
    built, profiles = price_layouts(
        spec,
        device or _device_of(schedule, path),
        schedule.optimizer,
        schedule.accumulate,
        schedule.autocast or None,
        quiet,
        sizes,
        list(dict.fromkeys(("as_traced", schedule.layout))),
    )
    graph = profiles[-1].graph
    steps = bind(schedule, graph)
    if graph.fingerprint != schedule.fingerprint:
        theirs, ours = ([item.shape for item in specs.values()] for specs in (schedule.inputs, graph.inputs))
        if theirs == ours:
            raise ScheduleMismatch(
                f"{path} was solved for tensors of other sizes than this model makes of inputs of {_shapes(ours)}: "
                "layers have other widths, or the file was edited. Solve a schedule for this model"
            )
        raise ScheduleMismatch(
            f"{path} was solved for inputs of {_shapes(theirs)}, and the model has {_shapes(ours)}; give its sizes "
            "(--batch, --input-size, --sequence-length), or solve one for these"
            + (", or see what it would take with monetlite rescale" if schedule.source is not None else "")
        )
    return Opened(schedule=schedule, steps=steps, profile=profiles[-1], plain=profiles[0], built=built)


def model_of(
    schedule: "Schedule", path: str, spec: str | None, shape: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    """The model that a schedule read from a path is for, and its sizes: as given, else as the file says.

    Raises:
        ModelError: neither does.
    """
    source = schedule.source
    if source is None and spec is None:
        raise ModelError(
            f"{path} doesn't say how to build its model, which is not one that has a name everywhere; add "
            "--model path/to/file.py:build"
        )
    sizes = dict(shape)
    if source is not None and spec in (None, source.model):
        spec = source.model
        for name in ("batch", "input_size", "sequence_length", "dtype"):
            sizes[name] = shape.get(name) or getattr(source, name)
    assert spec is not None
    return spec, sizes


def _shapes(shapes: list[tuple[int, ...]]) -> str:
    return ", ".join("×".join(map(str, shape)) for shape in shapes)


def _device_of(schedule: "Schedule", path: str) -> str:
    """The device whose costs a schedule was solved with, if they can be had here."""
    if schedule.kind == "estimated":
        return schedule.device
    import torch

    from monetlite.profiling.meters import meter_for

    there = schedule.environment.get("device", schedule.device)
    here = "no such device"
    if schedule.device != "cuda" or torch.cuda.is_available():
        here = meter_for(schedule.device).environment()["device"]
    if here != there:
        raise ModelError(
            f"{path} was solved with costs measured on {there}, which this machine is not; say what to measure or "
            "estimate instead: --device cpu, cuda, t4, ..."
        )
    return schedule.device


__all__ = ["Opened", "model_of", "open_schedule", "opening_options"]
