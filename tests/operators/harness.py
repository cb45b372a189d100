"""Every implementation that the operators of a module offer, run beside the default one on real tensors.

A module is captured as it is for training, its forward and backward operators are run one after the other by
their default calls, and at each operator every alternative is run too, on copies of what the default run read.
What a family offers is tested by every test whose module has its kernel.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch
from magnitudes import magnitudes
from torch import fx, nn

from monetlite.core.graph import AS_TRACED, LOSS, Call, Implementation, Operator, TensorSpec
from monetlite.fx import storages
from monetlite.fx.call_encoding import decode_argument, spec_of
from monetlite.operators import resolve, returns_tensor
from monetlite.operators.random import REPLAY
from monetlite.runtime.lowering import lower
from monetlite.tracing.capture import aot_backend, boxed, capture_settings, compile_step, training_step
from monetlite.tracing.operator_graph import Traced, build_graph

LARGEST = 1e36
"""Sums of magnitudes above this may overflow float32 in one order and not in another."""

Tangents = Callable[[TensorSpec], torch.Tensor]


class _Recorded(Exception):
    """Ends a training step as soon as its real arguments are known."""


class Memory:
    """What the tensors of a captured graph hold; views are made where they are read."""

    def __init__(self, traced: Traced) -> None:
        self.nodes = {node.name: node for node in traced.joint.graph.graph.nodes}
        self.owner = traced.joint.graph
        self.tensors: dict[str, torch.Tensor] = {}

    def tensor(self, node: fx.Node) -> object:
        if node.name in self.tensors:
            return self.tensors[node.name]
        if node.op == "get_attr":
            return getattr(self.owner, str(node.target))
        assert storages.is_view(node) or storages.is_item(node), f"{node.name} is read but not declared as read"
        return node.target(*fx.map_arg(node.args, self.tensor), **fx.map_arg(node.kwargs, self.tensor))

    def arguments(self, call: Call) -> tuple[list, dict]:
        def find(ref):
            return self.tensor(self.nodes[ref.node])

        return (
            decode_argument(call.args, find),
            {name: decode_argument(value, find) for name, value in call.kwargs},
        )

    def run(self, call: Call) -> dict[str, torch.Tensor]:
        """The results of a call, by name."""
        arguments, keywords = self.arguments(call)
        made = resolve(call.target)(*arguments, **keywords)
        made = [made] if returns_tensor(call) else list(made or ())
        return {name: item for name, item in zip(call.outputs, made, strict=True) if name is not None}

    def copy(self, names: Iterable[str]) -> "Memory":
        """Another memory with copies of some tensors, laid out as they are, and without the others."""
        other = object.__new__(Memory)
        other.nodes, other.owner = self.nodes, self.owner
        other.tensors = {name: twin(self.tensors[name]) for name in names if name in self.tensors}
        return other


@dataclass
class Seen:
    """What a run of the harness has compared: (family, implementation), and the functions that were called."""

    compared: set[tuple[str, str]] = field(default_factory=set)
    refused: set[tuple[str, str]] = field(default_factory=set)
    """Whose guard said no."""
    functions: set[str] = field(default_factory=set)

    def names(self, family: str) -> set[str]:
        return {name for of, name in self.compared if of == family}


class Captured:
    """A module captured with real arguments, whose operators can be run one by one."""

    def __init__(self, model: nn.Module, *inputs: torch.Tensor, layout: str = AS_TRACED) -> None:
        self.given: dict[str, torch.Tensor] = {}
        self.inputs: list[str | None] = []
        self.traced: Traced | None = None

        def keep(*tensors: torch.Tensor) -> None:
            self.given = dict(zip(names, (twin(item.detach()) for item in tensors), strict=True))
            places = {place(item): name for name, item in zip(names, tensors, strict=True)}
            self.inputs = [places.get(place(item)) for item in inputs]
            raise _Recorded

        names: list[str] = []

        def partition(joint):
            self.traced = build_graph(joint, model, (inputs, {}), layout=layout)
            traced = self.traced.graph.operators
            steps = [(index, 0) for index, item in enumerate(traced) if not item.derived]
            programs = lower(self.traced, steps)
            placeholders = [node for node in programs[0].graph.nodes if node.op == "placeholder"]
            names.extend(node.name for node in placeholders)
            with programs[0].graph.inserting_after(placeholders[-1]):
                programs[0].graph.call_function(keep, tuple(placeholders))
            return programs

        try:
            with capture_settings():
                backend = aot_backend(partition, forward=boxed, backward=boxed)
                compile_step(training_step(model), backend)(*inputs)
        except _Recorded:
            pass
        assert self.given, "the module was not captured"

    @property
    def operators(self) -> tuple[Operator, ...]:
        return self.traced.graph.operators

    def operator(self, family: str) -> Operator:
        (found,) = (item for item in self.operators if item.family == family)
        return found

    def offered(self, family: str) -> list[str]:
        """The names of the implementations that the only operator of a family has beside the default."""
        return [item.name for item in self.operator(family).implementations[1:]]

    def replace_input(self, number: int, tensor: torch.Tensor) -> None:
        """Give the module another input of the same layout."""
        if not tensor.numel():
            return
        name = self.inputs[number]
        assert name is not None
        assert (tensor.shape, tensor.stride()) == (self.given[name].shape, self.given[name].stride())
        self.given[name] = twin(tensor)

    @torch.no_grad()
    def check(self, tangents: Tangents, seen: Seen | None = None, seed: int = 0, extreme: bool = False) -> Seen:
        """Run every implementation of every operator beside its default one.

        Asserts what an implementation promises: its results are those of the default within its tolerance,
        in the same dtype and layout and in storages of their own of the planned size; what it overwrites it does
        overwrite, and nothing else that it reads is changed; it reads only what it says; it leaves the random
        number generator where the default leaves it; a later run (`again`) makes what the first run made, and
        leaves the generator alone. With `extreme` contents, which overflow and underflow on the way, results are
        compared only where the promise is of the same bits.
        """
        seen = Seen() if seen is None else seen
        memory = Memory(self.traced)
        memory.tensors.update(self.given)
        torch.manual_seed(seed)
        for operator in self.operators:
            if operator.family == LOSS:
                for node in self.traced.joint.graph.graph.nodes:
                    if storages.is_tangent(node):
                        memory.tensors[node.name] = tangents(spec_of(node.meta["val"]))
            else:
                _Trial(self.traced, operator, memory, seen, extreme).run()
        return seen

    @torch.no_grad()
    def runs(self, family: str) -> Iterator[tuple[Implementation, list[object]]]:
        """Each implementation of the operators of a family, with arguments for one run of it."""
        memory = Memory(self.traced)
        memory.tensors.update(self.given)
        for operator in self.operators:
            if operator.family == LOSS:
                for node in self.traced.joint.graph.graph.nodes:
                    if storages.is_tangent(node):
                        memory.tensors[node.name] = torch.ones(spec_of(node.meta["val"]).shape)
                continue
            for item in operator.implementations if operator.family == family else ():
                if not item.devices or "cpu" in item.devices:
                    yield item, memory.copy(memory.tensors).arguments(item.call)[0]
            memory.tensors.update(memory.run(operator.implementations[0].call))


class _Trial:
    """One operator's implementations, run on copies of what is in memory."""

    def __init__(self, traced: Traced, operator: Operator, memory: Memory, seen: Seen, extreme: bool) -> None:
        self.values, self.operator, self.memory, self.seen = traced.graph.values, operator, memory, seen
        self.extreme = extreme
        self.before = torch.get_rng_state()

    def run(self) -> None:
        default = self.operator.implementations[0]
        self.expected, _ = self._first(default)
        self.after = torch.get_rng_state()
        self._assert_planned()
        self.memory.tensors.update(self.expected)
        self._again(default)
        names = [item.name for item in self.operator.implementations]
        assert len(set(names)) == len(names), f"{self.operator.name} offers a name twice: {names}"
        for item in self.operator.implementations[1:]:
            if item.devices and "cpu" not in item.devices:
                continue
            key = (self.operator.family, item.name)
            if item.guard is not None and not self._permits(item.guard):
                self.seen.refused.add(key)
                continue
            self._compare(item)
            self._again(item)
            self.seen.compared.add(key)
        torch.set_rng_state(self.after)

    def _permits(self, guard: Call) -> bool:
        assert not [ref for ref in guard.tensors() if ref.value is not None], "a guard reads weights alone"
        self.seen.functions.add(guard.target)
        arguments, keywords = self.memory.arguments(guard)
        verdict = resolve(guard.target)(*arguments, **keywords)
        assert verdict.dtype is torch.bool
        assert verdict.dim() == 0
        return bool(verdict)

    def _bases(self, item: Implementation, call: Call) -> dict[str, int | None]:
        """The tensors that a call may read, each with its value."""
        refs = {storages.base(self.memory.nodes[ref.node]).name: ref.value for ref in call.tensors()}
        undeclared = {value for value in refs.values() if value is not None} - set(item.reads)
        written = set(item.writes) if call is item.again else set()
        assert undeclared <= written, f"{self._about(item)} reads {undeclared} without saying so"
        return refs

    def _first(self, item: Implementation) -> tuple[dict[str, torch.Tensor], Memory]:
        torch.set_rng_state(self.before)
        return self._execute(item, item.call, self.memory)

    def _execute(self, item: Implementation, call: Call, memory: Memory) -> tuple[dict[str, torch.Tensor], Memory]:
        """Results of a call on copies of its operands, and the copies as they are afterwards."""
        bases = self._bases(item, call)
        own = memory.copy(bases)
        places = {name: place(own.tensors[name]) for name in own.tensors}
        results = own.run(call)
        self.seen.functions.add(call.target)
        if call.target == REPLAY:
            self.seen.functions.add(call.args[2])
        overwritten = {name for name, value in bases.items() if value in item.overwrites}
        assert len(overwritten) == len(item.overwrites), f"{self._about(item)} does not read what it overwrites"
        for name, before in memory.tensors.items():
            if name in own.tensors and name not in overwritten:
                assert same_bits(own.tensors[name], before), f"{self._about(item)} changes {name}"
        taken = [place(result) for result in results.values() if result.numel()]
        assert len(set(taken)) == len(taken), f"{self._about(item)} returns two tensors in one storage"
        for name in own.tensors:
            if own.tensors[name].numel():
                shared = places[name] in taken
                assert shared == (name in overwritten), f"{self._about(item)}: {name} overwritten: {shared}"
        assert not any(self.values[value].held for value in item.overwrites), f"{self._about(item)}: held"
        return results, own

    @property
    def as_captured(self) -> bool:
        """Whether what the default implementation reads and makes is laid out as it was captured."""
        names = [
            storages.base(self.memory.nodes[ref.node]).name
            for ref in self.operator.implementations[0].call.tensors()
        ]
        return all(
            same_strides(self.memory.tensors[name], self.memory.nodes[name].meta["val"].stride())
            for name in (*names, *self.expected)
            if name in self.memory.tensors
        )

    def _assert_planned(self) -> None:
        """What a default run makes is what was captured, in storages of the planned size.

        Its strides are not always: of `hardtanh_backward` and some others, torch says one thing on fake tensors
        and does another on real ones. Nor are the types of a batch's statistics, where the batch is in bfloat16.
        """
        for value, (name, result) in zip(self.operator.writes, self.expected.items(), strict=True):
            captured = self.memory.nodes[name].meta["val"]
            assert result.shape == captured.shape, name
            if (self.operator.family == "batch_norm" and result.dim() == 1) or not result.numel():
                continue
            assert result.dtype == captured.dtype, name
            assert result.untyped_storage().nbytes() == self.values[value].size_bytes, name

    @cached_property
    def scales(self) -> dict[str, torch.Tensor]:
        """For each result, the sums of magnitudes that tolerances are shares of."""
        call = self.operator.implementations[0].call
        return dict(zip(self.expected, magnitudes(call, *self.memory.arguments(call)), strict=True))

    def _compare(self, item: Implementation) -> None:
        results, _ = self._first(item)
        after = torch.get_rng_state()
        assert torch.equal(after, self.after), f"{self._about(item)} leaves the generator in another state"
        expected_here = {name: self.expected[name] for name in self.expected if name in item.call.outputs}
        assert results.keys() == expected_here.keys(), self._about(item)
        assert len(item.writes) == len(results), f"{self._about(item)} writes {item.writes}"
        for name, expected in expected_here.items():
            self._assert_alike(item, name, results[name], expected, item.tolerance)
            if self.as_captured:
                about = f"{self._about(item)}: {results[name].stride()}, not {expected.stride()}"
                assert same_strides(results[name], expected.stride()), about

    def _again(self, item: Implementation) -> None:
        """A later run, with what the first run left behind."""
        if item.again is None:
            return
        first, _ = self._first(item)
        memory = Memory.copy(self.memory, self.memory.tensors)
        memory.tensors.update(first)
        torch.manual_seed(99)
        elsewhere = torch.get_rng_state()
        results, _ = self._execute(item, item.again, memory)
        assert torch.equal(torch.get_rng_state(), elsewhere), f"{self._about(item)} run again draws numbers"
        assert results, self._about(item)
        for name, result in results.items():
            self._assert_alike(item, name, result, first[name], 0.0)

    def _assert_alike(self, item, name, found, expected, tolerance) -> None:
        about = f"{self._about(item)} of {tuple(expected.shape)} {expected.dtype}"
        assert found.shape == expected.shape, about
        if not expected.numel():
            return
        assert found.dtype == expected.dtype, about
        assert found.untyped_storage().nbytes() == expected.untyped_storage().nbytes(), about
        if tolerance and not self.extreme:
            assert_within(found, expected, tolerance, self.scales[name], about)
        elif not tolerance:
            assert same_bits(found, expected), f"{about}: {difference(found, expected)}"

    def _about(self, item: Implementation) -> str:
        return f"{self.operator.name}: {item.name}"


def assert_within(found, expected, tolerance, scale, about="") -> None:
    """A result is the expected one within a share of `scale`, element by element.

    `scale` is the sum of the magnitudes that an element is made of, in float64. Where that sum and the expected
    result are finite, so is the result, and close. Where a NaN or an infinity among the terms makes the expected
    result NaN or infinite, so is the result: what went wrong in plain training is never hidden. Left out are sums
    that may overflow on the way, and NaNs that come of an infinity times the zeros around an image, which some
    kernels multiply by and others skip.
    """
    hidden = ~expected.isfinite() & found.isfinite() & ~scale.isfinite()
    assert not hidden.any(), f"{about}: finite {found[hidden][:4]} where plain training has {expected[hidden][:4]}"
    # A NaN compares as False, so an element made of one is not compared.
    there = (scale <= LARGEST) & expected.isfinite()
    gap = (found.double() - expected.double()).abs()
    # Products of tiny numbers may be rounded to a multiple of float32's smallest.
    allowed = tolerance * scale + 1e-42
    wrong = there & ~(gap <= allowed)
    assert not wrong.any(), (
        f"{about}: {int(wrong.sum())} of {wrong.numel()} elements are off by up to "
        f"{(gap / scale)[wrong].max():.3g} of what they are made of: {found[wrong][:4]}, {expected[wrong][:4]}"
    )


def twin(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with a storage of its own, of the same size and with the same elements in the same places."""
    storage = tensor.untyped_storage().clone()
    return torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def same_strides(tensor: torch.Tensor, strides: Iterable[int]) -> bool:
    """Whether elements are in the same places; a dimension of one element can have any stride."""
    return tensor.numel() == 0 or all(
        size == 1 or mine == theirs
        for size, mine, theirs in zip(tensor.shape, tensor.stride(), strides, strict=True)
    )


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Bit for bit equal, -0.0 apart from 0.0; of NaNs, only that they are in the same places."""
    return not _differ(found, expected).any()


def difference(found: torch.Tensor, expected: torch.Tensor) -> str:
    where = _differ(found, expected)
    return f"{int(where.sum())} elements differ: {found[where][:4]} and {expected[where][:4]}"


def _differ(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    if not expected.is_floating_point():
        return found != expected
    nan = expected.isnan()
    return (bits(found) != bits(expected)) & ~nan | (found.isnan() != nan)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bit pattern of a floating-point tensor."""
    return tensor.contiguous().view({4: torch.int32, 2: torch.int16, 8: torch.int64}[tensor.element_size()])
