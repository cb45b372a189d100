"""Gradients that are differentiated again: gradient penalties (WGAN-GP, R1), forces as gradients of an energy.

A planned backward program can't be differentiated. Where autograd runs one with `create_graph=True`, the captured
graph runs once more, as in plain training, from what the run began with: its arguments, the random generator's
state, the contents that it changed. The gradients of that run take the place of the program's.

Later runs on such arguments are plain training's from the beginning, so that they don't run twice.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import fx

from monetlite.core.announcing import warn
from monetlite.core.errors import ModelError
from monetlite.fx.storages import Reachability
from monetlite.fx.torch_internals.torch_aot import descriptors, may_come_again
from monetlite.fx.torch_internals.torch_dispatch import changes_of_each, gradients_of, is_batch_of
from monetlite.fx.torch_internals.torch_dynamo import left_alone
from monetlite.operators.random import drawing_from, is_random, rng_state
from monetlite.runtime.backward_parts import RUN
from monetlite.tracing.capture import Joint
from monetlite.tracing.step_inputs import device_of

Kind: TypeAlias = tuple[tuple[bool, bool], ...]
"""For each tensor among a run's arguments, whether it has a gradient, and whether it is a leaf."""
Order: TypeAlias = "tuple[tuple[int, Sequence[int]], ...]"
"""Numbers of deliveries, and the positions of the inputs whose gradients each delivers, the last one first."""
Context: TypeAlias = contextlib.AbstractContextManager[None]


class Begun:
    """The things that a run began with.

    Args:
        arguments: its arguments.
        holds: whether these may be held; else weak references are.
        context: makes the context in which it ran.
    """

    def __init__(self, arguments: list[Any], holds: bool, context: Callable[[], Context]) -> None:
        self._arguments, self.context = arguments, context
        self._versions = changes_of_each(_tensors(arguments))
        if not holds:
            self._arguments = [weakref.ref(item) if isinstance(item, torch.Tensor) else item for item in arguments]

    def drop(self) -> None:
        """Hold nothing any longer."""
        self._arguments.clear()

    def unchanged(self) -> list[Any]:
        """The arguments as they were; empty if they are gone.

        Raises:
            ModelError: one was changed in place.
        """
        found = [item() if isinstance(item, weakref.ref) else item for item in self._arguments]
        versions = changes_of_each(_tensors(found))
        if len(versions) != len(self._versions):
            return []
        if versions != self._versions:
            raise ModelError(
                "gradients are asked for with create_graph=True after an input or a parameter of the step was "
                "changed in place; ask for them before"
            )
        return found


class RunAgain:
    """Delivers the gradients of a run that was repeated, in the place of a backward program's part."""

    def __init__(self, order: Order, gradients: Mapping[int, torch.Tensor | None]) -> None:
        self._positions, self._gradients = dict(order), gradients

    def __call__(self, number: int) -> list[torch.Tensor | None]:
        return [self._gradients.get(at) for at in self._positions[number]]


class DoubleBackward:
    """The runs of one captured graph, of which gradients may be asked for with `create_graph=True`.

    Args:
        graph: as TorchDynamo captured it.
        joint: made of it.
        holds: whether a run may hold its arguments until its backward pass ends. Where it may not, only those that
            somebody else holds until then can be taken again.
    """

    def __init__(self, graph: fx.GraphModule, joint: Joint, *, holds: bool) -> None:
        self._graph, self._holds = graph, holds
        joint_graph = joint.graph.graph
        changed = [node.meta["desc"] for node in Reachability(joint_graph, joint.forward_outputs).mutated]
        self._changed = {item.idx for item in changed if isinstance(item, descriptors.PlainAOTInput)}
        self._known = len(self._changed) == len(changed)
        self._draws = any(map(is_random, joint_graph.nodes))
        self._costly = self._draws or bool(self._changed)
        self._device: str | None = None
        self._plain: set[Kind] = set()

    def expected(self, arguments: Sequence[Any]) -> bool:
        """True for arguments of a kind on which gradients were differentiated again before."""
        return bool(self._plain) and _kind(arguments) in self._plain

    @left_alone
    def run_plainly(self, arguments: Sequence[Any]) -> Any:
        """Run the graph as in plain training."""
        return self._graph(*arguments)

    def begin(self, arguments: Sequence[Any]) -> Begun | None:
        """Note what a run begins with; None if it can't be run again."""
        if not self._known or (self._costly and not (self._holds and any(map(_is_input_with_gradient, arguments)))):
            return None
        if any(arguments[at].requires_grad for at in self._changed):
            return None
        if self._device is None:
            self._device = device_of(self._graph, arguments)
        given = list(arguments)
        for at in self._changed:
            given[at] = given[at].detach().clone()
        return Begun(given, self._holds, _as_now(self._device, self._draws))

    def watch(self, node: Any, begun: Begun | None, returned: Sequence[Any], order: Order) -> None:
        """Have the autograd node of a run give gradients that can be differentiated, where it is asked for them.

        Args:
            node: that the backward program is.
            begun: what the run began with.
            returned: says what the node's outputs are, in order.
            order: the deliveries of its gradients.
        """

        node.register_prehook(partial(self._asked, weakref.ref(node), begun, returned, order))

    @left_alone  # where a forward pass asks, TorchDynamo would capture what runs here
    def _asked(
        self, held: Callable[[], Any], begun: Begun | None, returned: Sequence[Any], order: Order, gradients: Any
    ) -> tuple[Any, ...] | None:
        """Have the gradients of a program that is about to run exchanged, if they are to be differentiated.

        Gradients in a batch (`is_grads_batched`) are laid out for AOTAutograd, which can't do so itself.
        """
        if not torch.is_grad_enabled():
            if begun is not None and not may_come_again():
                begun.drop()
            if any(map(is_batch_of, gradients)):
                return tuple(None if item is None else item.contiguous() for item in gradients)
            return None
        node = held()
        given = [taker is not None for taker, _ in node.next_functions]
        arguments = begun.unchanged() if begun is not None and _are_outputs(returned, gradients) else []
        if begun is None or not arguments or given != [item.requires_grad for item in _tensors(arguments)]:
            warn(
                "gradients of a planned step are asked for with create_graph=True. They can't be differentiated "
                "again: PyTorch then raises an error. Call the model itself for that: wrapper.model, or the model "
                "after monetlite.release(model)"
            )
            return None
        if not self._plain:
            warn(
                "gradients are differentiated again (create_graph=True), for which nothing can be planned. So this "
                "run was repeated as in plain training. Later ones on such inputs run that way at once, and take "
                "as much memory. If that doesn't fit, make the batch of these steps smaller"
            )
        self._plain.add(_kind(arguments))

        @left_alone
        def exchange(made: Sequence[Any], _gradients: object) -> tuple[Any, ...] | None:
            handle.remove()
            with begun.context():
                pairs = self._outputs(arguments, returned, gradients)
            found = _differentiable(arguments, pairs)
            stand_ins = [item for item in made if hasattr(item, RUN)]
            for item in stand_ins:
                setattr(item, RUN, RunAgain(order, found))
            if stand_ins:
                return None
            kept = (found.get(at) for at, item in enumerate(arguments) if isinstance(item, torch.Tensor))
            return tuple(None if one is None else gradient for one, gradient in zip(made, kept, strict=True))

        handle = node.register_hook(exchange)
        # AOTAutograd lays out what the program gets, and can't do so with a gradient that has one, or with a batch.
        of_one = (gradients_of(item)[0] if is_batch_of(item) else item for item in gradients)
        return tuple(None if item is None else item.detach() for item in of_one)

    def _outputs(
        self, arguments: Sequence[Any], returned: Sequence[Any], gradients: Sequence[Any]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The outputs of a repeated run that gradients came in for, with these."""
        as_they_were = [item.clone() if at in self._changed else item for at, item in enumerate(arguments)]
        results = self.run_plainly(as_they_were)
        given = zip(returned, gradients, strict=True)
        return [(results[item.idx], gradient) for item, gradient in given if gradient is not None]


def _differentiable(
    arguments: Sequence[Any], pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> dict[int, torch.Tensor | None]:
    """The gradients of those arguments that have one, by position, as autograd computes them."""
    tensors = {at: item for at, item in enumerate(arguments) if isinstance(item, torch.Tensor)}
    wanted = {at: item for at, item in tensors.items() if item.requires_grad}
    outputs, given = zip(*pairs, strict=True)
    found = torch.autograd.grad(outputs, list(wanted.values()), given, create_graph=True, allow_unused=True)
    return dict(zip(wanted, found, strict=True))


def _are_outputs(returned: Sequence[Any], gradients: Sequence[Any]) -> bool:
    """True if gradients come in for the graph's own outputs alone, and for one at least."""
    given = [item for item, gradient in zip(returned, gradients, strict=True) if gradient is not None]
    return bool(given) and all(isinstance(item, descriptors.PlainAOTOutput) for item in given)


def _tensors(arguments: Sequence[Any]) -> list[torch.Tensor]:
    return [item for item in arguments if isinstance(item, torch.Tensor)]


def _is_input_with_gradient(argument: Any) -> bool:
    own = isinstance(argument, torch.nn.Parameter) or not isinstance(argument, torch.Tensor)
    return not own and argument.requires_grad


def _kind(arguments: Sequence[Any]) -> Kind:
    return tuple((item.requires_grad, item.is_leaf) for item in _tensors(arguments))


def _as_now(device: str, draws: bool) -> Callable[[], Context]:
    """A context with the present autocast, and the present state of the generator if it is drawn from."""
    on, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    state = rng_state(device) if draws else None

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        drawing = contextlib.nullcontext() if state is None else drawing_from(state, device)
        with drawing, torch.autocast(device, dtype=dtype, enabled=on):
            yield

    return context
