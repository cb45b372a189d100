"""Code of captured graphs.

| symbol | use, and what breaks when it changes |
| --- | --- |
| `_BoxedCodeGen` | code that takes its arguments in a list and empties it; arguments would live too long |
| `_forward_from_src` | makes a function of code, whose lines a traceback can show |
"""

from collections.abc import Callable
from typing import Any

from torch import fx
from torch.fx.graph import _BoxedCodeGen
from torch.fx.graph_module import _forward_from_src


def set_boxed(graph: fx.Graph) -> None:
    """Make a graph's code a function of one list, which it empties, so that arguments die at their last use."""
    graph.set_codegen(_BoxedCodeGen())


def function_of(source: str, names: dict[str, Any]) -> Callable[..., Any]:
    """The function `forward` of generated code, in which some names are known."""
    return _forward_from_src(source, names)
