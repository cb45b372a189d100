"""Options of the backend of `torch.compile`: budget, schedule file, and those of `monetlite.optimize`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monetlite.core.errors import ModelError
from monetlite.core.options import PricingOptions, SolvingOptions, split_options


@dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """Contents of `options=` of `torch.compile`: budget, schedule, and the options of `monetlite.optimize`.

    Attributes:
        budget: of the whole step; not needed if the schedule exists.
        schedule: a schedule file, read if it exists, else written; or a name such as zoo:resnet50@6GB.
        whole: refuse a model that is captured in several graphs.
    """

    budget: str | int | float | None
    schedule: str | None
    whole: bool
    pricing: PricingOptions
    solving: SolvingOptions

    @property
    def schedule_exists(self) -> bool:
        return self.schedule is not None and (self.schedule.startswith("zoo:") or Path(self.schedule).exists())


def compile_options(given: Mapping[str, Any]) -> CompileOptions:
    """Read `options=` of `torch.compile`.

    Raises:
        ModelError: an unknown option, a value that is out of range, or neither a budget nor a schedule file.
    """
    own = ("budget", "schedule", "whole")
    pricing, solving = split_options({name: value for name, value in given.items() if name not in own}, own)
    chosen = CompileOptions(
        budget=given.get("budget"),
        schedule=given.get("schedule"),
        whole=given.get("whole", False),
        pricing=pricing,
        solving=solving,
    )
    if chosen.budget is None and not chosen.schedule_exists:
        if chosen.schedule is not None:
            raise ModelError(
                f"there is no schedule file {chosen.schedule}. With a budget, one is solved and kept there: "
                f"options={{'schedule': {chosen.schedule!r}, 'budget': '6GB'}}"
            )
        raise ModelError(
            "backend 'monetlite' needs a budget: torch.compile(model, backend='monetlite', "
            "options={'budget': '6GB'}), or options={'schedule': FILE} with a schedule file"
        )
    if pricing.step_in_backward:
        raise ModelError(
            "a graph of torch.compile has parameters among its inputs, so step_in_backward can't be planned; "
            "monetlite.within(model, budget=..., step_in_backward=True) plans it"
        )
    return chosen
