"""Training by schedules: the core that `MONeTWrapper` and `within` stand in front of.

A training step, in the order of this file: `__call__` finds a program for the inputs, or has one made (`_first`).
For that, the step is captured as one graph, and `StepPlans` finds a schedule that serves it, or solves for one.
`_partition` turns the graph into two programs, forward and backward, by the schedule's steps. The programs run, and
gradients reach autograd as they become ready (`gradient_delivery`).
"""

import contextlib
import functools
import re
import sys
from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any, TypeAlias

import torch
from torch import fx, nn

from monetlite.core.announcing import warn
from monetlite.core.errors import InfeasibleBudget, ModelError, ModelRaises, TraceError
from monetlite.core.graph import COMPILED_LAYOUTS, LOSS_ONLY
from monetlite.core.options import split_options
from monetlite.core.schedule import Schedule
from monetlite.core.steps import Step
from monetlite.core.units import check_budget
from monetlite.core.weak_calls import weakly
from monetlite.fx.torch_internals.patching import patched
from monetlite.fx.torch_internals.torch_dispatch import is_forward_mode, is_transformed, is_watched
from monetlite.fx.torch_internals.torch_dynamo import (
    REFUSALS,
    FailOnRecompileLimitHit,
    allow_programs,
    left_alone,
    switched_on,
)
from monetlite.fx.torch_internals.torch_modules import call_itself, called_instead
from monetlite.fx.torch_internals.torch_varying import VaryingNumbers
from monetlite.fx.whole_numbers import WithoutNumbers
from monetlite.operators.program_calls import GuardFailed
from monetlite.runtime.backward_updates import refuse_without_updates
from monetlite.runtime.breaks import MANY_CAPTURING
from monetlite.runtime.buffers import eager
from monetlite.runtime.gradient_delivery import Unplanned, delivering_backend
from monetlite.runtime.guarded_outputs import guard_outputs
from monetlite.runtime.lowering import lower
from monetlite.runtime.model_in_pieces import ModelInPieces
from monetlite.runtime.model_schedules import ModelSchedules
from monetlite.runtime.optimizer_state import watch_state
from monetlite.runtime.pieces import PiecewiseTraining
from monetlite.runtime.serving import shapes_of
from monetlite.runtime.step_plans import StepPlans
from monetlite.tracing.attention_masks import is_known, masks_as_plain, masks_known, with_known_masks
from monetlite.tracing.capture import (
    MAX_PROGRAMS,
    Compiler,
    Joint,
    compile_step,
    many_programs,
    refuse_uninitialized,
    run_captured,
    training_step,
)
from monetlite.tracing.names import longest_loop
from monetlite.tracing.operator_graph import Traced
from monetlite.tracing.refusals import PIECES
from monetlite.tracing.step_inputs import Arguments, gpu_of, on_its_gpu, refuse_several_devices, require_module

MANY_CALLS, MANY_OF_A_LINE = 2000, 50
"""Calls in a captured model, and those that one line makes in one module, of which a person is told."""
_WAITED_GAP, _WAITED_SECONDS = 5e-3, 20.0
"""Gap and time limit of a plan that the first step waits for, where nobody asked to wait."""
MANY_SOLVED = 8
"""Schedules that are solved for one model at training time, before a person is told how to need fewer."""
DATA_PARALLEL = (
    "nn.DataParallel copies a model to each GPU in every step, and a plan is of one GPU. Train in a process for "
    "each GPU: torchrun and DistributedDataParallel(model), which is faster, too. transformers' Trainer takes "
    "DataParallel where it sees several GPUs: start it by torchrun, or show it one (CUDA_VISIBLE_DEVICES=0)"
)
_AMOUNT = re.compile(r"[\d.,]+\s*(%|b|[kmgt]i?b?)", re.IGNORECASE)
OneSchedule: TypeAlias = Schedule | str | PathLike[str]


class ScheduledTraining:
    """The training steps of one model, by its schedules.

    A schedule solved for some inputs also serves smaller ones: a smaller batch, a shorter sequence. Of those that
    serve a step, the one for the smallest inputs is taken. If none does, one is solved for, within the budget if
    there is one.

    Attributes:
        model: the module.
        schedules: of the module.
        plans: of the captured steps.
        compile, whole: see `MONeTWrapper`.
    """

    def __init__(
        self,
        model: nn.Module,
        schedule: OneSchedule | Sequence[OneSchedule] = (),
        *,
        budget: str | int | float | None = None,
        compile: bool = False,
        wait: bool = False,
        whole: bool = False,
        **options: Any,
    ) -> None:
        if budget is None and _is_amount(schedule):
            raise ModelError(
                f"{schedule!r} stands where a schedule goes; give a budget by its name: budget={schedule!r}"
            )
        if budget is not None:
            check_budget(budget)
        several = schedule if isinstance(schedule, Sequence) and not isinstance(schedule, str) else (schedule,)
        given = [loaded(item) for item in several]
        if not given and budget is None:
            raise ModelError("give a schedule, or a budget to solve one for: budget='6GB'")
        _, solving = split_options(options)
        if options and budget is None:
            raise ModelError(f"{min(options)!r} is an option of solving, which needs a budget")
        if given and budget is not None:
            options = {"outputs": given[0].outputs, **options}
        outputs = options.get("outputs") or (given[0].outputs if given else LOSS_ONLY)
        if compile and budget is not None:
            options = {**options, "compile": True}
        regions_given = any(item.layout in COMPILED_LAYOUTS.values() for item in given)
        self.model, self.compile, self.whole = model, compile and budget is None and not regions_given, whole
        # Inductor's programs and what the allocator reserves are too costly to plan twice.
        if budget is not None and (compile or solving.reserved) and not wait:
            limit = {} if solving.reserved else {"time_limit": _WAITED_SECONDS}
            wait, options = True, {"gap": _WAITED_GAP, **limit, **options}
        self.schedules = ModelSchedules(model, given, budget=budget, options=options, wait=wait)
        self.plans = StepPlans(self.schedules, outputs)
        self._pieces: ModelInPieces | None = None  # if it can't be captured whole
        self._warned_of_shapes = self._warned_of_watching = False
        self._values_changed = 0
        """Steps that were captured for another value than before, where inputs have known shapes."""
        # Schedules that are solved beforehand, and what Inductor compiles, are of graphs in which each number is a
        # constant.
        self._numbers = VaryingNumbers(fixed=budget is None or compile, counting=True)
        self._forget()
        watch_state(self.schedules)
        if compile or regions_given:
            self.plans.sizes.fix("what Inductor compiles is for fixed sizes")

    @functools.cached_property
    def _looks_at_masks(self) -> bool:
        """True if plans may be for masks of ones only. Without a budget, they are as the schedules given are."""
        given = (spec for schedule in self.schedules.known for spec in schedule.inputs.values())
        return masks_known(self.model) and (self.schedules.budget is not None or any(map(is_known, given)))

    def _forget(self) -> None:
        """Have programs made anew."""
        self._step: Callable[..., Any] | None = None  # the compiled training step
        self._ready: set[object] = set()  # signatures of inputs that it has a program for
        self.plans.forget()

    @left_alone
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass of a training step, whose backward pass autograd runs; all else as ever.

        Raises:
            The errors of `MONeTWrapper`.
        """
        if not (self.model.training and torch.is_grad_enabled()):
            return call_itself(self.model, *args, **kwargs)
        if is_transformed() or is_forward_mode():
            raise ModelError(
                "a scheduled training step can't be transformed by torch.func (grad, vmap, jacrev, ...), or run in "
                "forward-mode AD: its backward pass is a program of its own. Transform the model itself: "
                "wrapper.model, or the model after monetlite.release(model)"
            )
        if is_watched():
            self._warn_of_watching()
            return call_itself(self.model, *args, **kwargs)
        call = Arguments(args, kwargs)
        if self._looks_at_masks:
            call = with_known_masks(self.model, call)
        with on_its_gpu(self.model, (args, kwargs)), switched_on():
            if any([self.plans.count_loss(), self.plans.count_runs(call)]):  # both are counted
                self._forget()
            self.plans.between_steps()
            if self.schedules.runs.alone:
                self.plans.peak.step_begins(self.model, call, weakly(self._running))
            else:
                self.plans.peak.drop()  # a plan's peak is of one run
            raised: ModelRaises | None = None
            try:
                output, detached = self._train_as_planned(call)
            except FailOnRecompileLimitHit:
                warn(many_programs())
                self._forget()
                output, detached = self._train_as_planned(call)
            except InfeasibleBudget as error:
                raise self.schedules.runs.of_share(error) from None
            except ModelRaises as error:
                raised = error
            if raised is not None:
                self._run_itself(call)
                raise raised
            self.plans.peak.step_gave(output)
            if detached is None and self._pieces is None:
                self.plans.measure_loss(output, call)
        return output if detached is None else guard_outputs(output, detached)

    def _running(self) -> Schedule | None:
        """The schedule that the present step runs by."""
        return self.schedules.current

    def _run_itself(self, call: Arguments) -> None:
        """Run the model as it is on inputs on which it seems to raise an exception, for the caller to get that."""
        with torch.no_grad():  # and with what it draws, as in plain training
            call_itself(self.model, *call.args, **call.kwargs)

    def _train_as_planned(self, call: Arguments) -> Any:
        """Run a step, and once more where it ended before anything of it had run, with what was missing."""
        try:
            return self._train(call)
        except Unplanned as unplanned:
            if not self.plans.plan_sizes(unplanned, call):
                self._forget()
            return self._train_as_planned(call)
        except GuardFailed as failed:
            # Implementations that the weights rule out are not used again.
            self.schedules.search.fitting.avoid(failed.operators)
            self._forget()
            return self._train(call)

    def _train(self, call: Arguments) -> Any:
        if self._pieces is not None:
            return self._in_pieces(call)
        if self._ready & self.plans.sizes.signatures(call, self._numbers.served_types):
            # Where something other than the inputs is new since the program was made (a parameter is frozen, a
            # submodule in evaluation mode, autocast on), Dynamo wants another program. Nothing has run then.
            with contextlib.suppress(*REFUSALS), allow_programs(MAX_PROGRAMS):
                return self._run(call)
        return self._first(call)

    def _first(self, call: Arguments) -> Any:
        """Run a step for inputs of a new signature, which captures and lowers it."""
        schedules = self.schedules
        if not self.compile:
            self.plans.sizes.note(call)
        if len({shapes_of(known) for known in self._ready}) >= MAX_PROGRAMS:
            self._forget()  # Dynamo keeps no more
            self._warn_of_shapes()
        refuse_other_gpu(self.model, call)
        _refuse_shards(self.model)
        refuse_uninitialized(self.model)
        refuse_several_devices(self.model, tuple(call))
        if schedules.updates_in_backward:
            refuse_without_updates(self.model)
        schedules.look_at(call)
        serving = schedules.serving(call)
        if not serving and schedules.budget is None:
            raise schedules.unserved(call)
        if not serving and schedules.solved == MANY_SOLVED:
            warn(
                f"{MANY_SOLVED} schedules have been solved, each for larger inputs than any before; begin with the "
                "largest, whose schedule serves all, or pad to a few sizes (pad_to_multiple_of in the collator)"
            )
        schedules.current = serving[0] if serving else None
        output = self._capture_or_begin_pieces(call)
        signature = self.plans.sizes.signature(call, self._numbers.served_types)
        if shapes_of(signature) in map(shapes_of, self._ready):
            self._values_changed += 1
            if self._values_changed == MANY_CAPTURING:
                warn(many_programs(kept=MANY_CAPTURING))
        self._ready.add(signature)
        return output

    def _warn_of_watching(self) -> None:
        if not self._warned_of_watching:
            self._warned_of_watching = True
            warn(
                "a step in which torch.jit.trace or a TorchDispatchMode (as FlopCounterMode) sees each operator "
                "runs as in plain training, in plain training's memory"
            )

    def _warn_of_shapes(self) -> None:
        if not self._warned_of_shapes:
            self._warned_of_shapes = True
            warn(
                f"inputs came in more than {MAX_PROGRAMS} shapes. Each is compiled when it comes, for seconds, "
                f"and after {MAX_PROGRAMS} all are compiled anew; pad to fewer (pad_to_multiple_of)"
            )

    def _capture_or_begin_pieces(self, call: Arguments) -> Any:
        """Run a step for which a program has to be made; with a budget, in pieces if it can't be captured whole."""
        schedules, search = self.schedules, self.schedules.search
        try:
            return self._capture(call)
        except TraceError as error:
            if schedules.budget is None:
                raise
            barring = {
                "whole": self.whole,
                "reserved": search.solving.reserved,
                "step_in_backward": search.pricing.step_in_backward,
            }
            if names := [f"{name}=True" for name, given in barring.items() if given]:
                advice = f"Without {' and '.join(names)}, it trains in pieces"
                raise type(error)(str(error).replace(PIECES, advice)) from error.__cause__
            training = PiecewiseTraining(
                self.model,
                schedules.budget,
                search.pricing,
                search.solving,
                schedules.wait,
                error,
                schedules.before_bytes,
            )
            self._pieces = ModelInPieces(self.model, training, self.plans.outputs)
        try:
            return self._in_pieces(call)
        except BaseException:
            self._pieces = None  # the model may well be captured whole on other inputs
            raise

    def _in_pieces(self, call: Arguments) -> Any:
        """Run a step of a model that can't be captured whole."""
        assert self._pieces is not None
        output = self._pieces(call.args, call.kwargs)
        self.schedules.current = self._pieces.training.schedule
        return output

    def _capture(self, call: Arguments) -> Any:
        """Run a step for which a program has to be made."""
        sizes = self.plans.sizes
        with patched(), self.plans.capturing(call), masks_as_plain(self.model, *call):  # by one thread at a time
            while True:
                with sizes.asked_to_vary(call) as asked, self._numbers.captured():
                    try:
                        return run_captured(self.model, lambda: self._run(call))
                    except TraceError as error:
                        if self._numbers.fix():
                            continue
                        if not asked:
                            raise
                        sizes.fix(str(error))

    def _run(self, call: Arguments) -> Any:
        if self._step is None:
            self._step = compile_step(training_step(self.model, self.plans.outputs), self._backend)
        return self._step(*call.args, **call.kwargs)

    def _backend(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.plans.note_shapes(graph)
        _tell_of_loops(graph.graph)
        backend = delivering_backend(self._partition, self.compiler(), self.plans.keep)
        rest = WithoutNumbers(graph, inputs, as_tensors=not self._numbers.fixed)
        return rest.joined(backend(rest.graph, rest.inputs))

    def compiler(self) -> Compiler:
        if not self.compile:
            return eager
        from monetlite.runtime.inductor import inductor

        return inductor

    def plan(self, joint: Joint) -> tuple[Traced, tuple[Step, ...]]:
        """The captured step as a graph, and the steps to run of it."""
        return self.plans.plan(joint)

    def _partition(self, joint: Joint) -> tuple[fx.GraphModule, fx.GraphModule]:
        traced, steps = self.plan(joint)
        self.schedules.search.outside.planned(traced.graph, steps)
        if self.compile:
            from monetlite.runtime.inductor import as_inductor_fuses

            steps = as_inductor_fuses(traced.graph, steps)
        return lower(traced, steps)


def _is_amount(schedule: object) -> bool:
    """True for a budget in the place of a schedule."""
    written = isinstance(schedule, str) and _AMOUNT.fullmatch(schedule.strip()) is not None
    return written or isinstance(schedule, (int, float))


def refuse_scheduled(model: nn.Module) -> None:
    """Refuse what is no module, and a module that `within` was called on.

    Raises:
        ModelError: says what to do.
    """
    require_module(model)
    if isinstance(called_instead(model), ScheduledTraining):
        raise ModelError("the model has a schedule already; take it off first: monetlite.release(model)")


def _tell_of_loops(graph: fx.Graph) -> None:
    """Warn of a loop that makes capturing take minutes, before the longer part of that begins."""
    line, calls = longest_loop(graph)
    if len(graph.nodes) >= MANY_CALLS and calls >= MANY_OF_A_LINE:
        warn(
            f"a loop around {line} makes {calls} of {len(graph.nodes)} calls that are captured, each round anew. "
            "This takes minutes. Marked with @torch.compiler.disable, the loop's function runs as it is, and the "
            "rest of the model is planned in pieces"
        )


def loaded(schedule: OneSchedule) -> Schedule:
    """A schedule, from its file or from the collection if it is named.

    Raises:
        ScheduleFileError: there is none by this name, or it can't be read.
    """
    if isinstance(schedule, Schedule):
        return schedule
    from monetlite.zoo.collection import load_schedule

    return load_schedule(schedule)


def refuse_other_gpu(model: nn.Module, call: Arguments) -> None:
    """Refuse inputs on a GPU that nothing of the model is on: those of another one's copy of it.

    Raises:
        ModelError: names both.
    """
    held = {tensor.device for tensor in (*model.parameters(), *model.buffers()) if tensor.is_cuda}
    gpu = gpu_of(model, call)
    if gpu is not None and held and gpu not in held:
        raise ModelError(
            f"the inputs are on {gpu}, and the model is on {', '.join(sorted(map(str, held)))}. {DATA_PARALLEL}"
        )


def _refuse_shards(model: nn.Module) -> None:
    """Refuse a model that `fully_shard` has been applied to inside: its hooks would have to be captured.

    Raises:
        ModelError: names the module.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for name, module in model.named_modules():
        if fsdp is not None and isinstance(module, fsdp.FSDPModule):
            raise ModelError(
                f"fully_shard has been applied to {name or 'the model'} inside of the wrapper, where its hooks "
                "can't be captured. Shard a MONeTWrapper, not a model that within was called on: "
                "fully_shard(MONeTWrapper(block, ...))"
            )
