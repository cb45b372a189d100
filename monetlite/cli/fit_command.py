"""`monetlite fit`: whether a training fits a card, and the fastest setting that does, on one screen."""

import functools
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from monetlite.cli.command_options import (
    DEFAULT_ESTIMATE,
    ModelChoice,
    autocast_option,
    options_of,
    size_options,
    time_limit_option,
)
from monetlite.cli.exits import EXIT_INFEASIBLE, CommandExit
from monetlite.cli.option_types import BUDGET_BYTES, DEVICE_NAME, Integer, ReadBy
from monetlite.cli.running import command
from monetlite.cli.subjects import build, chosen_device
from monetlite.cli.terminal import Terminal
from monetlite.core.devices import find_device
from monetlite.core.errors import DeviceError, ModelError
from monetlite.core.options import PricingOptions, SolvingOptions
from monetlite.core.units import parse_budget
from monetlite.models import BuiltModel, check_spelling
from monetlite.models.library_models import is_cached, local_path, split_adapters
from monetlite.models.published import find_published

if TYPE_CHECKING:
    from monetlite.planning.card_fit import CardMemory
    from monetlite.reporting.fit_lines import TrainingRequest

DEFAULT_LENGTHS = (2048, 1024, 512)
"""Lengths of a batch of one, of which the first that a model takes is the default."""
MAX_RANK = 4096


def model_to_fit(text: str) -> str:
    """A model by name; also a folder or `config.json` of a transformers model, and published ones without `hf:`."""
    bare = ":" not in text or os.path.exists(text)
    folder = os.path.isfile(os.path.join(text, "config.json"))
    return check_spelling(
        f"hf:{text}" if bare and (folder or text.endswith(".json") or find_published(text)) else text
    )


@command(
    "fit",
    click.argument("spec", metavar="MODEL", type=ReadBy("MODEL", model_to_fit)),
    click.option(
        "--gpu",
        "device",
        type=DEVICE_NAME,
        help="The card: rtx-4090, a100-80gb, t4, …; cuda for the one that is here, cpu for this machine's memory. "
        f"By default the GPU if there is one, else {DEFAULT_ESTIMATE}.",
    ),
    click.option("--full", is_flag=True, help="Train all weights (the default)."),
    click.option("--lora", type=Integer(1, MAX_RANK), help="Train LoRA adapters of this rank alone (peft)."),
    size_options(batch="a network's own, and 1 for a language model"),
    options_of(PricingOptions, "optimizer", default="adamw", show_default=True),
    options_of(PricingOptions, "accumulate"),
    autocast_option(),
    click.option(
        "--budget", type=BUDGET_BYTES, help="Memory for the step in place of what the card has left: 20GB."
    ),
    options_of(
        SolvingOptions,
        "tolerance",
        default=1e-5,
        help="Largest relative difference of an operator's result from plain training's; 0 leaves out what differs "
        "in bits.",
    ),
    time_limit_option(8.0, "Seconds of solving; tracing comes on top."),
    rare=("input_size", "tolerance", "time_limit", "autocast"),
)
def fit_command(
    terminal: Terminal,
    choice: ModelChoice,
    pricing: PricingOptions,
    solving: SolvingOptions,
    full: bool,
    lora: int | None,
    budget: str | None,
) -> None:
    """See whether a model trains on a card, what takes the memory, and the fastest setting that fits.

    Nothing is downloaded or run. MODEL is hf:Qwen/Qwen3-8B or another published model, a folder with a config.json,
    path/to/file.py:build, or any other name that --model takes.
    """
    choice = _adapted(choice, full, lora)
    device = chosen_device(pricing.device, terminal, DEFAULT_ESTIMATE, "name a card to estimate", option="--gpu")
    from monetlite.planning.card_fit import fit_card
    from monetlite.planning.model_steps import ModelSteps
    from monetlite.reporting.fit_lines import lines_to_paste
    from monetlite.reporting.text_fit import fit_facts, print_fit

    card = _card(device, None if budget is None else parse_budget(budget))
    built, choice = _built(choice, terminal)
    model = ModelSteps(
        built=built,
        rebuild=functools.partial(_rebuilt, choice),
        pricing=replace(pricing, device=device),
        solving=solving,
        autocast=choice.autocast,
    )
    request = _request(built, choice, pricing)
    with terminal.line(f"fitting {built.name} to {card.title}") as tell:
        description = built.description.partition("; input")[0]
        answer = fit_card(model, card, solving, tell)
    lines = lines_to_paste(answer, request)
    if terminal.as_json:
        terminal.print_json(fit_facts(answer, description, lines))
    else:
        print_fit(terminal.console, answer, f"{description}, {request.dtype}", lines)
    if answer.fastest is None:
        raise CommandExit(EXIT_INFEASIBLE)


def _adapted(choice: ModelChoice, full: bool, lora: int | None) -> ModelChoice:
    """The model with adapters, if they were asked for."""
    assert choice.spec is not None
    if full and lora:
        raise click.UsageError("--full and --lora exclude each other")
    if lora and not choice.spec.startswith("hf:"):
        raise click.UsageError(
            f"--lora is for models of transformers (hf:...); let {choice.spec} return a model with adapters, and "
            "leave the option out"
        )
    if lora and "+lora" in choice.spec:
        raise click.UsageError(f"{choice.spec} names adapters already; leave --lora out")
    return replace(choice, spec=f"{choice.spec}+lora{lora}") if lora else choice


def _card(device: str, budget_bytes: int | None) -> "CardMemory":
    from monetlite.planning.card_fit import CardMemory, card_memory

    if device == "cuda":
        import torch

        total_bytes = torch.cuda.get_device_properties(0).total_memory
        return CardMemory(device, torch.cuda.get_device_name(0), total_bytes, budget_bytes)
    if device == "cpu":
        from monetlite.profiling.memory_use import available_bytes

        free_bytes = available_bytes() or budget_bytes
        if free_bytes is None:
            raise DeviceError("this system does not say how much memory is free; give it: --budget 16GB")
        return CardMemory(device, "this machine's CPU", free_bytes, budget_bytes)
    return card_memory(find_device(device), budget_bytes)


def _rebuilt(choice: ModelChoice, batch: int | None, length: int | None) -> BuiltModel:
    """The model at another batch and length, or at its own."""
    sized = replace(choice, batch=batch or choice.batch, sequence_length=length or choice.sequence_length)
    return build(sized, None, meta=True)


def _built(choice: ModelChoice, terminal: Terminal) -> tuple[BuiltModel, ModelChoice]:
    """The model, and the sizes that it has; of a language model, by default those of one long sequence."""
    assert choice.spec is not None
    if choice.spec.startswith("hf:") and choice.input_size is None:
        asked = choice.sequence_length
        for length in DEFAULT_LENGTHS if asked is None else (asked,):
            sized = replace(choice, batch=choice.batch or 1, sequence_length=length)
            try:
                return build(sized, terminal, meta=True), sized
            except ModelError:
                if asked is not None:
                    raise
                # A model of images, or of shorter sequences.
    return build(choice, terminal, meta=True), choice


def _request(built: BuiltModel, choice: ModelChoice, pricing: PricingOptions) -> "TrainingRequest":
    """Facts that the lines to paste are made of."""
    from monetlite.reporting.fit_lines import TrainingRequest

    assert choice.spec is not None
    library, _, name = choice.spec.partition(":")
    base, rank = split_adapters(name) if library == "hf" else ("", 0)
    model: Any = built.model.get_base_model() if rank else built.model  # type: ignore[operator]  # peft's
    weights = {parameter.dtype for parameter in built.model.parameters()}
    return TrainingRequest(
        model_class=type(model).__name__ if library == "hf" else "",
        loaded_from=_loaded_from(base) if library == "hf" else "",
        dtype=", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in weights)),
        autocast=choice.autocast or "",
        rank=rank,
        optimizer=pricing.optimizer or "adamw",
        accumulate=pricing.accumulate,
        settings_by_new_name=library == "hf" and hasattr(model, "activation_checkpointing_enable"),
    )


def _loaded_from(name: str) -> str:
    """The name or folder that `from_pretrained` takes; a folder comes first, as it does for `--model`."""
    if path := local_path(name):
        return path if os.path.isdir(path) else os.path.dirname(path) or "."
    published = find_published(name)
    if published:
        return published.hub_name if "/" in published.hub_name else ""
    return name if is_cached(name) else ""
