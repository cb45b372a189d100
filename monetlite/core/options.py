"""Options, defined once: `PricingOptions` of the costs, and `SolvingOptions` of the search for a schedule.

The public functions, `MONeTWrapper`, the `torch.compile` backend and the commands take these names, defaults and
explanations from here, and every layer passes the two objects on whole.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from typing import Any

from monetlite.core.costs import Profile
from monetlite.core.devices import require_device
from monetlite.core.errors import ModelError
from monetlite.core.graph import ALL_OUTPUTS, LAYOUTS, LOSS_ONLY, TRAINED_OUTPUTS
from monetlite.core.spelling import close_matches

REORDERED_SUMS = 1e-5
"""Tolerance from which another order of sums is allowed: other layouts, and regions that Inductor compiles."""
ALL_IMPLEMENTATIONS, DEFAULT_IMPLEMENTATIONS = "all", "default"
OPTIMIZERS = ("sgd", "momentum", "adam", "adamw", "adamw8bit")
SOLVERS = ("SCIP", "HIGHS", "GUROBI")
OUTPUTS = (LOSS_ONLY, ALL_OUTPUTS, TRAINED_OUTPUTS)


def _option(default: Any, explanation: str, choices: Collection[str] = ()) -> Any:
    return field(default=default, metadata={"help": explanation, "choices": tuple(choices)})


def _refuse_unknown(options: "PricingOptions | SolvingOptions") -> None:
    """Refuse values that are none of an option's choices; None is one where it is the default."""
    for item in fields(options):
        value, known = getattr(options, item.name), item.metadata["choices"]
        if not known or value in known or (value is None and item.default is None):
            continue
        name = value if isinstance(value, str) else getattr(value, "__name__", type(value).__name__)
        there = f"there are {', '.join(known)}{close_matches(name, known)}"
        if isinstance(value, str):
            raise ModelError(f"{item.name} {value!r} is unknown; {there}")
        raise ModelError(f"{item.name} takes a name, not an object ({name}); {there}")


@dataclass(frozen=True, kw_only=True)
class PricingOptions:
    """Options of pricing: device, layout, what the step returns, and what it counts.

    Raises:
        ModelError: an unknown optimizer or layout, unknown outputs, or `step_in_backward` without an optimizer or
            with `accumulate`.
        DeviceError: an unknown device.
    """

    device: str | None = _option(
        None, "cpu or cuda to measure here, or the name of a device to estimate; by default where the model is."
    )
    optimizer: str | None = _option(None, "Count this optimizer's state and step.", OPTIMIZERS)
    accumulate: bool = _option(
        False,
        "Count gradients that exist when a training step begins: gradient accumulation, or "
        "zero_grad(set_to_none=False).",
    )
    step_in_backward: bool = _option(
        False,
        "Count each gradient only until its parameter is updated, in a training script that calls "
        "monetlite.step_in_backward(optimizer).",
    )
    layout: str | None = _option(
        None,
        "Images with channels innermost, or head and loss of a language model in tiles; by default all are tried "
        "that the tolerance allows.",
        LAYOUTS,
    )
    compile: bool = _option(
        False,
        "Have Inductor compile what lies between matrix products, convolutions and attention, where that is faster "
        "or smaller. Implies a tolerance of 1e-5.",
    )
    outputs: str = _option(
        LOSS_ONLY,
        "What a model that computes its loss returns in training: the loss and outputs of up to two dimensions; "
        "all, such as the logits of every token, which then stay in memory; or all, of which others than the loss "
        "are trained on, too.",
        OUTPUTS,
    )

    def __post_init__(self) -> None:
        require_device(self.device)
        _refuse_unknown(self)
        if self.step_in_backward and self.optimizer is None:
            raise ModelError(
                "step_in_backward counts an optimizer's step: say which, such as optimizer='adamw' "
                "(--optimizer adamw)"
            )
        if self.step_in_backward and self.accumulate:
            raise ModelError(
                "step_in_backward updates each parameter when its gradient arrives, so no gradients are left to "
                "accumulate; leave one of the two out"
            )


@dataclass(frozen=True, kw_only=True)
class SolvingOptions:
    """Options of solving for a schedule.

    Raises:
        ModelError: an unknown solver, or a value that is no number, or out of range.
    """

    tolerance: float = _option(
        0.0,
        "Largest relative difference of an operator's result from plain training's: 0 for the same bits, 1e-5 for "
        "sums in another order, 1e-4 for normalisations differentiated from their output, 4e-3 for activations "
        "kept as bfloat16.",
    )
    implementations: str = _option(
        ALL_IMPLEMENTATIONS,
        "default: store and recompute only; every operator runs as it was traced.",
        (ALL_IMPLEMENTATIONS, DEFAULT_IMPLEMENTATIONS),
    )
    reserved: bool = _option(
        False,
        "The budget is of the memory that torch's CUDA allocator reserves (nvidia-smi shows the CUDA context, "
        "too), in a training script that calls monetlite.limit_reserved(BUDGET).",
    )
    time_limit: float = _option(60.0, "Seconds until the best schedule found is returned.")
    gap: float = _option(
        1e-3,
        "Part of its time by which a schedule may be slower than the fastest. Once that is proven, solving ends.",
    )
    solver: str = _option("SCIP", "Solver of the boolean program.", SOLVERS)
    seed: int = _option(0, "Seed of the search.")

    def __post_init__(self) -> None:
        if isinstance(self.solver, str):
            object.__setattr__(self, "solver", self.solver.upper())
        _refuse_unknown(self)
        if not (isinstance(self.tolerance, Real) and 0 <= self.tolerance < 1):
            raise ModelError(
                f"tolerance {self.tolerance!r} is not a fraction; 0 asks for the same bits, "
                "1e-5 allows sums in another order"
            )
        if not (isinstance(self.time_limit, Real) and 0 < self.time_limit < math.inf):
            raise ModelError(f"time_limit {self.time_limit!r} is not a number of seconds above 0")
        if not (isinstance(self.gap, Real) and 0 <= self.gap < 1):
            raise ModelError(f"gap {self.gap!r} is not a fraction; 0.01 allows 1% more time than the fastest")
        if not (isinstance(self.seed, Integral) and self.seed >= 0):
            raise ModelError(f"seed {self.seed!r} is not an integer of at least 0")
        # numpy's numbers can't be written to files.
        for name, number in (("tolerance", float), ("time_limit", float), ("gap", float), ("seed", int)):
            object.__setattr__(self, name, number(getattr(self, name)))

    def allowed(self, profile: Profile) -> Profile:
        """A profile with only the implementations that may be chosen, beside the defaults."""
        everything = self.implementations == ALL_IMPLEMENTATIONS
        return profile.restricted(lambda item: everything and item.tolerance <= self.tolerance)


def split_options(
    options: Mapping[str, Any], others: Collection[str] = ()
) -> tuple[PricingOptions, SolvingOptions]:
    """Make the two option objects from keyword arguments.

    Args:
        options: values by name.
        others: further names that the caller takes, for the message.

    Raises:
        ModelError: a name that is no option, or a value that is out of range.
    """
    pricing = {item.name for item in fields(PricingOptions)}
    prices = PricingOptions(**{name: value for name, value in options.items() if name in pricing})
    rest = {name: value for name, value in options.items() if name not in pricing}
    return prices, allowing_compiled(prices, solving_options(rest, {*pricing, *others}))


def solving_options(options: Mapping[str, Any], others: Collection[str] = ()) -> SolvingOptions:
    """Make options of solving from keyword arguments; args and errors as in `split_options`."""
    known = sorted({*(item.name for item in fields(SolvingOptions)), *others})
    if unknown := set(options).difference(known):
        name = min(unknown)
        raise ModelError(f"there is no option {name!r}; there are {', '.join(known)}{close_matches(name, known)}")
    return SolvingOptions(**options)


def allowing_compiled(pricing: PricingOptions, solving: SolvingOptions) -> SolvingOptions:
    """Options of solving with the tolerance that compiled regions need, where they are asked for."""
    if not pricing.compile:
        return solving
    return replace(solving, tolerance=max(solving.tolerance, REORDERED_SUMS))
