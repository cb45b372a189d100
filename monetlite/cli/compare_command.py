"""`monetlite compare`."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from monetlite.cli.command_options import (
    SEED,
    ModelChoice,
    autocast_option,
    force_option,
    here_option,
    model_option,
    options_of,
    repeats_option,
    size_options,
    time_limit_option,
)
from monetlite.cli.option_types import OutputFile
from monetlite.cli.running import check_writable, command, prints_aside
from monetlite.cli.subjects import build, chosen_device
from monetlite.cli.terminal import Terminal
from monetlite.core.errors import ModelError
from monetlite.core.files.atomic import write_atomically
from monetlite.core.files.plain_data import json_text
from monetlite.core.options import SolvingOptions
from monetlite.core.units import check_budget

if TYPE_CHECKING:
    from monetlite.checking.comparison.peer_runs import Comparison

WRITTEN_AS = {".md": "Markdown", ".json": "JSON", ".png": "picture", ".svg": "picture", ".pdf": "picture"}


@command(
    "compare",
    model_option(),
    size_options(),
    click.option(
        "--budgets",
        default="50%",
        show_default=True,
        help="Peaks of the whole step, with commas between: 6GB, or 50% of plain training's measured peak.",
    ),
    click.option(
        "--peers",
        default="checkpoint,selective",
        show_default=True,
        help="Other methods, with commas between: checkpoint, segments, selective, tiled_loss, auto_sac, "
        "aot_eager, inductor, checkmate, gist; or all, which takes ten minutes and more.",
    ),
    here_option,
    autocast_option(),
    options_of(SolvingOptions, "tolerance", help="Tolerance of monetlite's schedules, as for solve."),
    time_limit_option(10.0, "Seconds for each solve: one for each budget, and one for each peer's peak."),
    repeats_option(5),
    click.option("--seed", type=SEED, default=0, show_default=True, help="Seed of the searches and of training."),
    click.option(
        "--output",
        "outputs",
        multiple=True,
        type=OutputFile(),
        help="Also write a table (.md), the figures (.json) or a picture (.png, .svg, .pdf); may be repeated.",
    ),
    force_option,
)
def compare_command(
    terminal: Terminal,
    choice: ModelChoice,
    budgets: str,
    peers: str,
    device: str | None,
    solving: SolvingOptions,
    repeats: int,
    outputs: tuple[Path, ...],
) -> None:
    """Measure monetlite beside what people use today: one model, this machine, one run.

    Plain PyTorch, checkpoints around all or some blocks, checkpoint_sequential, selective checkpointing, tiled
    losses, torch's auto-SAC, torch.compile with a memory budget, Checkmate's and Gist's methods, and monetlite at
    each budget and at each of the others' measured peaks. Of each method the best settings are shown. The
    defaults are quick: checkpointing, selective checkpointing, and one budget.
    """
    for output in outputs:
        if output.suffix.lower() not in WRITTEN_AS:
            known = ", ".join(WRITTEN_AS)
            raise ModelError(f"{output} is none of {known}; a file's ending says what is written to it")
        check_writable(output)
    from monetlite.checking.comparison.peer_runs import PEERS, named_peers

    chosen = PEERS if peers == "all" else named_peers(_listed(peers))
    for budget in _listed(budgets):
        check_budget(budget)
    device = chosen_device(device, terminal)
    from monetlite.checking.comparison.runner import compare
    from monetlite.reporting.text_comparison import comparison_facts, finished_in_words, left_out, print_comparison

    built = build(choice, terminal)
    with terminal.line("tracing the model and measuring its operators") as progress, prints_aside():
        comparison = compare(
            built.model,
            built.example_inputs,
            _listed(budgets),
            peers=chosen,
            device=device,
            autocast=choice.autocast or "",
            tolerance=solving.tolerance,
            time_limit=solving.time_limit,
            repeats=repeats,
            seed=solving.seed,
            name=built.name,
            progress=progress,
            finished=lambda run, ratio: click.echo(finished_in_words(run, ratio), err=True),
        )
    if terminal.as_json:
        terminal.print_json({**comparison_facts(comparison), "outputs": list(map(str, outputs))})
    else:
        print_comparison(terminal.console, comparison)
        if missing := [peer for peer in PEERS if peer not in chosen]:
            terminal.console.print(left_out(missing), style="dim")
    for output in outputs:
        _write(comparison, output)
        if not terminal.as_json:
            click.echo(f"{WRITTEN_AS[output.suffix.lower()]} written to {output}")


def _listed(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


def _write(comparison: "Comparison", target: Path) -> None:
    from monetlite.reporting.text_comparison import comparison_facts, comparison_markdown

    kind = target.suffix.lower()
    if kind == ".md":
        write_atomically(target, comparison_markdown(comparison))
    elif kind == ".json":
        write_atomically(target, json_text(comparison_facts(comparison), indent=1) + "\n")
    else:
        from monetlite.reporting.plots.comparison_plot import save_comparison

        save_comparison(comparison, target)
