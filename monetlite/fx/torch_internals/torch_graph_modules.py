"""Graph modules whose Python code is made when they are first called.

Most graphs are only read, so their code would be made for nothing: a tenth of a second for a thousand nodes. If
torch drops the class, `fx.GraphModule` takes its place.
"""

from torch import fx, nn
from torch.fx._lazy_graph_module import _LazyGraphModule


def graph_module(root: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """A module that runs a graph, with the attributes of another module that the graph reads."""
    return _LazyGraphModule(root, graph)
