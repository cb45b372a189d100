"""From a model to a schedule: trace, price and solve, in one call or with a profile of its own."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from monetlite.core.announcing import tell, warn
from monetlite.core.costs import Profile
from monetlite.core.errors import DeviceError
from monetlite.core.graph import LOSS_ONLY, OperatorGraph
from monetlite.core.interrupts import interrupts_kept
from monetlite.core.options import ALL_IMPLEMENTATIONS, PricingOptions, SolvingOptions, split_options
from monetlite.core.schedule import Schedule
from monetlite.core.units import format_bytes
from monetlite.planning.layouts import layouts_to_try, solve_layouts
from monetlite.profiling.step_additions import with_additions

if TYPE_CHECKING:
    from torch import nn

    from monetlite.tracing import Inputs

NOTEWORTHY_OUTPUTS_SHARE = 0.02
"""Share of a budget from which a model's outputs are warned of: as accurate as predicted peaks are."""
IGNORED_LOSS_BYTES = 2**18
"""Outputs smaller than this are never warned of."""


def optimize(
    model: "nn.Module",
    example_inputs: "Inputs",
    budget: str | int | float,
    *,
    device: str | None = None,
    optimizer: str | None = None,
    accumulate: bool = False,
    step_in_backward: bool = False,
    tolerance: float = 0.0,
    layout: str | None = None,
    compile: bool = False,
    outputs: str = LOSS_ONLY,
    implementations: str = ALL_IMPLEMENTATIONS,
    reserved: bool = False,
    time_limit: float = 60.0,
    gap: float = 1e-3,
    solver: str = "SCIP",
    seed: int = 0,
    starts: Iterable[Schedule] = (),
    runs_here: bool = False,
) -> Schedule:
    """Trace a model, price its operators and solve for a schedule within a budget.

    Args:
        model: in training mode.
        example_inputs: a tensor, a tuple of positional arguments, or a dict of keyword arguments.
        budget: peak of the training step: `"6GB"`, `"6GiB"`, bytes, or `"50%"` of plain training's peak.
        device: `"cpu"` or `"cuda"` to measure here, or the name of a device to estimate (`"a100-40gb"`); by default
            where the model is.
        optimizer: counts the state and step of `"sgd"`, `"momentum"`, `"adam"`, `"adamw"` or `"adamw8bit"`.
        accumulate: counts gradients that exist when a training step begins.
        step_in_backward: counts each gradient only until its parameter is updated, in a training script that calls
            `monetlite.step_in_backward(optimizer)`.
        tolerance: how far an operator's result may be from the default implementation's, as a fraction of the
            largest sum of magnitudes on the way. 0: only implementations that make the same bits. 1e-5: also
            float32 sums in another order. 1e-4: also normalisations differentiated from their output. 4e-3: also
            activations kept as bfloat16 for their gradient.
        layout: `"as_traced"`, `"channels_last"`, `"tiled_loss"` or `"tiled_rows"`; by default those that differ are
            tried where `tolerance` allows another order of sums, and the fastest schedule is returned.
        compile: has Inductor compile what lies between matrix products, convolutions and attention, each region
            by itself, where that is faster or takes less memory. Results are within 1e-5, so `tolerance` is at
            least that.
        outputs: what a model that computes its loss returns in training: `"loss"` for the loss and outputs of up to
            two dimensions; `"all"`, such as the logits of every token, which then stay in memory until the step
            ends; or `"trained"`, of which others than the loss are trained on, too.
        implementations: `"all"`, or `"default"` to store and recompute only, every operator running as it was
            traced (as Checkmate does, Jain et al., MLSys 2020).
        reserved: the budget is of the memory that torch's CUDA allocator reserves, which `nvidia-smi` shows, in a
            script that calls `monetlite.limit_reserved`; computed from the schedule's requests.
        time_limit: seconds until the best schedule found is returned, with a bound on how much better any schedule
            could be; tracing and measuring come on top.
        gap: part of its time by which a schedule may be slower than the fastest: once that is proven, it is
            returned.
        solver: of the boolean program: `"SCIP"`, `"HIGHS"`, or `"GUROBI"` where it is installed.
        seed: of the search; the same seed gives the same schedule as far as time limits allow.
        starts: schedules to begin from.
        runs_here: solves for the operators that run where the model is, though costs are estimated for another
            device.

    Raises:
        TraceError: the model can't be captured as one graph; names the line.
        ProfileError: an operator can't be measured.
        BudgetError: the budget can't be read.
        InfeasibleBudget: nothing fits, or nothing was found; says the smallest budget that is known to do.
        DeviceError: an unknown device, or one that this machine does not have.
        ModelError: no module, or an option that is out of range.
        SolverError: the solver is not installed.
    """
    options = {
        "device": device,
        "optimizer": optimizer,
        "accumulate": accumulate,
        "step_in_backward": step_in_backward,
        "layout": layout,
        "compile": compile,
        "outputs": outputs,
        "tolerance": tolerance,
        "implementations": implementations,
        "reserved": reserved,
        "time_limit": time_limit,
        "gap": gap,
        "solver": solver,
        "seed": seed,
    }
    return solve_model(model, example_inputs, budget, *split_options(options), starts=starts, runs_here=runs_here)


def solve_model(
    model: "nn.Module",
    example_inputs: "Inputs",
    budget: str | int | float,
    pricing: PricingOptions,
    solving: SolvingOptions,
    *,
    starts: Iterable[Schedule] = (),
    runs_here: bool = False,
) -> Schedule:
    """Trace, price and solve a model within a budget; args and errors as in `optimize`."""
    from monetlite.solving.annealing.compiling import await_compiled
    from monetlite.tracing import trace_layouts
    from monetlite.tracing.step_inputs import on_its_gpu, require_module

    require_module(model)
    runs_on = None if runs_here else pricing.device
    with on_its_gpu(model, example_inputs):
        layouts = layouts_to_try(pricing.layout, solving.tolerance, pricing.compile)
        graphs = trace_layouts(model, example_inputs, layouts, device=runs_on, outputs=pricing.outputs)
        profiles = [price(graph, pricing, solving) for graph in graphs]
    with interrupts_kept():
        await_compiled(tell)
        schedule = solve_layouts(profiles, budget, solving, layout=pricing.layout, starts=starts)
    if outside := unplanned_loss(profiles[0].graph, schedule.budget_bytes):
        warn(outside)
    return schedule


def profile(
    graph: OperatorGraph,
    device: str | None = None,
    *,
    optimizer: str | None = None,
    accumulate: bool = False,
    step_in_backward: bool = False,
    tolerance: float | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Profile:
    """Price every implementation of every operator of a graph.

    Args:
        graph: from `monetlite.trace`.
        device: `"cpu"` or `"cuda"` (torch's current GPU) to measure on this machine, or the name of a device to
            estimate (`"a100-40gb"`); by default, the device the graph was traced on.
        optimizer: `"sgd"`, `"momentum"`, `"adam"`, `"adamw"` or `"adamw8bit"`, to count its state and its step.
        accumulate: count gradients that exist when the step begins: gradient accumulation, or
            `zero_grad(set_to_none=False)`.
        step_in_backward: count each gradient only until its parameter is updated.
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
            warn(problem)
    options = PricingOptions(
        device=device, optimizer=optimizer, accumulate=accumulate, step_in_backward=step_in_backward
    )
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
    tolerance = None if solving is None else solving.tolerance
    if device := measured_here(graph, options):
        from monetlite.profiling.measured import measure_profile

        made = measure_profile(graph, device, tolerance=tolerance, progress=progress)
    else:
        from monetlite.profiling.estimate import estimate_profile

        made = estimate_profile(graph, options.device or graph.device)
        if tolerance is not None:
            made = made.within(tolerance)
    return with_additions(made, options)


def measured_here(graph: OperatorGraph, options: PricingOptions) -> str | None:
    """The device that a graph's costs are measured on; None if they are estimated.

    Raises:
        DeviceError: it was traced on another one.
    """
    device = str(options.device or graph.device).lower()
    if device not in ("cpu", "cuda"):
        return None
    if device != graph.device:
        raise DeviceError(
            f"the graph was traced on {graph.device}, so its operators can't be measured on {device}; "
            f"move the model and the inputs there before tracing, or name a device to estimate"
        )
    return device


def noteworthy_bytes(budget_bytes: int) -> float:
    """The size of outputs from which a loss of them matters."""
    return max(IGNORED_LOSS_BYTES, NOTEWORTHY_OUTPUTS_SHARE * budget_bytes)


def unplanned_loss(graph: OperatorGraph, budget_bytes: int) -> str:
    """A warning where a loss outside of the model may break the budget; empty where the outputs are small.

    A model that returns its loss is captured with it, and returns one number to differentiate.
    """
    if graph.outputs_bytes < noteworthy_bytes(budget_bytes):
        return ""
    return (
        f"what a loss of the model's outputs ({format_bytes(graph.outputs_bytes)}) keeps and takes is not counted "
        "(cross-entropy: as much once or twice more); a model that returns its loss has it planned"
    )
