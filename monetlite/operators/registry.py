"""What operator families register: ways to run a kernel, what those need beforehand, and the functions they call.

A family is one file here, and nothing else has to know it: importing `monetlite.operators` imports every file
of the folder, and the decorators below do the rest. `docs/implementations.md` has a worked example.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar, get_type_hints

import torch
from torch import fx

from monetlite.core.graph import Call, Implementation, TensorRef
from monetlite.operators.kernel import Kernel

PREFIX = "monetlite."

_F = TypeVar("_F", bound=Callable[..., Any])


def _nothing(_: Call) -> int:
    return 0


def _once(_: Call) -> int:
    return 1


@dataclass(frozen=True, kw_only=True)
class Function:
    """A function of ours that a call may name, and how much work it is on a device that nobody has measured.

    Attributes:
        name: what calls name it by, without the prefix.
        run: takes and returns tensors.
        limit: what bounds it: a field of `monetlite.core.devices.Efficiency`.
        passes: how often it moves its operands and results, as a multiple of reading and writing each once.
        workspace_bytes: what it holds beyond them, on a GPU.
        launches: how many kernels it launches, on a GPU.
        like: a call that costs as much, where there is one; the attributes above are then ignored.
        measured_like: whether to measure that call instead, for a function that takes what can't be made up.
        integers: integer operands are below this when it is measured.
        random: whether it draws random numbers.
        parts: of its call, in how many parts of the batch, one after another, it does what the call that it is
            `like` does at once.
    """

    name: str
    run: Callable[..., Any]
    limit: str = "elementwise"
    passes: float = 1.0
    workspace_bytes: Callable[[Call], int] = _nothing
    launches: Callable[[Call], int] = _once
    like: Callable[[Call], Call] | None = None
    measured_like: bool = False
    integers: Callable[[Call], int] | None = None
    random: bool = False
    parts: Callable[[Call], int] | None = None


@dataclass(frozen=True, kw_only=True)
class Intermediate:
    """A small value that a backward kernel can read in place of a large one: a packed mask, pooling offsets.

    It becomes an optional operator, which the solver may run wherever what it reads is in memory, or never.

    Attributes:
        name: after a dot, the end of the operator's name; `Kernel.intermediates` has the value under it.
        function: registered with `function`.
        ways: (implementation's name, arguments) of each way to compute it; arguments are of the captured graph.
        shape, dtype: of the result; dtype is torch's name.
    """

    name: str
    function: Callable[..., Any]
    ways: tuple[tuple[str, tuple[Any, ...]], ...]
    shape: tuple[int, ...]
    dtype: str


Alternatives = Callable[[Kernel], Iterator[Implementation]]
Intermediates = Callable[[fx.Node], Iterator[Intermediate]]

_functions: dict[str, Function] = {}
_names: dict[Callable[..., Any], str] = {}
_alternatives: dict[str, list[Alternatives]] = {}
_intermediates: dict[str, list[Intermediates]] = {}


def function(name: str, **costing: Any) -> Callable[[_F], _F]:
    """Register a function that calls can name as `monetlite.NAME`; keywords are `Function`'s."""

    def register(run: _F) -> _F:
        assert name not in _functions, f"monetlite.{name} is registered twice"
        _functions[name] = Function(name=name, run=run, **costing)
        _names[run] = PREFIX + name
        return run

    return register


def alternatives_for(*targets: str) -> Callable[[Alternatives], Alternatives]:
    """Register a generator of implementations for the kernels of some targets (`"aten.relu.default"`)."""

    def register(family: Alternatives) -> Alternatives:
        for target in targets:
            _alternatives.setdefault(target, []).append(family)
        return family

    return register


def intermediates_for(*targets: str) -> Callable[[Intermediates], Intermediates]:
    """Register a generator of what a backward kernel of some targets could read in place of an activation.

    It is given the kernel's node in the captured graph.
    """

    def register(family: Intermediates) -> Intermediates:
        for target in targets:
            _intermediates.setdefault(target, []).append(family)
        return family

    return register


def alternatives(kernel: Kernel) -> Iterator[Implementation]:
    """Every implementation of a kernel beside its default one."""
    for family in _alternatives.get(kernel.call.target, ()):
        yield from family(kernel)


def intermediates(node: fx.Node) -> Iterator[Intermediate]:
    """What the families offer a backward kernel to read."""
    for family in _intermediates.get(target_of(node), ()):
        yield from family(node)


def find_function(target: str) -> Function | None:
    """The registered function behind a call's target; None for torch's own operators."""
    return _functions.get(target.removeprefix(PREFIX)) if target.startswith(PREFIX) else None


def name_of(run: Callable[..., Any]) -> str:
    """The target by which calls name a registered function."""
    return _names[run]


def returns_tuple(run: Callable[..., Any]) -> bool:
    """Whether a registered function returns several tensors rather than one, by its annotation."""
    return get_type_hints(run)["return"] is not torch.Tensor


def target_of(node: fx.Node) -> str:
    """The target of a node of a captured graph, as calls write it."""
    return _names.get(node.target, str(node.target)) if callable(node.target) else str(node.target)


def elements(ref: TensorRef) -> int:
    """How many elements a tensor has."""
    return math.prod(ref.spec.shape)
