"""Subjects of commands: models, built and priced; profile files; schedule files with their models."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from monetlite.cli.command_options import DEFAULT_ESTIMATE, ModelChoice
from monetlite.cli.running import suggested
from monetlite.cli.terminal import Terminal
from monetlite.core.binding import bind
from monetlite.core.costs import Profile, cost_device, load_profile
from monetlite.core.devices import MEASURED_HERE
from monetlite.core.errors import DeviceError, ModelError, ScheduleMismatch
from monetlite.core.graph import AS_TRACED
from monetlite.core.options import PricingOptions, SolvingOptions
from monetlite.core.schedule import Schedule
from monetlite.core.source import batch_of
from monetlite.core.steps import Step
from monetlite.models import BuiltModel, build_model
from monetlite.zoo.collection import load_schedule


def chosen_device(
    device: str | None,
    terminal: Terminal,
    otherwise: str = "cpu",
    advice: str = "leave --device out",
    option: str = "--device",
) -> str:
    """The device to use: as given, else the GPU if there is one, else another, which is told.

    Raises:
        DeviceError: a GPU that this machine does not have.
    """
    terminal.import_torch()
    import torch

    there = torch.cuda.is_available()
    if device == "cuda" and not there:
        raise DeviceError(f"device 'cuda': this machine has no GPU that torch can use; {advice}")
    if device is None and not there:
        use = "measuring on the CPU" if otherwise == "cpu" else f"costs are estimated for {otherwise}"
        terminal.tell(f"this machine has no GPU that torch can use: {use} ({option} names another)")
    return device or ("cuda" if there else otherwise)


def build(choice: ModelChoice, terminal: Terminal | None, *, meta: bool = False) -> BuiltModel:
    """Build a model; on the meta device without memory for its weights. Without a terminal, say nothing."""
    if terminal is not None:
        terminal.import_torch()
    import torch

    assert choice.spec is not None
    with contextlib.nullcontext() if terminal is None else terminal.line(f"building {choice.spec}"):
        return build_model(
            choice.spec,
            batch=choice.batch,
            input_size=choice.input_size,
            sequence_length=choice.sequence_length,
            dtype=getattr(torch, choice.dtype) if choice.dtype else None,
            meta=meta,
        )


def price_layouts(
    choice: ModelChoice,
    pricing: PricingOptions,
    terminal: Terminal,
    layouts: Sequence[str] = (AS_TRACED,),
    solving: SolvingOptions | None = None,
) -> tuple[BuiltModel, list[Profile]]:
    """Build a model, and trace and price it in those layouts that differ, without allocating its activations.

    Implementations that `solving` rules out are not priced.
    """
    device = chosen_device(pricing.device, terminal, DEFAULT_ESTIMATE, "name a device to estimate")
    from monetlite.planning.pipeline import price
    from monetlite.tracing import trace_layouts
    from monetlite.tracing.step_inputs import autocast_to

    built = build(choice, terminal, meta=True)
    device_type = "cuda" if device == "cuda" else "cpu"
    with (
        terminal.line(f"tracing {built.description.partition('; returns')[0]}"),
        autocast_to(device_type, choice.autocast),
    ):
        graphs = trace_layouts(
            built.model,
            built.example_inputs,
            layouts,
            device=device,
            meta_device=device_type,
            outputs=pricing.outputs,
        )
    profiles = []
    for graph in graphs:
        measured = device in MEASURED_HERE
        with terminal.bar("measuring operators" if measured else f"estimating operators on {device}") as progress:
            priced = price(replace(graph, name=built.name), replace(pricing, device=device), solving, progress)
        profiles.append(replace(priced, source=built.source))
    return built, profiles


def load_profiles(
    paths: Sequence[str], layout: str | None, given: Mapping[str, object]
) -> tuple[list[Profile], int, str]:
    """Read profile files of one training step in different layouts.

    Returns the profiles, the first as plain training runs it, its batch, and a name for people.

    Args:
        paths: the files.
        layout: the only one to solve for, if given.
        given: options that repeat what the files say.

    Raises:
        ModelError: an option contradicts the files, they are of different steps, or the layout is not there.
        ScheduleFileError: a file can't be read.
    """
    if said := [f"--{name.replace('_', '-')}" for name, value in given.items() if value]:
        raise ModelError(f"a profile says what {', '.join(said)} would; leave that out, or profile again with it")
    loaded = sorted(map(load_profile, paths), key=lambda profile: profile.graph.layout != AS_TRACED)
    first = loaded[0]
    if first.graph.layout != AS_TRACED:
        raise ModelError(
            f"{_described(first)}: give the profile of the step as traced, too; budgets in percent and overheads "
            "are relative to that"
        )
    for other in loaded[1:]:
        if other.graph.layout == first.graph.layout or (_step(other) != _step(first)):
            raise ModelError(
                "the profiles are not of one step in different layouts: "
                f"{_described(first)}, and {_described(other)}"
            )
    if layout is not None and layout not in [profile.graph.layout for profile in loaded]:
        raise ModelError(f"no profile is of a step in layout {layout!r}; give one made with --layout {layout}")
    return loaded, batch_of(first.source, first.graph.inputs) or 1, _described(first)


def _step(profile: Profile) -> tuple[object, ...]:
    graph = profile.graph
    counted = profile.optimizer, profile.accumulate, profile.step_in_backward
    return graph.name, graph.inputs, graph.outputs, profile.device, *counted


def _described(profile: Profile) -> str:
    shapes = shapes_text([spec.shape for spec in profile.graph.inputs.values()])
    return f"{profile.graph.name} on {shapes}, {profile.graph.layout}, {profile.kind} for {profile.device}"


def shapes_text(shapes: Sequence[tuple[int, ...]]) -> str:
    return ", ".join("×".join(map(str, shape)) for shape in shapes)


@dataclass(frozen=True, kw_only=True)
class OpenedSchedule:
    """A schedule with the graph and the costs that it was solved for.

    Attributes:
        schedule: as read.
        steps: its steps on this device: implementations that the device lacks run by default.
        profile: the costs that it is compared with; plain: those of plain training, whose images are laid out as
            the model has them.
        built: the model.
    """

    schedule: Schedule
    steps: tuple[Step, ...]
    profile: Profile
    plain: Profile
    built: BuiltModel

    @property
    def at_own_sizes(self) -> bool:
        """True if the model has the sizes that the schedule was solved for."""
        return self.profile.graph.fingerprint == self.schedule.fingerprint


def open_schedule(
    path: str, choice: ModelChoice, device: str | None, terminal: Terminal, *, other_sizes: bool = False
) -> OpenedSchedule:
    """Read a schedule (a file, or `zoo:MODEL@BUDGET`), and trace and price its model.

    Args:
        path: the schedule.
        choice: the model, where the file doesn't name it, and sizes other than the file's.
        device: to price for; by default the one that the schedule was solved with, which is measured again if
            this machine is where it was measured.
        terminal: shows progress.
        other_sizes: allow sizes that it wasn't solved for.

    Raises:
        ScheduleFileError: the file can't be read.
        ScheduleMismatch: it is for another model, or for other sizes.
        ModelError: the file doesn't say how to build its model, or was measured on another machine.
    """
    schedule = load_schedule(path)
    choice = model_of(schedule, path, choice)
    pricing = PricingOptions(
        device=device or _device_of(schedule, path, terminal),
        optimizer=schedule.optimizer,
        accumulate=schedule.accumulate,
        step_in_backward=schedule.step_in_backward,
        outputs=schedule.outputs,
    )
    # As plain training runs it, and last in the schedule's layout.
    layouts = list(dict.fromkeys((AS_TRACED, schedule.layout)))
    built, profiles = price_layouts(choice, pricing, terminal, layouts)
    graph = profiles[-1].graph
    opened = OpenedSchedule(
        schedule=schedule, steps=bind(schedule, graph), profile=profiles[-1], plain=profiles[0], built=built
    )
    if other_sizes or opened.at_own_sizes:
        return opened
    theirs, ours = ([item.shape for item in specs.values()] for specs in (schedule.inputs, graph.inputs))
    if theirs == ours:
        raise ScheduleMismatch(
            f"{path} was solved for tensors of other sizes than this model makes of inputs of "
            f"{shapes_text(ours)}: layers have other widths, or the file was edited. Solve a schedule for this "
            "model"
        )
    raise ScheduleMismatch(
        f"{path} was solved for inputs of {shapes_text(theirs)}, and the model has {shapes_text(ours)}; give its "
        "sizes (--batch, --input-size, --sequence-length), solve one for these, or see what it would take: "
        f"{suggested('show')}"
    )


def model_of(schedule: Schedule, path: str, choice: ModelChoice) -> ModelChoice:
    """The model of a schedule that was read from a path, and its sizes: as given, else as the file says.

    Raises:
        ModelError: neither does.
    """
    source = schedule.source
    if source is None and choice.spec is None:
        raise ModelError(
            f"{path} doesn't say how to build its model, which is not one that has a name everywhere; add "
            "--model path/to/file.py:build"
        )
    if source is not None and choice.spec in (None, source.model):
        names = ("batch", "input_size", "sequence_length", "dtype")
        sizes: dict[str, Any] = {name: getattr(choice, name) or getattr(source, name) for name in names}
        choice = replace(choice, spec=source.model, **sizes)
    return replace(choice, autocast=schedule.autocast or None)


def _device_of(schedule: Schedule, path: str, terminal: Terminal) -> str:
    """The device that a schedule was solved with, if its costs can be had here."""
    if schedule.kind == "estimated":
        return schedule.device
    terminal.import_torch()
    import torch

    from monetlite.profiling.meters import meter_for

    there = cost_device(schedule)
    here = "no such device"
    if schedule.device != "cuda" or torch.cuda.is_available():
        here = meter_for(schedule.device).environment()["device"]
    if here != there:
        raise ModelError(
            f"{path} was solved with costs measured on {there}, which this machine is not; say what to measure or "
            "estimate instead: --device cpu, cuda, t4, ..."
        )
    return schedule.device
