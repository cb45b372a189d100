"""`monetlite export`: a plan for people who train without monetlite."""

import sys
from dataclasses import replace
from keyword import iskeyword
from pathlib import Path

import click

from monetlite.cli.command_options import (
    BATCH_OF_SCHEDULE,
    ModelChoice,
    output_option,
    schedule_argument,
    schedule_model_option,
    size_options,
)
from monetlite.cli.option_types import DEVICE_NAME
from monetlite.cli.running import check_writable, command
from monetlite.cli.subjects import OpenedSchedule, open_schedule
from monetlite.cli.terminal import Terminal
from monetlite.core.devices import MEASURED_HERE
from monetlite.core.errors import DeviceError, ModelError
from monetlite.core.files.atomic import write_atomically
from monetlite.core.options import PricingOptions
from monetlite.core.schedule import Schedule
from monetlite.core.simulate import simulate
from monetlite.core.units import format_bytes
from monetlite.zoo.collection import load_schedule

COMPILE = "torch-compile"
TARGETS = ("checkpoint", "transformers", "torchtitan", COMPILE)


@command(
    "export",
    schedule_argument,
    click.option(
        "--to",
        "target",
        type=click.Choice(TARGETS),
        required=True,
        help="checkpoint: torch.utils.checkpoint in a loop of one's own. transformers: for its Trainer. "
        "torchtitan: for a parallelize function. torch-compile: for torch.compile's partitioner.",
    ),
    output_option("The plan: a Python file that needs torch alone.", required=True),
    schedule_model_option,
    size_options(BATCH_OF_SCHEDULE),
    click.option(
        "--device",
        type=DEVICE_NAME,
        help="cpu or cuda, of the machine that trains; by default the schedule's own.",
    ),
)
def export_command(
    terminal: Terminal, schedule: str, target: str, output: Path, choice: ModelChoice, device: str | None
) -> None:
    """Write a plan that PyTorch runs without monetlite, within a schedule's budget.

    Other tools can express less than a schedule has: whole layers recomputed, with some results saved. The plan is
    solved for in that space, for the schedule's model, sizes and budget. SCHEDULE is a file, or a name such as
    zoo:resnet50@6GB.
    """
    if output.suffix != ".py" or not output.stem.isidentifier() or iskeyword(output.stem):
        raise click.UsageError(f"{output} can't be imported; name a Python file, such as plan.py")
    if output.stem == "torch" or output.stem in sys.stdlib_module_names:
        raise click.UsageError(f"{output} would hide the module {output.stem}; name it otherwise, such as plan.py")
    check_writable(output)
    known = load_schedule(schedule)
    priced_for = device or known.device
    if priced_for not in MEASURED_HERE:
        raise DeviceError(
            f"{schedule} is for {priced_for}, at estimated costs. A plan is made on the machine that "
            "trains: PyTorch's own operators are recorded and measured there. There, add --device cuda or cpu"
        )
    if known.step_in_backward or known.reserved_bytes is not None:
        raise ModelError(
            "a plan in plain PyTorch takes no step in the backward pass, and its budget is of tensors, not of "
            "reserved memory; solve a schedule without these"
        )
    if target == COMPILE and (known.optimizer or known.accumulate or known.autocast):
        raise ModelError(
            "a plan for torch.compile counts no optimizer and no earlier gradients, and is made without autocast; "
            "solve a schedule without these, with that much less budget"
        )
    opened = open_schedule(schedule, choice, device, terminal)
    from monetlite.exporting.exported_plan import export_plan
    from monetlite.exporting.plan_file import Target, plan_text, predicted
    from monetlite.reporting.text_export import print_exported
    from monetlite.tracing.step_inputs import autocast_to

    timeline, graph = simulate(opened.profile, opened.steps), opened.profile.graph
    # At the costs of now, as the plan is.
    solved = replace(opened.schedule, peak_bytes=timeline.peak_bytes, latency_ms=timeline.latency_ms)
    if target == COMPILE:
        _export_compiled(terminal, opened, solved, output)
        return
    pricing = PricingOptions(
        device=graph.device, optimizer=solved.optimizer, accumulate=solved.accumulate, outputs=solved.outputs
    )
    with (
        terminal.bar("measuring operators as PyTorch runs them") as progress,
        autocast_to(graph.device, solved.autocast),
    ):
        exported = export_plan(
            opened.built.model, opened.built.example_inputs, solved.budget_bytes, pricing, progress
        )
    write_atomically(output, plan_text(exported, solved, Target(target), output.stem))
    if terminal.as_json:
        facts = {"model": solved.name, "to": target, **predicted(exported, solved)}
        wrapped = [exported.step.blocks[number].path for number in exported.found.plan]
        terminal.print_json({**facts, "wrapped": wrapped, "output": str(output)})
    else:
        print_exported(terminal.console, exported, solved, str(output))


def _export_compiled(terminal: Terminal, opened: OpenedSchedule, solved: Schedule, output: Path) -> None:
    """Write a plan for `torch.compile`."""
    from monetlite.exporting.compiled_plan import compile_plan, compiled_facts, compiled_text

    built = opened.built
    with terminal.line("compiling up to torch's partitioner"):
        plan = compile_plan(
            built.model,
            built.example_inputs,
            solved.budget_bytes,
            opened.profile.graph.device,
            outputs=solved.outputs,
        )
    write_atomically(output, compiled_text(plan, solved, output.stem))
    if terminal.as_json:
        terminal.print_json({"model": solved.name, "to": COMPILE, **compiled_facts(plan), "output": str(output)})
        return
    terminal.console.print(
        f"this plan                       {format_bytes(plan.peak_bytes)}, within "
        f"{format_bytes(plan.budget_bytes)}\n"
        f"the schedule, run by monetlite  {format_bytes(solved.peak_bytes)}\n"
        f"{len(plan.again)} of {len(plan.nodes)} costly results are computed again\nplan written to {output}",
        markup=False,
        soft_wrap=True,
    )
