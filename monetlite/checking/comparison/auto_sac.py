"""Torch's planner of selective checkpointing, with operators' times as they are measured here."""

import functools
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from torch import nn

from monetlite.checking.comparison.bench import Contender, Unsupported, copy_of, reason
from monetlite.checking.comparison.checkpoint_blocks import checkpointed, selective_contexts, wrap_blocks
from monetlite.checking.comparison.peer_runs import Peer
from monetlite.checking.trainee import Trainee
from monetlite.core.units import format_bytes
from monetlite.fx.torch_internals.torch_auto_sac import PACKAGES, AutoSac, auto_sac, lacks_packages
from monetlite.operators.traits import aten_name

SHARES_OF_PEAK = (0.85, 0.7, 0.55, 0.4)
"""Settings: budgets, as shares of the peak that the planner predicts without checkpoints."""


def planned_by_torch(plain: Trainee) -> list[Contender]:
    """A plan of torch's solver for each budget.

    Raises:
        Unsupported: packages are missing, or the planner can't take the model.
    """
    if lacks_packages():
        raise Unsupported(f"its solver needs other packages: pip install {PACKAGES}")
    model = copy_of(plain.model)
    wrap_blocks(model, lambda forward: forward)
    blocks = [name for name, module in model.named_modules() if name and "forward" in vars(module)]
    if not blocks:
        raise Unsupported("there is nothing to checkpoint: no kind of module occurs more than once")

    def step(model: nn.Module, inputs: Any) -> None:
        args, kwargs = inputs
        Trainee(model, args, kwargs, plain.objective, plain.device, autocast=plain.autocast).step()

    try:
        planner = auto_sac(plain.model, (plain.args, plain.kwargs), step, plain.device)
    except Exception as error:
        raise Unsupported(f"torch's planner can't take this model: {reason(error)}") from error
    return [_planned(planner, share, blocks) for share in SHARES_OF_PEAK]


def _planned(planner: AutoSac, share: float, blocks: Sequence[str]) -> Contender:
    budget_bytes = int(share * planner.peak_bytes)
    setting = f"budget {format_bytes(budget_bytes)}"

    def prepare(model: nn.Module) -> nn.Module:
        plan = planner.plan(budget_bytes, blocks)
        if not plan:
            raise Unsupported("its solver finds no plan within this budget")
        for name, decisions in plan.items():
            module = model.get_submodule(name)
            options = {"use_reentrant": False, "context_fn": functools.partial(_deciding, decisions)}
            module.forward = checkpointed(module.forward, options)
        return model

    return Contender(peer=Peer.AUTO_SAC, setting=setting, label=f"auto-SAC, {setting}", prepare=prepare)


def _deciding(decisions: Sequence[tuple[str, bool]]) -> Any:
    """Contexts of a checkpoint that saves what was decided of an operator's first run, its second, and so on."""
    decided: dict[str, list[bool]] = defaultdict(list)
    for name, saved in decisions:
        decided[name].append(saved)
    runs: Counter[tuple[bool, str]] = Counter()

    def saves(operator: str, again: bool) -> bool:
        name = aten_name(operator)
        run = runs[again, name]
        runs[again, name] += 1
        return run < len(decided[name]) and decided[name][run]

    return selective_contexts(saves)
