"""`monetlite check`."""

import click

from monetlite.cli.command_options import (
    BATCH_OF_SCHEDULE,
    SEED,
    ModelChoice,
    repeats_option,
    schedule_argument,
    schedule_model_option,
    size_options,
    with_options,
)
from monetlite.cli.exits import EXIT_FAILED, CommandExit
from monetlite.cli.option_types import Integer, ReadBy, share
from monetlite.cli.running import command, prints_aside
from monetlite.cli.subjects import build, model_of
from monetlite.cli.terminal import Terminal
from monetlite.core.units import format_bytes
from monetlite.zoo.collection import load_schedule

DEFAULT_OPERATORS = 10
"""Number of operators that differ to print."""


_options = with_options(
    schedule_argument,
    schedule_model_option,
    size_options(BATCH_OF_SCHEDULE),
    repeats_option(3),
    click.option("--seed", type=SEED, default=0, show_default=True, help="Seed of weights, inputs and dropout."),
    click.option(
        "--operators",
        type=Integer(min=0),
        is_flag=False,
        flag_value=DEFAULT_OPERATORS,
        metavar="[N]",
        help="Compare what every operator writes, too, and print the N that differ most. Keeps a step's values in "
        f"main memory. By default {DEFAULT_OPERATORS}, but only where training differs by more than is allowed; 0: "
        "never.",
    ),
    click.option(
        "--max-difference",
        type=ReadBy("FRACTION", share),
        help="Fail above this relative difference of a gradient, buffer or loss. By default 1e-6, or what the "
        "schedule's tolerance makes of this model.",
    ),
    click.option(
        "--max-peak-error",
        type=ReadBy("PERCENT", share),
        help="Fail if the peak is further than this from the predicted.",
    ),
    click.option(
        "--max-latency-error",
        type=ReadBy("PERCENT", share),
        help="Fail if the step time is further than this from the predicted.",
    ),
    click.option("--no-budget-check", is_flag=True, help="Pass though the peak is over the budget."),
)


def check(
    terminal: Terminal,
    schedule: str,
    choice: ModelChoice,
    repeats: int,
    seed: int,
    operators: int | None,
    max_difference: float | None,
    max_peak_error: float | None,
    max_latency_error: float | None,
    no_budget_check: bool,
) -> None:
    """Train a step by a schedule and plainly on this machine, and compare everything they leave behind.

    SCHEDULE is a file, or a name such as zoo:resnet50@6GB. A batch smaller than the schedule's (--batch) needs less
    memory and is served by the same schedule.

    Exit code 0: it passed; 4: it did not, and the last line (or "reasons" of --json) says why.
    """
    loaded = load_schedule(schedule)
    choice = model_of(loaded, schedule, choice)
    terminal.import_torch()
    import torch

    from monetlite.checking.needed_memory import needed_memory, refuse_too_large
    from monetlite.checking.report import VerificationLimits
    from monetlite.checking.verification import verify_own
    from monetlite.fx.torch_internals import torch_pytree as pytree
    from monetlite.reporting.text_verify import print_report, report_facts

    # A model of the library can be sized before its weights take memory.
    sized_first = loaded.source is not None and choice.spec == loaded.source.model
    torch.manual_seed(seed)
    built = build(choice, terminal, meta=sized_first)
    needed = needed_memory(
        built.model,
        pytree.tensors_among(built.example_inputs),
        loaded,
        on_gpu=torch.cuda.is_available(),
        by_operator=bool(operators),
    )
    refuse_too_large(needed, held_bytes=0 if sized_first else needed.weights, on_gpu=torch.cuda.is_available())
    terminal.tell(f"this takes about {format_bytes(needed.in_all)} of memory: {needed}")
    if sized_first:
        torch.manual_seed(seed)
        built = build(choice, terminal)
    model, inputs = built.model, built.example_inputs
    if torch.cuda.is_available():
        model = model.cuda()
        inputs = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.cuda(), inputs)
    here = "GPU" if torch.cuda.is_available() else "CPU"
    with terminal.line(f"training steps on this machine's {here}") as progress, prints_aside():
        report = verify_own(
            model,
            loaded,
            inputs,
            repeats=repeats,
            seed=seed,
            operators=None if operators is None else operators > 0,
            limits=VerificationLimits(
                difference=max_difference,
                budget=not no_budget_check,
                peak_error=max_peak_error,
                latency_error=max_latency_error,
            ),
            progress=progress,
        )
    if terminal.as_json:
        terminal.print_json(report_facts(report))
    else:
        terminal.console.print(built.description, markup=False)
        print_report(terminal.console, report, DEFAULT_OPERATORS if operators is None else operators)
    if not report.passed:
        raise CommandExit(EXIT_FAILED)


check_command = command("check", _options)(check)
verify_command = command("verify", _options, now="check SCHEDULE")(check)
