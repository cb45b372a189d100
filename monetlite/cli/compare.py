"""`monetlite compare`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from monetlite.cli.options import (
    SEED,
    autocast_option,
    common_options,
    model_options,
    time_limit_option,
    tolerance_option,
)
from monetlite.cli.pricing import shape_of
from monetlite.cli.running import check_folder, guard, open_console, prints_aside
from monetlite.core.errors import DeviceError, ModelError

WRITTEN_AS = {".md": "Markdown", ".json": "JSON", ".png": "picture", ".svg": "picture", ".pdf": "picture"}


@click.command("compare")
@model_options
@click.option(
    "--budgets",
    default="70%,50%,40%",
    show_default=True,
    help="Of the whole step's peak, with commas between: 6GB, or 50% of plain training's measured peak.",
)
@click.option(
    "--peers",
    default="all",
    show_default=True,
    help="Which others, with commas between: checkpoint, segments, selective, aot_eager, inductor, checkmate, "
    "gist.",
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="By default the GPU if there is one.")
@autocast_option("Train under torch.autocast to this type.")
@tolerance_option("Of monetlite, as for solve.")
@time_limit_option(20.0, "Seconds for each solve: one for each budget, and one for each peer's peak.")
@click.option("--repeats", type=click.IntRange(min=1), default=7, show_default=True, help="Timed steps of each.")
@click.option("--seed", type=SEED, default=0, show_default=True)
@click.option(
    "--output",
    "outputs",
    multiple=True,
    type=click.Path(dir_okay=False),
    help="Also write a table (.md), the figures (.json) or a picture (.png, .svg, .pdf); may be repeated.",
)
@common_options
def compare_command(
    spec: str,
    budgets: str,
    peers: str,
    device: str | None,
    autocast: str | None,
    tolerance: float,
    time_limit: float,
    repeats: int,
    seed: int,
    outputs: tuple[str, ...],
    as_json: bool,
    debug: bool,
    **shape: Any,
) -> None:
    """Measure monetlite beside what people use today: one model, this machine, one run.

    Plain PyTorch, torch.utils.checkpoint on every block, checkpoint_sequential, selective checkpointing,
    torch.compile with a memory budget, what Checkmate and Gist may do, and monetlite at each budget and at each of
    the others' measured peaks.
    """

    def run() -> None:
        import torch

        from monetlite.checking.comparison import PEERS, compare
        from monetlite.models import build_model
        from monetlite.reporting.text_comparison import comparison_facts, print_comparison

        console, quiet = open_console(as_json)
        writers = [_writer(Path(output)) for output in outputs]
        chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
        if chosen == "cuda" and not torch.cuda.is_available():
            raise DeviceError("device 'cuda': this machine has no GPU that torch can use; leave --device out")
        built = build_model(spec, **shape_of(shape))
        with _Progress(quiet) as progress, prints_aside():
            comparison = compare(
                built.model,
                built.example_inputs,
                _listed(budgets),
                peers=PEERS if peers == "all" else _listed(peers),
                device=chosen,
                autocast=autocast or "",
                tolerance=tolerance,
                time_limit=time_limit,
                repeats=repeats,
                seed=seed,
                name=built.name,
                progress=progress,
            )
        for write in writers:
            write(comparison)
        if as_json:
            click.echo(json.dumps({**comparison_facts(comparison), "outputs": list(outputs)}))
        else:
            print_comparison(console, comparison)
            for output in outputs:
                click.echo(f"{WRITTEN_AS[Path(output).suffix.lower()]} written to {output}")

    guard(run, debug)


def _listed(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


def _writer(target: Path) -> Callable[[Any], None]:
    """What writes a comparison to a file of this kind.

    Raises:
        ModelError: no kind of file that there is, or a picture without matplotlib.
        MonetliteError: there is no such folder.
    """
    kind = target.suffix.lower()
    if kind not in WRITTEN_AS:
        raise ModelError(f"{target} is none of {', '.join(WRITTEN_AS)}; a file's ending says what is written to it")
    check_folder(target)
    from monetlite.core.files.atomic import write_atomically
    from monetlite.reporting.text_comparison import comparison_facts, comparison_markdown

    if kind == ".md":
        return lambda comparison: write_atomically(target, comparison_markdown(comparison))
    if kind == ".json":
        return lambda comparison: write_atomically(
            target, json.dumps(comparison_facts(comparison), indent=1) + "\n"
        )
    try:
        from monetlite.reporting.plots.comparison_plot import save_comparison
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("matplotlib"):
            raise
        raise ModelError(
            f"{target}: pictures need matplotlib, which is not installed: pip install matplotlib"
        ) from error
    return lambda comparison: save_comparison(comparison, target)


class _Progress:
    """A live line that says what is being done; None as the callback where nobody looks."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet

    def __enter__(self) -> Callable[[str], None] | None:
        if self._quiet:
            return None
        from rich.console import Console

        self._status = Console(stderr=True).status("beginning")
        self._status.start()
        return lambda text: self._status.update(text)

    def __exit__(self, *error: object) -> None:
        if not self._quiet:
            self._status.stop()
