"""AOTAutograd's joint graphs and functions are as monetlite relies on."""

import re
import weakref
from typing import Any

import pytest
import torch
from torch import fx, nn

from monetlite.fx.torch_internals import torch_aot
from monetlite.fx.torch_internals.torch_aot import (
    aot_autograd,
    aot_settings,
    backward_node,
    boxed_function,
    descriptors,
    is_backward,
    is_forward,
    is_tangent,
)


class Counted(nn.Module):
    """Has a parameter, a buffer that changes, and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.count.add_(1)
        return (x * self.weight).exp(), x.sin() * self.weight


class Watched(torch.autograd.Function):
    """Notes in its backward part whether a gradient that it handed on is still there."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        Watched.handed_on = gradient.clone()
        made, Watched.handed_on = Watched.handed_on, weakref.ref(Watched.handed_on)
        return made


def test_a_function_can_be_called_when_the_backward_pass_ends() -> None:
    x, called = torch.randn(3, requires_grad=True), list[str]()
    x.register_post_accumulate_grad_hook(lambda _: called.append("gradient"))
    y = x.exp()
    y.register_hook(lambda _: torch_aot.when_backward_ends(lambda: called.append("ended")))
    y.sum().backward()
    assert called == ["gradient", "ended"]


def test_incoming_gradients_are_kept_or_not_as_is_said() -> None:
    """A compiled function's node lets go of its incoming gradients while it runs, from torch 2.13 on."""
    alive = list[bool]()

    def look(program: fx.GraphModule, _: Any) -> Any:
        def call(arguments: list[Any]) -> Any:
            given = list(arguments)
            arguments.clear()
            results = program(*given)
            given.clear()
            alive.append(Watched.handed_on() is not None)
            return results

        return boxed_function(call)

    from torch._functorch.partitioners import default_partition

    backend = aot_autograd(
        fw_compiler=lambda program, _: boxed_function(lambda arguments: program(*arguments)),
        bw_compiler=look,
        partition_fn=default_partition,
    )
    torch._dynamo.reset()
    x = torch.randn(3, requires_grad=True)
    Watched.apply(torch.compile(lambda x: x.exp().sin(), backend=backend)(x)).sum().backward()
    assert alive == [torch_aot.keeps_gradients()]


class Partition:
    """A backend that keeps the joint graph and has torch partition it."""

    def __init__(self) -> None:
        self.graph: fx.Graph
        self.forward_outputs = 0
        self.died: list[bool] = []

    def __call__(self, graph: fx.GraphModule, inputs: Any) -> Any:
        from torch._functorch.partitioners import default_partition

        def partition(joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **others: Any) -> Any:
            self.graph, self.forward_outputs = joint.graph, num_fwd_outputs
            return default_partition(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **others)

        return aot_autograd(fw_compiler=self.boxed, bw_compiler=self.boxed, partition_fn=partition)(graph, inputs)

    def boxed(self, program: fx.GraphModule, _: Any) -> Any:
        def call(arguments: list[Any]) -> Any:
            assert isinstance(arguments, list)
            given = list(arguments)
            arguments.clear()
            result = program(*given)
            last = weakref.ref(given.pop())
            self.died.append(last() is None)
            return result

        return boxed_function(call)


@pytest.fixture
def step() -> tuple[Partition, nn.Module, torch.Tensor, Any]:
    torch._dynamo.reset()
    partition, model, x = Partition(), Counted(), torch.randn(3, requires_grad=True)
    return partition, model, x, torch.compile(model, backend=partition, fullgraph=True)


def test_inputs_and_outputs_of_a_joint_graph_say_what_they_are(step: Any) -> None:
    partition, _, x, compiled = step
    compiled(x)
    inputs = [node for node in partition.graph.nodes if node.op == "placeholder"]
    primals = [node.meta["desc"] for node in inputs if not is_tangent(node)]
    # TorchDynamo hands parameters and buffers over as arguments.
    assert all(isinstance(item, descriptors.PlainAOTInput) for item in primals)
    assert [item.idx for item in primals] == [0, 1, 2]
    assert {descriptors.BufferAOTInput, descriptors.ParamAOTInput}.isdisjoint(map(type, primals))
    tangents = [node.meta["desc"] for node in inputs if is_tangent(node)]
    assert [type(item) for item in tangents] == [descriptors.TangentAOTInput] * 2
    assert [item.output.idx for item in tangents] == [0, 1]
    results = partition.graph.output_node().meta["desc"]
    assert partition.forward_outputs == 3
    (changed,) = (item for item in results[:3] if isinstance(item, descriptors.InputMutationAOTOutput))
    assert changed.mutated_input in primals
    assert [item.idx for item in results if isinstance(item, descriptors.PlainAOTOutput)] == [0, 1]
    assert len(results) - 3 == len(primals)  # a gradient, or none, for each


def test_a_view_of_a_result_is_made_of_its_base() -> None:
    torch._dynamo.reset()
    partition = Partition()

    def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.exp()
        return y.view(-1), y.t()

    output, _ = torch.compile(run, backend=partition)(torch.randn(2, 3, requires_grad=True))
    made = [node.meta["desc"] for node in partition.graph.nodes if is_tangent(node)]
    assert [type(item.output) for item in made] == [descriptors.IntermediateBaseAOTOutput]
    assert isinstance(made[0].output.base_of, descriptors.PlainAOTOutput)
    assert backward_node(output) is not None


def test_nodes_say_in_which_pass_they_were_recorded(step: Any) -> None:
    partition, _, x, compiled = step
    compiled(x)
    by_name = {str(node.target): node for node in partition.graph.nodes if node.op == "call_function"}
    assert is_forward(by_name["aten.exp.default"])
    assert not is_backward(by_name["aten.exp.default"])
    assert is_backward(by_name["aten.cos.default"])
    assert not is_forward(by_name["aten.cos.default"])
    (add,) = (node for node in partition.graph.nodes if str(node.target) == "aten.add.Tensor" and is_forward(node))
    assert add.meta["val"].shape == ()


def test_nodes_say_where_they_come_from(step: Any) -> None:
    partition, model, x, _ = step
    torch.compile(nn.Sequential(nn.Identity(), model), backend=partition)(x)
    by_name = {str(node.target): node for node in partition.graph.nodes if node.op == "call_function"}
    forward, backward = by_name["aten.sin.default"], by_name["aten.cos.default"]
    assert "test_torch_aot.py" in forward.meta["stack_trace"]
    assert backward.meta["stack_trace"] == forward.meta["stack_trace"]
    assert forward.meta["seq_nr"] == backward.meta["seq_nr"]
    *_, (path, _) = forward.meta["nn_module_stack"].values()
    assert re.fullmatch(r"L\['\w+'\](\.1|\._modules\['1'\]|\[1\])", path)
    assert backward.meta["fwd_nn_module_stack"].keys() == forward.meta["nn_module_stack"].keys()


def test_a_boxed_function_is_called_with_one_list(step: Any) -> None:
    partition, _, x, compiled = step
    first, second = compiled(x)
    (first.sum() + second.sum()).backward()
    assert len(partition.died) == 2
    assert partition.died[1], "what the backward program was given lives on while it runs"


def test_arguments_of_a_function_that_is_not_boxed_come_one_by_one() -> None:
    torch._dynamo.reset()
    given: list[int] = []

    def compiler(program: fx.GraphModule, _: Any) -> Any:
        def call(*arguments: Any) -> Any:
            given.append(len(arguments))
            return program(*arguments)

        return call

    x = torch.ones(2)
    torch.compile(lambda x, y: x + y, backend=aot_autograd(fw_compiler=compiler))(x, x * 2)
    assert given == [2]


def test_the_node_of_a_compiled_function_gets_all_gradients(step: Any) -> None:
    _, _, x, compiled = step
    first, second = compiled(x)
    node = backward_node(first)
    assert node is backward_node(second)
    assert backward_node(first.view(-1)) is node
    seen: list[list[bool]] = []
    node.register_prehook(lambda gradients: seen.append([item is not None for item in gradients]))
    second.sum().backward()
    assert len(seen) == 1
    assert seen[0][-2:] == [False, True]
    assert backward_node(x * 2) is None


def test_autocast_is_off_in_the_backward_pass_where_it_is_set_so() -> None:
    torch._dynamo.reset()
    partition = Partition()

    def backend(graph: fx.GraphModule, inputs: Any) -> Any:
        with aot_settings(backward_pass_autocast="off"):
            return partition(graph, inputs)

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            return gradient @ x

    x = torch.randn(3, 3, requires_grad=True)
    before = torch_aot._config.backward_pass_autocast
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.compile(Product.apply, backend=backend)(x)
    (product,) = (node for node in partition.graph.nodes if str(node.target) == "aten.mm.default")
    assert product.meta["val"].dtype == torch.float32
    assert torch_aot._config.backward_pass_autocast == before
    torch._dynamo.reset()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.compile(Product.apply, backend=partition)(x)
    (product,) = (node for node in partition.graph.nodes if str(node.target) == "aten.mm.default")
    assert product.meta["val"].dtype == torch.bfloat16


def test_the_share_of_activation_memory_is_a_setting() -> None:
    with aot_settings(activation_memory_budget=0.5):
        assert torch_aot._config.activation_memory_budget == 0.5
    assert torch_aot._config.activation_memory_budget == 1.0


def test_a_backward_pass_knows_whether_it_may_come_again() -> None:
    x, found = torch.ones(1, requires_grad=True), []
    y = x * 2
    y.register_hook(lambda _: found.append(torch_aot.may_come_again()))
    y.backward(retain_graph=True)
    y.backward()
    assert found == [True, False]
