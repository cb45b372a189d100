"""The file of an exported plan: plain PyTorch that needs no monetlite.

The plan is data in it, as literals. Names come from a model and a schedule file, so each is written as `repr` does
it, or escaped in a comment. Nothing that they say is run.
"""

import pprint
from collections import Counter
from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Any

import torch

from monetlite.core.graph import LOSS_ONLY
from monetlite.core.schedule import Schedule
from monetlite.core.units import format_bytes, format_ms
from monetlite.exporting.checkpoint_search import FoundPlan
from monetlite.exporting.checkpointed_step import CheckpointPlan
from monetlite.exporting.eager_step import EagerStep
from monetlite.exporting.exported_plan import ExportedPlan


class Target(StrEnum):
    """Tools that an exported plan is for."""

    CHECKPOINT = "checkpoint"
    TRANSFORMERS = "transformers"
    TORCHTITAN = "torchtitan"


_USE = {
    Target.CHECKPOINT: """\
    import {module}
    {module}.apply(model)  # before the first step; {module}.remove(model) unwraps
""",
    Target.TRANSFORMERS: """\
    import {module}
    {module}.apply(model)
    Trainer(model=model, ...).train()

Leave gradient_checkpointing off in TrainingArguments. transformers has one setting for all layers
(activation_checkpointing_enable with every_n_layers), so each layer's forward function is wrapped instead, by
torch.utils.checkpoint. Keys and values are not cached (config.use_cache): the recomputation would add them twice.
""",
    Target.TORCHTITAN: """\
    import {module}
    {module}.apply(model)  # in the model's parallelize function, in place of ac_config.build(...).apply(model)

Do it there, before torch.compile and FSDP, and train with activation-checkpoint:none (torchtitan 0.3; before it, in
place of apply_ac, with activation_checkpoint.mode "none"). Its own policies treat all layers alike. Names of
parameters stay as they are. The figures are of a step that is not compiled: torch.compile decides again what to
keep within a layer.
""",
}
_CODE = '''
import functools
from collections import Counter

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

{data}

def apply(model):
    """Wrap the layers of a model in training mode by torch.utils.checkpoint, as planned."""
    layers = _layers(model)
    if any("forward" in vars(layer) for layer in layers.values()):
        raise ValueError("a layer's forward function has been replaced already, perhaps by this plan")
    for module in model.modules():
        if getattr(getattr(module, "config", None), "use_cache", False):
            module.config.use_cache = False
            vars(module)["_use_cache_without_plan"] = True
    for name, layer in layers.items():
        layer.forward = functools.partial(_run, layer, layer.forward, name)
    return model


def remove(model):
    """Unwrap the layers."""
    for layer in _layers(model).values():
        vars(layer).pop("forward", None)
    for module in model.modules():
        if vars(module).pop("_use_cache_without_plan", False):
            module.config.use_cache = True
    return model


def _layers(model):
    """The layers by their names in the model that was planned, which may hold this one."""
    found = dict(model.named_modules())
    first = next(iter(LAYERS), "")
    for start in ["", *(first[: at + 1] for at, letter in enumerate(first) if letter == ".")]:
        layers = {{name: found.get(name.removeprefix(start)) for name in LAYERS}}
        if None not in layers.values():
            return layers
    missing = next(name for name in LAYERS if name not in found)
    raise ValueError(f"the plan is for another model: there is no module {{missing!r}}")


def _run(layer, forward, name, *args, **kwargs):
    if not (layer.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    if getattr(layer, "gradient_checkpointing", False):
        raise RuntimeError("switch gradient checkpointing off: the layers are checkpointed by this plan")
    cast = any(map(torch.is_autocast_enabled, ("cuda", "cpu"))) and not torch.compiler.is_compiling()
    if not cast or not torch.is_autocast_cache_enabled():
        return _checkpointed(forward, name, *args, **kwargs)
    torch.set_autocast_cache_enabled(False)  # so that a recomputation casts what the first run cast
    try:
        return _checkpointed(forward, name, *args, **kwargs)
    finally:
        torch.set_autocast_cache_enabled(True)


def _checkpointed(forward, name, *args, **kwargs):
    saved = SAVED[LAYERS[name]]
    if not saved:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)
    calls = None if torch.compiler.is_compiling() else Counter()  # of operators, in this run
    contexts = functools.partial(_contexts, name, calls)
    result = checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)
    for key, (count, _) in () if calls is None else saved.items():
        if calls[key] != count:
            raise RuntimeError(
                f"{{name}} calls {{key}} {{calls[key]}} times, and the plan was made for {{count}}: "
                "export it again for this model, these inputs and this version of torch"
            )
    return result


def _contexts(name, calls):
    """The contexts of a layer's run and of its recomputation, which count calls and save what is planned."""
    saved, again = SAVED[LAYERS[name]], Counter()
    calls = Counter() if calls is None else calls

    def policy(context, operator, *args, **kwargs):
        key, counts = str(operator), again if context.is_recompute else calls
        counts[key] += 1
        keep = key in saved and counts[key] - 1 in saved[key][1]
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
'''


def plan_text(exported: ExportedPlan, schedule: Schedule, target: Target, module: str = "plan") -> str:
    """The text of a plan's file, which is imported as a module of that name."""
    layers, saved = _tables(exported.step, exported.found.plan)
    operators = "By operator: how often a layer calls it, and which of these calls, from 0 on, are saved."
    constants = [
        ("Layers that are wrapped, and which of SAVED each has.", "LAYERS", layers),
        (f"{operators}\nAll else is recomputed.", "SAVED", saved),
        ("Bytes and milliseconds.", "PREDICTED", predicted(exported, schedule)),
    ]
    head = [*_facts(exported, schedule), "", *_USE[target].format(module=module).splitlines(), ""]
    return module_text([*head, *_notes(exported.step, exported.found.plan)], constants, _CODE)


def predicted(exported: ExportedPlan, schedule: Schedule) -> dict[str, Any]:
    """Figures of the plan, beside those of the schedule and of plain training."""
    return {
        "budget_bytes": exported.budget_bytes,
        "peak_bytes": exported.found.peak_bytes,
        "latency_ms": round(exported.found.latency_ms, 3),
        "plain_peak_bytes": exported.plain.peak_bytes,
        "plain_latency_ms": round(exported.plain.latency_ms, 3),
        "schedule_peak_bytes": schedule.peak_bytes,
        "schedule_latency_ms": round(schedule.latency_ms, 3),
    }


def _tables(
    step: EagerStep, plan: CheckpointPlan
) -> tuple[dict[str, int], tuple[dict[str, tuple[int, tuple[int, ...]]], ...]]:
    """The wrapped layers with their kind, and for each kind what is saved."""
    kinds: list[dict[str, tuple[int, tuple[int, ...]]]] = []
    layers: dict[str, int] = {}
    for number, saved in plan.items():
        block = step.blocks[number]
        counts: Counter[str] = Counter()
        places: dict[str, list[int]] = {}
        for at in range(block.start, block.end):
            name = step.calls[at].name
            if at in saved:
                places.setdefault(name, []).append(counts[name])
            counts[name] += 1
        kind = {name: (counts[name], tuple(of)) for name, of in sorted(places.items())}
        if kind not in kinds:
            kinds.append(kind)
        layers[block.path] = kinds.index(kind)
    return layers, tuple(kinds)


def _facts(exported: ExportedPlan, schedule: Schedule) -> Iterator[str]:
    found, plain, step = exported.found, exported.plain, exported.step
    shapes = ", ".join("×".join(map(str, spec.shape)) or "number" for spec in step.inputs.values())
    yield f"A checkpoint plan of {told(schedule.name)} on inputs of {shapes}, in plain PyTorch."
    yield "Written by `monetlite export`; it needs torch alone."
    yield ""
    yield f"budget      {format_bytes(exported.budget_bytes)}"
    yield (
        f"this plan   {format_bytes(found.peak_bytes)}, {format_ms(found.latency_ms)}: "
        f"{len(found.plan)} of {len(step.blocks)} layers wrapped, {saved_results(found)} saved in them"
    )
    yield f"schedule    {format_bytes(schedule.peak_bytes)}, {format_ms(schedule.latency_ms)}: run by monetlite"
    yield f"plain       {format_bytes(plain.peak_bytes)}, {format_ms(plain.latency_ms)}"
    if schedule.autocast:
        yield f"Model and loss run within torch.autocast, in {schedule.autocast}."
    if schedule.outputs != LOSS_ONLY:
        yield "The model's outputs are held to the end of the step."
    yield f"Peak of a training step and its time, predicted for {step.device} with torch {torch.__version__}."


def saved_results(found: FoundPlan) -> str:
    """The number of saved results, in words."""
    count = sum(map(len, found.plan.values()))
    return "1 result" if count == 1 else f"{count} results"


def _notes(step: EagerStep, plan: CheckpointPlan) -> list[str]:
    """Known effects of checkpointing on this model."""
    calls = [call for number in plan for call in step.calls[step.blocks[number].start : step.blocks[number].end]]
    notes = []
    if any(isinstance(item, str) for call in calls for item in call.changes):
        notes += [
            "Buffers that wrapped layers change (running statistics of batch norm) are changed twice in a step,",
            "once more in the recomputation. Gradients are not affected.",
        ]
    if any(call.draws for call in calls):
        notes += [
            "Dropout draws the same numbers again: the generator's state is put back for a recomputation",
            "(preserve_rng_state, which is on).",
        ]
    if any(plan.values()):
        notes.append("A saved result may not be changed in place. Each forward pass has one backward pass.")
    return notes


def module_text(head: Iterable[str], constants: Iterable[tuple[str, str, Any]], code: str, **more: str) -> str:
    """The text of a module: comments, and code in whose place `data` stand constants (comment, name, value)."""
    data = [
        f"{_comments(comment.splitlines())}{name} = {pprint.pformat(value, width=110, sort_dicts=False)}\n"
        for comment, name, value in constants
    ]
    return _comments(head) + code.format(data="\n".join(data), **more)


def _comments(lines: Iterable[str]) -> str:
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)


def told(text: str) -> str:
    """Text for a comment: on one line, without characters that a terminal acts on."""
    return "".join(item if item.isprintable() else ascii(item)[1:-1] for item in text)
