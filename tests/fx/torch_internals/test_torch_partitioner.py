"""The partitioner of torch.compile asks for what it should recompute, and does as it is told."""

from typing import Any

import torch
from torch import fx, nn

from monetlite.fx.torch_internals.torch_aot import is_gradient_output
from monetlite.fx.torch_internals.torch_inductor import partitioning_backend
from monetlite.fx.torch_internals.torch_partitioner import kept_nodes, partitioned_by


def compiled(choose: Any, times: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.GELU())]
    model, x = nn.Sequential(*layers), torch.randn(4, 8)

    def backend(graph: fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        with partitioned_by(choose, times):
            return partitioning_backend()(graph, inputs)

    torch._dynamo.reset()
    torch.compile(model, backend=backend)(x).sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_the_partitioner_asks_and_keeps_less_where_it_may_recompute() -> None:
    seen: dict[str, Any] = {"timed": []}

    def choose(again: bool) -> Any:
        def chosen(graph: fx.Graph, info: Any, nodes: list[fx.Node]) -> list[int]:
            everything = kept_nodes(graph, info, nodes)
            nothing = kept_nodes(graph, info, [])
            seen["kept"] = set(everything), set(nothing), set(nodes)
            seen["nodes"] = nodes
            output = graph.output_node()
            seen["gradients"] = sum(map(is_gradient_output, output.meta["desc"]))
            return list(range(len(nodes))) if again else []

        return chosen

    def timed(node: fx.Node) -> float:
        seen["timed"].append(node)
        return 1.0

    gradients = [compiled(choose(again), timed) for again in (False, True)]
    assert seen["nodes"]
    assert set(seen["timed"]) >= set(seen["nodes"])
    assert seen["gradients"] == 6  # of the parameters
    everything, nothing, nodes = seen["kept"]
    assert nodes <= nothing
    assert not nodes & everything
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
