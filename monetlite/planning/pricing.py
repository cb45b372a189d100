"""Prices of a graph's operators: measured on this machine, or estimated for a named device."""

import warnings
from collections.abc import Callable

from monetlite.core.costs import Profile
from monetlite.core.errors import DeviceError
from monetlite.core.graph import OperatorGraph
from monetlite.core.options import PricingOptions, SolvingOptions


def profile(
    graph: OperatorGraph,
    device: str | None = None,
    *,
    optimizer: str | None = None,
    accumulate: bool = False,
    tolerance: float | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Profile:
    """Price every implementation of every operator of a graph.

    Args:
        graph: from `monetlite.trace`.
        device: `"cpu"` or `"cuda"` to measure on this machine, or the name of a device to estimate
            (`"a100-40gb"`); by default, the device the graph was traced on.
        optimizer: `"sgd"`, `"momentum"`, `"adam"` or `"adamw"`, to count its state and its step in the peak.
        accumulate: count gradients that exist when the step begins: gradient accumulation, or
            `zero_grad(set_to_none=False)`.
        tolerance: price only what can be chosen within this tolerance (see `optimize`), which is quicker.
        progress: called with (calls measured, calls in all) while measuring.

    Raises:
        DeviceError: an unknown device, or one that this machine does not have.
        ProfileError: an operator can't be measured.
        ModelError: an unknown optimizer, or a tolerance that is not a fraction.
    """
    if device not in (None, "cpu", "cuda"):
        from monetlite.profiling.estimate import attention_problem

        if problem := attention_problem(graph, device):
            warnings.warn(problem, stacklevel=2)
    options = PricingOptions(device=device, optimizer=optimizer, accumulate=accumulate)
    return price(graph, options, None if tolerance is None else SolvingOptions(tolerance=tolerance), progress)


def price(
    graph: OperatorGraph,
    options: PricingOptions,
    solving: SolvingOptions | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Profile:
    """Price a graph, though the device may run other operators than it has; args and errors as in `profile`.

    Without `solving`, implementations of any tolerance are priced.
    """
    from monetlite.profiling.step_additions import with_accumulation, with_optimizer

    tolerance = None if solving is None else solving.tolerance
    device = str(options.device or graph.device)
    if device.lower() in ("cpu", "cuda"):
        from monetlite.profiling.measured import measure_profile

        device = device.lower()
        if device != graph.device:
            raise DeviceError(
                f"the graph was traced on {graph.device}, so its operators can't be measured on {device}; "
                f"move the model and the inputs there before tracing, or name a device to estimate"
            )
        made = measure_profile(graph, device, tolerance=tolerance, progress=progress)
    else:
        from monetlite.profiling.estimate import estimate_profile

        made = estimate_profile(graph, device)
        if tolerance is not None:
            made = made.within(tolerance)
    if options.optimizer is not None:
        made = with_optimizer(made, options.optimizer)
    return with_accumulation(made) if options.accumulate else made
