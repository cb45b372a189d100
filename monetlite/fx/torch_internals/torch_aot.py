"""AOTAutograd: joint graphs, what their inputs and outputs are, the code and the functions made of them.

| symbol | use, and what breaks when it changes |
| --- | --- |
| `aot_autograd` | makes the joint graph and runs our two programs as one autograd function |
| `_functorch.config` | autocast in the backward pass; memory of `torch.compile` in comparisons |
| descriptors | what an input or output of the joint graph is: argument, parameter, gradient, new contents |
| `"tangents"` | name of inputs that are gradients of outputs |
| `"partitioner_tag"` | node metadata: traced in the forward or in the backward pass |
| `"CompiledFunctionBackward"` | name of the autograd node that runs a backward program; `watch`ed for gradients |
| `boxed_grads_call` | since torch 2.13 a node may let go of incoming gradients while it runs; peaks would differ |
| `TracingContext`, `bw_donated_idxs` | saved tensors to write over: none, for a second backward pass |
| `saved_tensor_is_graph_input` | in torch 2.14, by the first program; others, which save more, would fail |
| `queue_callback` | calls a function when the backward pass ends; records of it would go on until the next step |
| `keep_graph` of a graph task | whether a backward pass may come again; a run would be let go of too early |
| `_boxed_call` | attribute of a function that empties its list of arguments; peaks would be higher |
| `_BoxedCodeGen` | code that takes its arguments in a list and empties it; arguments would live too long |
| `_DisableAutocast` | programs run as captured: autocast of who calls `backward()` would convert again in re-runs |
| `_forward_from_src` | makes a function of code, whose lines a traceback can show |
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd as aot_autograd
from torch._functorch import config as _config
from torch._functorch._aot_autograd import descriptors as descriptors
from torch._guards import TracingContext
from torch.fx.graph import _BoxedCodeGen
from torch.fx.graph_module import _forward_from_src

from monetlite.fx.torch_internals.patching import patched

_F = TypeVar("_F", bound=Callable[..., Any])
_BACKWARD_NODE = "CompiledFunctionBackward"


def aot_settings(**changes: Any) -> AbstractContextManager[None]:
    """Change settings of AOTAutograd for the time of a block."""
    return patched(_config.patch(**changes))


def boxed_function(function: _F) -> _F:
    """Tell AOTAutograd that a function takes one list of arguments and empties it, so that they can die early."""
    function.__dict__["_boxed_call"] = True
    return function


def keep_saved_tensors() -> None:
    """Have the backward program of the step that is being compiled leave what was saved for it as it is.

    AOTAutograd offers saved tensors to the compiler to write over. It then refuses `retain_graph=True` after the
    first backward pass, and counts the tensors by their places in the whole program, not in a part of it. Which of
    them are inputs, it would count for all programs as for the first one.
    """
    context = TracingContext.try_get()
    metadata: Any = None if context is None else context.fw_metadata
    if metadata is not None:
        metadata.bw_donated_idxs = []
        metadata.saved_tensor_is_graph_input = _NoneOfThem()


class _NoneOfThem(list[bool]):
    """A list of what is true of no item, however many there are."""

    def __getitem__(self, _: Any) -> Any:
        return False


def keeps_gradients() -> bool:
    """True if autograd keeps the gradients of a compiled function's outputs until its backward program ends."""
    return not hasattr(torch.autograd.Function, "boxed_grads_call")


def may_come_again() -> bool:
    """True in a backward pass that leaves its graph for another one (`retain_graph=True`)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def when_backward_ends(function: Callable[[], None]) -> None:
    """Have a function called at the end of the backward pass that is running."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def without_autocast() -> AbstractContextManager[None]:
    """Have no autocast, on any device: a captured program has its conversions."""
    guard: AbstractContextManager[None] = torch._C._DisableAutocast()
    return guard


def backward_node(output: torch.Tensor) -> Any:
    """The autograd node of a compiled function behind its output, or behind what that is a view of; or None."""
    node: Any = output.grad_fn
    while node is not None and type(node).__name__ != _BACKWARD_NODE:
        node = node.next_functions[0][0] if node.next_functions else None
    return node


def is_tangent(node: fx.Node) -> bool:
    """True for an input of a joint graph that is the gradient of an output."""
    return node.op == "placeholder" and str(node.target).startswith("tangents")


def is_gradient_output(description: object) -> bool:
    """True for what AOTAutograd says of an output of a joint graph that is a gradient."""
    return isinstance(description, descriptors.GradAOTOutput)


def is_forward(node: fx.Node) -> bool:
    """True for a node that AOTAutograd recorded in the forward pass; some nodes are of neither pass."""
    return bool(node.meta.get("partitioner_tag") == "is_forward")


def is_backward(node: fx.Node) -> bool:
    """True for a node that AOTAutograd recorded in the backward pass."""
    return node.meta.get("partitioner_tag") == "is_backward" or bool(node.meta.get("autograd_backward"))


def set_boxed(graph: fx.Graph) -> None:
    """Make a graph's code a function of one list, which it empties, so that arguments die at their last use."""
    graph.set_codegen(_BoxedCodeGen())


def function_of(source: str, names: dict[str, Any]) -> Callable[..., Any]:
    """The function `forward` of generated code, in which some names are known."""
    return _forward_from_src(source, names)
