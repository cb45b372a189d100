"""A training step as PyTorch itself runs it: its operators, what autograd keeps, and what Python's frames hold.

A checkpoint runs the model's own code, not a captured graph, and that code may take other branches than a capture
does. So the step is recorded as it runs, once, without memory for its tensors (`weightless_run`). While it runs,
everything that autograd would keep is dropped. A tensor that lives on is then held by the code itself.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn

from monetlite.core.errors import ModelError, TraceError
from monetlite.core.graph import LOSS_ONLY, Call, Resident, TensorRef, TensorSpec
from monetlite.exporting.weightless_run import Contents, changed_arguments, weightless_copy
from monetlite.fx.call_encoding import encode_arguments, spec_of
from monetlite.fx.torch_internals import torch_pytree as pytree
from monetlite.fx.torch_internals.torch_dispatch import (
    OpOverload,
    TorchDispatchMode,
    schema_of,
    storage_key,
    weak_storage,
    without_modes,
)
from monetlite.fx.torch_internals.torch_pytree import tensors_among
from monetlite.operators.random import forked_state
from monetlite.tracing.step_inputs import Inputs, device_of, resident_bytes, split_inputs, tensors_in_order

Attributes: TypeAlias = Mapping[tuple[int, str, int], Any]
OUTSIDE_BLOCKS = -1
"""Block of what no block holds."""


@dataclass(frozen=True, kw_only=True)
class EagerCall:
    """A kernel that the step runs.

    Attributes:
        call: with its arguments; its target is the operator with its overload, as the dispatcher names it.
        block: that runs it, by position; `OUTSIDE_BLOCKS` if none does, and in the backward pass.
        reads: values, and for what autograd kept the number of the `Kept`, as (value, number or None).
        writes: values. changes: values and resident tensors that it changes in place, the latter by name.
        draws: draws random numbers.
    """

    call: Call
    block: int
    reads: tuple[tuple[int, int | None], ...]
    writes: tuple[int, ...]
    changes: tuple[int | str, ...]
    draws: bool
    module: str = ""

    @property
    def name(self) -> str:
        return self.call.target

    @property
    def resident_reads(self) -> set[str]:
        """Names of resident tensors among its arguments."""
        return {ref.node for ref in self.call.tensors() if ref.value is None}


@dataclass(kw_only=True)
class Kept:
    """A tensor that autograd keeps for the backward pass.

    Attributes:
        value: None for a resident tensor. block: whose code it is kept in. made: number of calls before.
        released: number of calls when its node gave it up. needed: number of calls when it was first asked for.
    """

    value: int | None
    block: int
    made: int
    released: int | None = None
    needed: int | None = None


@dataclass(kw_only=True)
class ModuleBlock:
    """A module that can be checkpointed: one of a row of modules, called once in the step.

    Attributes:
        path: its name in the model. start, end: the calls that it makes, the latter excluded.
        inputs: values that it is called with. dispatched: operators that it calls, views among them.
        called_again: the step calls it more than once, so that it can't be checkpointed.
        changed: its attributes are others when it ends, which it may read when it runs again.
    """

    path: str
    start: int
    inputs: tuple[int, ...]
    end: int = 0
    dispatched: int = 0
    called_again: bool = False
    changed: bool = False


@dataclass(frozen=True, kw_only=True)
class EagerStep:
    """A recorded step.

    Attributes:
        calls: forward, then backward; the latter begin at `border`.
        sizes, specs: of each value. kept: by autograd. blocks: in the order of their calls.
        held: for each value, the call after which nothing but autograd holds it; None for the end of the step.
        gradients: values that become a parameter's or an input's gradient.
    """

    calls: tuple[EagerCall, ...]
    border: int
    sizes: tuple[int, ...]
    specs: tuple[TensorSpec, ...]
    kept: tuple[Kept, ...]
    held: tuple[int | None, ...]
    gradients: frozenset[int]
    blocks: tuple[ModuleBlock, ...]
    resident: Resident
    name: str
    device: str
    inputs: dict[str, TensorSpec] = field(default_factory=dict)


def module_rows(model: nn.Module) -> list[str]:
    """Names of the modules that a checkpoint may wrap: outermost ones in rows of modules that have parts."""
    found: list[str] = []
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        inside = any(name.startswith(f"{other}.") for other in found)
        if last.isdigit() and not inside and any(True for _ in module.children()):
            found.append(name)
    return found


def record_step(
    model: nn.Module,
    example_inputs: Inputs,
    objective: Callable[[Any], torch.Tensor],
    *,
    device: str | None = None,
    outputs: str = LOSS_ONLY,
) -> EagerStep:
    """Record a training step as PyTorch runs it, without memory for what it computes.

    Args:
        model: in training mode, on any device, the meta device included; it is not changed.
        example_inputs: as in `trace`. objective: makes the loss of the output.
        device: `cpu` or `cuda`, that the step runs on; by default where the model is.
        outputs: `"all"` if the caller holds them to the end of the step, as in `trace`.

    Raises:
        TraceError: the code looks at numbers that the step computes, or runs something that is no operator.
        ModelError: the model is in evaluation mode.
    """
    if not model.training:
        raise ModelError("the model is in evaluation mode; call model.train() before a training step is recorded")
    args, kwargs = split_inputs(example_inputs)
    here = device or device_of(model, (args, kwargs))
    tensors = tensors_in_order(model, args, kwargs)
    contents = Contents()
    copied = weightless_copy(model, contents, here)
    args, kwargs = pytree.tree_map_only(
        torch.Tensor, lambda item: _input(item, contents, here), (args, dict(kwargs))
    )
    for module in copied.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False  # as the plan does
    recorder = _Recorder(contents, here)
    with forked_state(here), recorder.recording(copied):
        output = copied(*args, **kwargs)
        loss = objective(output)
        held = output if outputs != LOSS_ONLY else None
        del output
        recorder.border = len(recorder.calls)
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
        del loss
    del held
    leaves = [*copied.parameters(), *tensors_among((args, kwargs))]
    gradients = recorder.values_of(item.grad for item in leaves if item.is_leaf and item.grad is not None)
    return EagerStep(
        calls=tuple(recorder.calls),
        border=recorder.border,
        sizes=tuple(recorder.sizes),
        specs=tuple(recorder.specs),
        kept=tuple(recorder.kept),
        held=tuple(recorder.held),
        gradients=gradients,
        blocks=tuple(recorder.blocks),
        resident=resident_bytes(model, tensors),
        name=type(model).__name__,
        device=here,
        inputs={f"input{number}": spec_of(tensor) for number, tensor in enumerate(tensors)},
    )


def _input(tensor: torch.Tensor, contents: Contents, device: str) -> torch.Tensor:
    """An input of the step: integers keep their contents, or are ones where they have none."""
    if tensor.is_floating_point() or tensor.is_complex():
        return contents.without(tensor.detach(), device).requires_grad_(tensor.requires_grad)
    return torch.ones_like(tensor, device=device) if tensor.is_meta else tensor.detach().clone()


class _Saved:
    """Stands for a tensor that autograd keeps: its layout, and a resident tensor or a copy of contents."""

    def __init__(self, number: int, tensor: torch.Tensor, kept: torch.Tensor | None) -> None:
        self.number, self.tensor = number, kept
        self.layout = (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device)
        self.size = tensor.untyped_storage().nbytes() // max(1, tensor.element_size())


def _attributes(module: nn.Module) -> Attributes:
    """Numbers, texts and tensors that a module and its parts hold, also in lists; no parameters.

    By the part, the name, and the place in the list.
    """
    return {
        (id(part), name, number): leaf
        for part in module.modules()
        for name, item in (vars(part) | dict(part.named_buffers(recurse=False))).items()
        if not isinstance(item, dict)  # as modules have for their parameters and hooks
        for number, leaf in enumerate(pytree.tree_leaves(item))
        if leaf is None or isinstance(leaf, (bool, int, float, str, torch.Tensor))
    }


def _is_same(one: Any, other: Any) -> bool:
    return one is other if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor) else one == other


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for it
    """Notes every operator that reaches the dispatcher, and when storages die."""

    def __init__(self, contents: Contents, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # nor for this
        self.contents, self.device = contents, device
        self.calls: list[EagerCall] = []
        self.border = 0
        self.sizes: list[int] = []
        self.specs: list[TensorSpec] = []
        self.kept: list[Kept] = []
        self.held: list[int | None] = []
        self.blocks: list[ModuleBlock] = []
        self._value_of: dict[int, tuple[int, int | None]] = {}
        """For each storage, its value, and the number of the `Kept` that it was made again from."""
        self._living: dict[int, Any] = {}
        """Weak references to those storages."""
        self._lacking: set[int] = set()
        self._block = OUTSIDE_BLOCKS

    @contextlib.contextmanager
    def recording(self, model: nn.Module) -> Iterator[None]:
        """Record what runs inside, and which module of a row runs it."""
        for name in module_rows(model):
            self._watch(name, model.get_submodule(name))
        with self, torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield
            self._note_deaths()

    def values_of(self, tensors: Iterable[torch.Tensor]) -> frozenset[int]:
        """Values that tensors are of."""
        keys = [storage_key(tensor) for tensor in tensors]
        return frozenset(self._value_of[key][0] for key in keys if key in self._value_of)

    def _watch(self, name: str, module: nn.Module) -> None:
        forward, number = module.forward, OUTSIDE_BLOCKS

        def watched(*args: Any, **kwargs: Any) -> Any:
            nonlocal number
            if self._block != OUTSIDE_BLOCKS:
                return forward(*args, **kwargs)
            if number == OUTSIDE_BLOCKS:
                number = len(self.blocks)
                inputs = tuple(self.values_of(tensors_among((args, kwargs))))
                self.blocks.append(ModuleBlock(path=name, start=len(self.calls), inputs=inputs))
            else:
                self.blocks[number].called_again = True
            self._block = number
            before = _attributes(module)
            cached = torch.is_autocast_cache_enabled()
            torch.set_autocast_cache_enabled(False)  # as an exported plan does
            try:
                return forward(*args, **kwargs)
            finally:
                torch.set_autocast_cache_enabled(cached)
                self._block = OUTSIDE_BLOCKS
                self.blocks[number].end = len(self.calls)
                self.blocks[number].changed |= self._depends_on_attributes(number, before, _attributes(module))

        module.forward = watched

    def _depends_on_attributes(self, number: int, before: Attributes, after: Attributes) -> bool:
        """True if a block may have read an attribute that it set: any but a tensor that no operator of it reads."""
        block = self.blocks[number]
        calls = self.calls[block.start : block.end]
        read = {value for call in calls for value, _ in call.reads}.union(*(call.resident_reads for call in calls))

        def is_read(item: Any) -> bool:
            return not isinstance(item, torch.Tensor) or self._named(item) in read

        return any(is_read(item) for key, item in before.items() if not _is_same(item, after.get(key)))

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        value = self._value(tensor)
        kept = Kept(value=value, block=self._block, made=len(self.calls))
        contents = None
        if value is not None and storage_key(tensor) not in self._lacking:
            with without_modes():
                layout = tensor.shape, tensor.stride()
                contents = torch.empty_strided(*layout, dtype=tensor.dtype, device=tensor.device)
                contents.copy_(tensor.detach())
        saved = _Saved(len(self.kept), tensor, tensor.detach() if value is None else contents)
        self.kept.append(kept)
        weakref.finalize(saved, self._release, kept)
        return saved

    def _release(self, kept: Kept) -> None:
        kept.released = len(self.calls)

    def _unpack(self, saved: _Saved) -> torch.Tensor:
        kept = self.kept[saved.number]
        if kept.needed is None:
            kept.needed = len(self.calls)
        if kept.value is None:
            assert saved.tensor is not None
            return saved.tensor
        with without_modes():
            shape, stride, offset, dtype, device = saved.layout
            if saved.tensor is not None:
                made = saved.tensor.clone()
            else:
                made = torch.empty(saved.size, dtype=dtype, device=device).as_strided(shape, stride, offset)
                self._lacking.add(storage_key(made))
        self._follow(made, kept.value, saved.number)
        return made

    def _value(self, tensor: torch.Tensor) -> int | None:
        """The value that a tensor is of; None for a resident tensor."""
        return self._value_of.get(storage_key(tensor), (None, None))[0]

    def _named(self, tensor: torch.Tensor) -> int | str:
        """The value that a tensor is of, or the name of a resident tensor."""
        value = self._value(tensor)
        return f"r{storage_key(tensor)}" if value is None else value

    def _follow(self, tensor: torch.Tensor, value: int, kept: int | None) -> None:
        key = storage_key(tensor)
        self._value_of[key] = value, kept
        self._living[key] = weak_storage(tensor)

    def _note_deaths(self) -> None:
        for key in [key for key, reference in self._living.items() if reference.expired()]:
            value, kept = self._value_of.pop(key)
            del self._living[key]
            self._lacking.discard(key)
            if kept is None:
                self.held[value] = len(self.calls) - 1

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._note_deaths()
        if not isinstance(operator, OpOverload):
            raise TraceError(f"{operator} is no operator of the dispatcher, so the step can't be recorded")
        if self._block != OUTSIDE_BLOCKS:
            self.blocks[self._block].dispatched += 1
        result = self.contents.run(operator, args, kwargs, self._lacking)
        self._note(operator, args, kwargs, result)
        return result

    def _note(self, operator: OpOverload, args: Any, kwargs: Any, result: Any) -> None:
        """Note a call that makes storages or changes tensors; any other is a view, or a look at a number."""
        keys = set(map(storage_key, tensors_among((args, kwargs))))
        reads = {self._value_of[key] for key in keys if key in self._value_of}
        changed = [self._named(item) for item in tensors_among(changed_arguments(operator, args, kwargs))]
        outputs: list[str | None] = []
        writes: list[int] = []
        for item in tensors_among(result):
            if storage_key(item) in keys or storage_key(item) in self._value_of:
                outputs.append(None)
                continue
            value = len(self.sizes)
            self.sizes.append(item.untyped_storage().nbytes())
            self.specs.append(spec_of(item))
            self.held.append(None)
            self._follow(item, value, None)
            outputs.append(f"v{value}")
            writes.append(value)
        if not writes and not changed:
            return
        self.calls.append(
            EagerCall(
                call=Call(
                    target=str(operator),
                    args=self._encoded(args),
                    kwargs=tuple((key, self._encoded(item)) for key, item in kwargs.items()),
                    outputs=tuple(outputs),
                ),
                block=self._block,
                reads=tuple(sorted(reads, key=str)),
                writes=tuple(writes),
                changes=tuple(changed),
                draws=_draws(operator, args, kwargs),
                module="" if self._block == OUTSIDE_BLOCKS else self.blocks[self._block].path,
            )
        )

    def _encoded(self, argument: Any) -> Any:
        if isinstance(argument, torch.Tensor):
            value, name = self._value(argument), self._named(argument)
            node = name if isinstance(name, str) else f"v{value}"
            return TensorRef(node=node, value=value, spec=spec_of(argument))
        if isinstance(argument, tuple | list):
            return tuple(map(self._encoded, argument))
        return encode_arguments(argument, lambda _: None)


def _draws(operator: OpOverload, args: Any, kwargs: Any) -> bool:
    """Tell whether an operator draws random numbers; attention does where it drops some."""
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    arguments = schema_of(operator).arguments
    given = dict(zip((item.name for item in arguments), args, strict=False)) | kwargs
    return bool(given.get("dropout_p", 1.0) != 0)
