"""Torch's planner of selective checkpointing (`torch.distributed._tools`), to compare with.

| symbol | use, and what breaks when it changes |
| --- | --- |
| `MemTracker`, `RuntimeEstimator`, `SACEstimator` | memory, time and operators of each module in a step |
| `aggregate_stats`, `parse_module_info`, `get_peak_memory_runtime_baseline` | these as the solver takes them |
| `sac_milp`, `get_optimal_checkpointing_policy_per_module` | which modules to checkpoint, and what they save |
| `_ModState` | modules without a backward pass, which the planner fails at |
| `RuntimeEstimator._roofline_estimate` | estimates that need a GPU; measured times take their place |
| `FakeCopyMode`, `no_dispatch` | a model without memory, and real operators while it is looked at |

If one is missing, the planner can't be compared with.
"""

import contextlib
import copy
import importlib
import io
import logging
import statistics
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker, _ModState
from torch.utils._mode_utils import no_dispatch

from monetlite.fx.torch_internals import torch_pytree as pytree
from monetlite.fx.torch_internals.patching import patched

PACKAGES = "'pulp<4' pwlf"
"""Packages that the planner imports, and that torch doesn't bring, as pip takes them."""
_REPEATS = 3


@dataclass(frozen=True)
class AutoSac:
    """Statistics of a model's step, from which torch's solver plans within any budget.

    Attributes:
        peak_bytes: of the step as the planner predicts it, without checkpoints.
    """

    peak_bytes: int
    _graph: Any
    _modules: Any

    def plan(self, budget_bytes: int, modules: Collection[str]) -> dict[str, list[tuple[str, bool]]]:
        """The modules to checkpoint, of those that are named, each with its operators and whether they are saved.

        Operators are ATen's names, in order. Nothing is checkpointed where the solver finds no plan.
        """
        from torch.distributed._tools import sac_ilp

        root = self._graph.nodes[0]["fqn"]
        log = logging.getLogger(sac_ilp.__name__)
        before, log.disabled = log.disabled, True  # it tells of what it doesn't find
        try:
            chosen, _, _ = sac_ilp.sac_milp(
                self._graph, budget_bytes / 2**30, ac_units=[f"{root}.{name}" for name in modules]
            )
        finally:
            log.disabled = before
        found = {}
        for name, discarded in chosen.items():
            of = self._modules[name]
            saved = sac_ilp.get_optimal_checkpointing_policy_per_module(of, 1 - discarded)
            found[name.removeprefix(f"{root}.")] = list(zip(of.func_names, map(bool, saved), strict=True))
        return found


def lacks_packages() -> bool:
    """True if a package that the planner imports is missing, or is another than it needs."""
    try:
        for name in ("pwlf", "torch.distributed._tools.sac_ilp"):
            importlib.import_module(name)
    except ImportError:
        return True
    return False


def auto_sac(model: nn.Module, inputs: Any, step: Callable[[nn.Module, Any], object], device: str) -> AutoSac:
    """Gather the statistics of a training step, on fake copies of the model and of its inputs.

    Args:
        step: runs forward and backward of a model on inputs, and clears gradients first.
    """
    from torch.distributed._tools.ilp_utils import (
        aggregate_stats,
        get_peak_memory_runtime_baseline,
        parse_module_info,
    )
    from torch.distributed._tools.runtime_estimator import RuntimeEstimator
    from torch.distributed._tools.sac_estimator import SACEstimator

    mode, how = FakeTensorMode(), "operator-level-cost-model"
    with FakeCopyMode(mode):
        fake = copy.deepcopy(model)
    fakes = pytree.tree_map_only(torch.Tensor, mode.from_tensor, inputs)
    memory, runtime = MemTracker(), RuntimeEstimator()
    memory.track_external(fake)
    with patched(_measured_times(RuntimeEstimator, device)), contextlib.redirect_stdout(io.StringIO()), mode:
        operators = SACEstimator()
        with memory:
            step(fake, fakes)
            memory.reset_mod_stats()  # the first step makes what later ones have
            step(fake, fakes)
        with runtime(how):
            step(fake, fakes)
        with operators(how):
            step(fake, fakes)
        _leave_out(memory, runtime)
        graph = parse_module_info(aggregate_stats(fake, memory, runtime, operators, torch.device(device)))
    return AutoSac(get_peak_memory_runtime_baseline(graph)[0], graph, operators.sac_mod_stats)


def _leave_out(memory: Any, runtime: Any) -> None:
    """Leave out what the planner fails at: modules without a backward pass, and further calls of a module."""
    tracked = memory.memory_tracking
    for module in [module for module, found in tracked.items() if _ModState.PRE_BW not in found.snapshots]:
        del tracked[module]
    kept = {found.mod_fqn for found in tracked.values()}
    for order in (runtime.mod_fw_pre_order, runtime.mod_fw_post_order):
        order[:] = [name for name in dict.fromkeys(order) if name in kept]


def _measured_times(estimator: Any, device: str) -> AbstractContextManager[Any]:
    """Have an estimator take an operator's time in ms as measured on this machine, for the time of a block."""
    known: dict[str, float] = {}

    def real(fake: torch.Tensor) -> torch.Tensor:
        if fake.dtype.is_floating_point:
            return torch.rand(fake.shape, dtype=fake.dtype, device=device)
        return torch.zeros(fake.shape, dtype=fake.dtype, device=device)

    def measured(function: Any, arguments: Any) -> float:
        args, kwargs = pytree.tree_map_only(torch.Tensor, real, arguments)
        times = []
        for _ in range(_REPEATS + 1):
            start = time.perf_counter()
            function(*args, **kwargs)
            if device == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return statistics.median(times[1:]) * 1000

    def estimate(_: Any, function: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
        arguments = (args, kwargs or {})
        described = pytree.tree_map_only(torch.Tensor, lambda item: (item.shape, item.dtype), arguments)
        key = f"{function} {described}"
        if key not in known:
            with no_dispatch(), torch.no_grad():
                known[key] = measured(function, arguments)
        return function(*args, **arguments[1]), known[key]

    return mock.patch.object(estimator, "_roofline_estimate", classmethod(estimate))
