"""The `monetlite` command: `solve`, `profile`, `verify`.

Exit codes: 0 done, 2 usage (a bad option, budget, model or device), 3 infeasible, 4 anything else.
"""

import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from monetlite import __version__
from monetlite.errors import BudgetError, DeviceError, InfeasibleBudget, ModelError, MonetliteError
from monetlite.units import format_bytes, format_ms

if TYPE_CHECKING:
    from rich.console import Console

    from monetlite.costs import Profile
    from monetlite.models import BuiltModel
    from monetlite.solving.solve import Progress

DEFAULT_ESTIMATE = "rtx-3090"
"""What costs are estimated for when nobody says and there is no GPU: a common 24 GB card."""

EXIT_USAGE, EXIT_INFEASIBLE, EXIT_FAILED = 2, 3, 4

_Function = TypeVar("_Function", bound=Callable[..., Any])


class _ImageSize(click.ParamType[tuple[int, int]]):
    name = "PIXELS|HxW"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        sides = str(value).lower().replace("×", "x").split("x")
        if len(sides) > 2 or not all(side.isascii() and side.isdigit() and int(side) > 0 for side in sides):
            self.fail(f"{value!r} is not an image size; write 224 or 416x608", param, ctx)
        return int(sides[0]), int(sides[-1])


def _finite(_: click.Context, __: click.Parameter, value: float) -> float:
    if not math.isfinite(value):
        raise click.BadParameter(f"{value} is not a number of seconds")
    return value


def _model_options(function: _Function) -> _Function:
    for option in reversed(
        (
            click.option(
                "--model",
                "spec",
                required=True,
                help="A built-in model (resnet50, vgg16, googlenet, mobilenet_v2, unet), torchvision:NAME, "
                "timm:NAME, hf:NAME, or your own: path/to/file.py:build or package.module:build.",
            ),
            click.option("--batch", type=click.IntRange(min=1), help="Batch size; by default the model's own."),
            click.option("--input-size", type=_ImageSize(), help="Image height and width, in pixels."),
            click.option("--sequence-length", type=click.IntRange(min=1), help="Tokens of a sequence."),
            click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), help="Of weights and inputs."),
        )
    ):
        function = option(function)
    return function


def _cost_options(function: _Function) -> _Function:
    for option in reversed(
        (
            click.option(
                "--device",
                help="cpu or cuda to measure here, or a device to estimate (a100-40gb, rtx-4090, t4, …). "
                f"By default the GPU if there is one, else an estimate for {DEFAULT_ESTIMATE}.",
            ),
            click.option(
                "--optimizer",
                type=click.Choice(["sgd", "momentum", "adam", "adamw"]),
                help="Count this optimizer's state in the peak.",
            ),
        )
    ):
        function = option(function)
    return function


def _common_options(function: _Function) -> _Function:
    function = click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")(
        function
    )
    return click.option("--debug", is_flag=True, help="Show the traceback of an error.")(function)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="monetlite")
def main() -> None:
    """Train PyTorch models within a memory budget."""


@main.command()
@_model_options
@click.option(
    "--budget",
    required=True,
    help="The whole step's peak: 6GB (10⁹ bytes), 6GiB (2³⁰), 6000MB, or 50% of plain training's peak.",
)
@_cost_options
@click.option(
    "--time-limit",
    type=click.FloatRange(min=0.1),
    callback=_finite,
    default=60.0,
    show_default=True,
    help="Seconds.",
)
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0, max=1, max_open=True),
    default=0.0,
    show_default=True,
    help="How far an operator's result may be from plain training's: 0 for the same bits, 1e-5 for sums in another "
    "order, 1e-4 for normalisations differentiated from their output.",
)
@click.option(
    "--layout",
    type=click.Choice(["as_traced", "channels_last"]),
    help="Of images; by default whichever is faster, where the tolerance allows it.",
)
@click.option("--solver", type=click.Choice(["SCIP", "HIGHS", "GUROBI"]), default="SCIP", show_default=True)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the search.")
@click.option(
    "--output",
    type=click.Path(dir_okay=False),
    help="Schedule file; by default MODEL_BATCH_BUDGET.yaml here.",
)
@_common_options
def solve(
    spec: str,
    budget: str,
    device: str | None,
    optimizer: str | None,
    time_limit: float,
    tolerance: float,
    layout: str | None,
    solver: str,
    seed: int,
    output: str | None,
    as_json: bool,
    debug: bool,
    **shape: Any,
) -> None:
    """Find the fastest schedule of a model's training step within a memory budget."""

    def run() -> None:
        from monetlite import api
        from monetlite.reporting import solve as reporting
        from monetlite.schedule import plain_steps, simulate
        from monetlite.units import parse_budget

        console, quiet = _console(as_json)
        # Read the budget, and see that the output can be written, before spending a minute on it.
        parse_budget(budget, plain_peak_bytes=2**40)
        layouts = api.layouts_to_try(layout, tolerance)
        built, profiles = _profiles(spec, device, optimizer, quiet, shape, layouts)
        target = Path(output or _file_name(built.name, built.batch, budget))
        _check_folder(target)
        budget_bytes = parse_budget(budget, simulate(profiles[0], plain_steps(profiles[0].graph)).peak_bytes)
        with _Solving(quiet, budget_bytes) as progress:
            schedule = api.solve_layouts(
                profiles,
                budget,
                tolerance=tolerance,
                layout=layout,
                time_limit=time_limit,
                solver=solver,
                seed=seed,
                progress=progress,
            )
        schedule.save(target)
        profile = next(item for item in profiles if item.graph.layout == schedule.layout)
        if as_json:
            click.echo(json.dumps(reporting.schedule_facts(schedule, str(target))))
        else:
            click.echo(built.description)
            reporting.print_schedule(console, profile, schedule, simulate(profile, schedule), str(target))

    _guard(run, debug)


@main.command("profile")
@_model_options
@_cost_options
@click.option("--top", type=click.IntRange(min=1), default=15, show_default=True, help="Operators to list.")
@_common_options
def profile_command(
    spec: str, device: str | None, optimizer: str | None, top: int, as_json: bool, debug: bool, **shape: Any
) -> None:
    """Show what each operator of a model's training step costs."""

    def run() -> None:
        from monetlite.reporting.profile import print_profile, profile_facts

        console, quiet = _console(as_json)
        built, profile = _profile(spec, device, optimizer, quiet, shape)
        if as_json:
            click.echo(json.dumps(profile_facts(profile)))
        else:
            click.echo(built.description)
            print_profile(console, profile, top)

    _guard(run, debug)


@main.command()
@click.argument("schedule", type=click.Path())
@_model_options
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Timed steps of each.")
@click.option("--seed", type=int, default=0, show_default=True)
@_common_options
def verify(schedule: str, spec: str, repeats: int, seed: int, as_json: bool, debug: bool, **shape: Any) -> None:
    """Train a step by a schedule and plainly on this machine, and compare everything they leave behind.

    A batch smaller than the schedule's needs less memory and is served by the same schedule.
    """

    def run() -> None:
        import torch

        from monetlite.files import load_schedule
        from monetlite.models import build_model
        from monetlite.reporting.solve import print_report, report_facts
        from monetlite.runtime import verify as run_verification

        console, _ = _console(as_json)
        loaded = load_schedule(schedule)
        built = build_model(spec, **_shape(shape))
        model, inputs = built.model, built.example_inputs
        if torch.cuda.is_available():
            model, inputs = model.cuda(), _to_cuda(inputs)
        report = run_verification(model, loaded, inputs, repeats=repeats, seed=seed)
        if as_json:
            click.echo(json.dumps(report_facts(report)))
        else:
            click.echo(built.description)
            print_report(console, report)
        if not report.passed:
            raise SystemExit(EXIT_FAILED)

    _guard(run, debug)


def _profile(
    spec: str, device: str | None, optimizer: str | None, quiet: bool, shape: dict[str, Any]
) -> "tuple[BuiltModel, Profile]":
    """Build, trace and price a model as plain training runs it, without allocating its activations."""
    built, (profile,) = _profiles(spec, device, optimizer, quiet, shape, ["as_traced"])
    return built, profile


def _profiles(
    spec: str,
    device: str | None,
    optimizer: str | None,
    quiet: bool,
    shape: dict[str, Any],
    layouts: list[str],
) -> "tuple[BuiltModel, list[Profile]]":
    """Build a model, and trace and price it in some layouts."""
    import torch

    from monetlite import api
    from monetlite.models import build_model
    from monetlite.tracing import trace

    chosen = device or ("cuda" if torch.cuda.is_available() else DEFAULT_ESTIMATE)
    if chosen == "cuda" and not torch.cuda.is_available():
        raise DeviceError("device 'cuda': this machine has no GPU that torch can use; name a device to estimate")
    if chosen not in ("cpu", "cuda"):
        from monetlite.profiling.devices import find_device

        find_device(chosen)
    built = build_model(spec, meta=True, **_shape(shape))
    profiles = []
    for layout in layouts:
        graph = trace(
            built.model,
            built.example_inputs,
            meta_device="cuda" if chosen == "cuda" else "cpu",
            layout=layout,
        )
        with _Measuring(quiet) as progress:
            named = replace(graph, name=built.name)
            profiles.append(api.profile(named, chosen, optimizer=optimizer, progress=progress))
    return built, profiles


def _shape(options: dict[str, Any]) -> dict[str, Any]:
    import torch

    dtype = options.get("dtype")
    return {
        "batch": options.get("batch"),
        "input_size": options.get("input_size"),
        "sequence_length": options.get("sequence_length"),
        "dtype": getattr(torch, dtype) if dtype else None,
    }


def _to_cuda(inputs: Any) -> Any:
    import torch
    from torch.utils import _pytree as pytree

    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.cuda(), inputs)


def _file_name(name: str, batch: int, budget: str) -> str:
    stem = name.rpartition("/")[2].replace(":", "-").replace(".py", "")
    return f"{stem}_{batch}_{budget.replace('%', 'pct').replace(' ', '')}.yaml"


def _check_folder(target: Path) -> None:
    if not target.parent.is_dir():
        raise MonetliteError(f"{target} can't be written: there is no folder {target.parent}; create it first")


def _console(as_json: bool) -> "tuple[Console, bool]":
    """A console for the report, and whether to keep progress to ourselves."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=False), as_json or not sys.stderr.isatty()


class _Measuring:
    """A progress bar while operators are measured; None as the callback where nobody looks."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet

    def __enter__(self) -> Callable[[int, int], None] | None:
        if self._quiet:
            return None
        from rich.console import Console
        from rich.progress import Progress

        self._bar = Progress(console=Console(stderr=True), transient=True)
        task = self._bar.add_task("measuring operators", total=None)
        self._bar.start()

        def progress(done: int, total: int) -> None:
            self._bar.update(task, completed=done, total=total)

        return progress

    def __exit__(self, *error: object) -> None:
        if not self._quiet:
            self._bar.stop()


class _Solving:
    """A live line while solving: incumbent, bound, gap, peak, time."""

    def __init__(self, quiet: bool, budget_bytes: int) -> None:
        self._quiet, self._budget_bytes = quiet, budget_bytes

    def __enter__(self) -> "Callable[[Progress], None] | None":
        if self._quiet:
            return None
        from rich.console import Console

        self._status = Console(stderr=True).status(f"solving within {format_bytes(self._budget_bytes)}")
        self._status.start()

        def progress(event: "Progress") -> None:
            found = "nothing found yet"
            if event.peak_bytes is not None:
                found = f"{format_ms(event.latency_ms)} at {format_bytes(event.peak_bytes)}, gap {event.gap:.1%}"
            self._status.update(
                f"{event.seconds:.0f} s: {found}, bound {format_ms(event.lower_bound_ms)} ({event.phase})"
            )

        return progress

    def __exit__(self, *error: object) -> None:
        if not self._quiet:
            self._status.stop()


def _guard(run: Callable[[], None], debug: bool) -> None:
    """Turn errors into a message and an exit code; a traceback only where it was asked for."""
    try:
        run()
    except (KeyboardInterrupt, click.Abort):
        click.echo("monetlite: interrupted; nothing was written", err=True)
        raise SystemExit(EXIT_FAILED) from None
    except Exception as error:
        if debug:
            raise
        usage = isinstance(error, (BudgetError, DeviceError, ModelError))
        code = EXIT_INFEASIBLE if isinstance(error, InfeasibleBudget) else EXIT_USAGE if usage else EXIT_FAILED
        message = str(error) if isinstance(error, MonetliteError) else f"{type(error).__name__}: {error}"
        if not isinstance(error, MonetliteError):
            message += "\nThis is a bug in monetlite or in the model; run again with --debug for the traceback"
        click.echo(f"monetlite: {message}", err=True)
        raise SystemExit(code) from None


if __name__ == "__main__":
    main()
