"""Names of the files that `solve` and `zoo get` write where none is given."""

import re
from pathlib import Path

from monetlite.cli.command_options import ModelChoice
from monetlite.core.costs import Profile
from monetlite.core.devices import MEASURED_HERE, find_device
from monetlite.core.graph import LOSS_ONLY
from monetlite.core.options import ALL_IMPLEMENTATIONS, PricingOptions, SolvingOptions


def schedule_name(choice: ModelChoice, budget: str, pricing: PricingOptions, solving: SolvingOptions) -> Path:
    """Name a schedule's file: `MODEL_BATCH_BUDGET.yaml`, with a part for every other option that was given.

    >>> choice = ModelChoice(spec="hf:gpt2", batch=8, sequence_length=512, autocast="bfloat16")
    >>> str(schedule_name(choice, "8 GB", PricingOptions(device="rtx-4060"), SolvingOptions()))
    'hf-gpt2_8x512_8GB_rtx-4060_autocast-bfloat16.yaml'
    """
    assert choice.spec is not None
    model = re.sub(r"\.(py|json)\b", "", choice.spec.rstrip("/").rpartition("/")[2])
    sizes = [
        choice.batch,
        *(choice.input_size or ()),
        *([choice.sequence_length] if choice.sequence_length else []),
    ]
    device = pricing.device
    parts = [
        re.sub(r"[^\w.+-]+", "-", model),
        "x".join("" if size is None else str(size) for size in sizes),
        budget.replace("%", "pct").replace(" ", "").replace(",", "."),
        device if device is None or device in MEASURED_HERE else find_device(device).name,
        choice.dtype,
        f"autocast-{choice.autocast}" if choice.autocast else None,
        pricing.optimizer,
        "accumulate" if pricing.accumulate else None,
        "step-in-backward" if pricing.step_in_backward else None,
        "reserved" if solving.reserved else None,
        f"within{solving.tolerance:g}" if solving.tolerance else None,
        pricing.layout,
        "compiled" if pricing.compile else None,
        None if pricing.outputs == LOSS_ONLY else f"{pricing.outputs}-outputs",
        None if solving.implementations == ALL_IMPLEMENTATIONS else f"{solving.implementations}-implementations",
    ]
    return Path("_".join(filter(None, parts)) + ".yaml")


def name_from_profile(
    profile: Profile, batch: int, budget: str, layout: str | None, solving: SolvingOptions
) -> Path:
    """Name a schedule's file by what a profile file says."""
    graph, source = profile.graph, profile.source
    choice = ModelChoice(
        spec=graph.name,
        batch=batch,
        input_size=source.input_size if source else None,
        sequence_length=source.sequence_length if source else None,
        dtype=source.dtype if source else None,
        autocast=graph.autocast or None,
    )
    pricing = PricingOptions(
        device=profile.device,
        optimizer=profile.optimizer,
        accumulate=profile.accumulate,
        step_in_backward=profile.step_in_backward,
        layout=layout,
        outputs=graph.outputs,
    )
    return schedule_name(choice, budget, pricing, solving)


def name_of_copy(file: str, device: str) -> Path:
    """Name a copy of a schedule's file: with its device, if that is the name of its folder, as in a collection."""
    path = Path(file)
    return Path(f"{path.stem}_{device}.yaml" if path.parent.name == device else path.name)
