"""Inductor, generated code, modules, the profiler, pytrees and the GPU's allocator are as monetlite relies on."""

import copy
import weakref
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from monetlite.fx.torch_internals import torch_cuda, torch_pytree
from monetlite.fx.torch_internals.torch_aot import function_of, set_boxed
from monetlite.fx.torch_internals.torch_auto_sac import auto_sac, lacks_packages
from monetlite.fx.torch_internals.torch_ddp import ddp_around, reduced_by
from monetlite.fx.torch_internals.torch_dispatch import FakeTensorMode
from monetlite.fx.torch_internals.torch_graph_modules import graph_module
from monetlite.fx.torch_internals.torch_inductor import (
    compile_program,
    decompositions,
    force_strides,
    inductor_backend,
    output_strides,
    partitioning_backend,
)
from monetlite.fx.torch_internals.torch_modules import (
    CONTENTS,
    apply_to_tensors,
    call_instead,
    call_itself,
    called_instead,
    own_contents,
    share_contents,
    uncompiled,
)
from monetlite.fx.torch_internals.torch_profiler import is_profiling, marked_allocations, memory_profiler

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_inductor_compiles_a_program_in_captured_strides_and_torchs_random_numbers() -> None:
    x = torch.randn(2, 3, 4, 4)

    def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (x + 1).to(memory_format=torch.channels_last).relu(), torch.rand(3)

    mode = FakeTensorMode()
    fake = mode.from_tensor(x)
    with mode:
        program = make_fx(run, decompositions())(fake)
    force_strides(program, [0], {0: (48, 1, 12, 3)})
    assert program.graph.output_node().meta["user_visible_output_idxs"] == [0]
    compiled = compile_program(program, [fake])
    assert output_strides(compiled)[0] == (48, 1, 12, 3)
    expected, given = run(x)[0], [x]
    torch.manual_seed(3)
    result, drawn = compiled(given)
    assert not given, "the list of arguments is not emptied"
    assert result.stride() == (48, 1, 12, 3)
    assert torch.allclose(result, expected)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(3))


@pytest.mark.parametrize("backend", [inductor_backend, partitioning_backend])
def test_backends_to_compare_with(backend: Any) -> None:
    torch._dynamo.reset()
    x = torch.randn(4, requires_grad=True)
    result = torch.compile(lambda x: x.sin().cos(), backend=backend())(x)
    result.sum().backward()
    assert torch.allclose(result, x.sin().cos())


def test_boxed_code_empties_its_list() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(torch.relu, (x,))
    alive: list[bool] = []
    graph.call_function(lambda _: alive.append(given() is not None), (first,))
    graph.output((first,))
    set_boxed(graph)
    code = graph.python_code("self")
    run = function_of(code.src, code.globals)
    arguments = [torch.ones(2)]
    given = weakref.ref(arguments[0])
    (result,) = run(None, arguments)
    assert result.tolist() == [1, 1]
    assert not arguments
    assert alive == [False]


def test_a_module_holds_its_tensors_in_these_dictionaries() -> None:
    model = nn.BatchNorm1d(2)
    model.register_buffer("unsaved", torch.zeros(1), persistent=False)
    model.inner = nn.Linear(2, 2)
    assert set(own_contents(model)) == {
        *("weight", "bias", "running_mean", "running_var", "num_batches_tracked", "unsaved", "inner")
    }
    empty = {name for name, item in vars(nn.Module()).items() if isinstance(item, (dict, set))}
    hooks = {name for name in empty if "hooks" in name and "state_dict" not in name}
    assert empty - hooks == set(CONTENTS), "modules hold something new, which a wrapper has to share"
    other = nn.Module()
    share_contents(other, model)
    model.late = nn.Parameter(torch.ones(1))
    assert list(other.state_dict()) == list(model.state_dict())
    apply_to_tensors(other, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
    assert model.weight.dtype == torch.float64


def test_a_forward_pass_finds_the_ddp_around_it(tmp_path) -> None:
    class Asking(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found.append(ddp_around())
            return super().forward(x)

    found: list[object] = []
    model = Asking(2, 2)
    model.weight.requires_grad_(False)
    torch.distributed.init_process_group("gloo", f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    try:
        ddp = torch.nn.parallel.DistributedDataParallel(model)
        ddp(torch.ones(1, 2)).sum().backward()
        model(torch.ones(1, 2))
        assert found == [ddp, None]
        assert reduced_by(ddp) == [model.bias]
    finally:
        torch.distributed.destroy_process_group()


def test_a_compiled_module_has_the_module() -> None:
    model = nn.Linear(2, 2)
    assert uncompiled(torch.compile(model)) is model
    assert uncompiled(model) is model


def test_another_function_is_called_in_place_of_a_module() -> None:
    """Hooks are called by the module itself; copies, and modules that hold it, know nothing of the function."""
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    keys, hooked = [*model.state_dict()], []
    model.register_forward_hook(lambda *_: hooked.append(1))
    assert called_instead(model) is None
    call_instead(model, lambda x: "instead")
    assert called_instead(model) is not None
    assert model(x) == nn.Sequential(model)(x) == "instead"
    assert not hooked
    assert torch.equal(call_itself(model, x), nn.functional.linear(x, model.weight, model.bias))
    assert hooked
    assert called_instead(copy.deepcopy(model)) is None
    assert [*model.state_dict()] == keys
    call_instead(model, None)
    assert called_instead(model) is None
    assert torch.equal(model(x), call_itself(model, x))


def test_the_profiler_records_allocations_frees_and_marks() -> None:
    profiler = memory_profiler()
    assert not is_profiling()
    with profiler:
        assert is_profiling()
        kept = torch.empty(3000)
        with torch.profiler.record_function("mark one"):
            pass
        dropped = torch.empty(5000)
        address = dropped.data_ptr()
        del dropped
        with torch.profiler.record_function("another"):
            pass
    found = [item for item in marked_allocations(profiler, "mark") if item[0] or abs(item[2]) in (12000, 20000)]
    one, another = ("", kept.data_ptr(), 12000), ("", address, 20000)
    assert found == [one, ("mark one", 0, 0), another, ("", address, -20000)]


def test_leaves_come_in_the_order_of_containers() -> None:
    tree = {"b": [1, (2, None)], "a": OrderedDict(z=3, y=4)}
    leaves, structure = torch_pytree.tree_flatten(tree)
    assert leaves == torch_pytree.tree_leaves(tree) == [1, 2, None, 3, 4]
    assert structure == torch_pytree.tree_structure(tree)
    assert torch_pytree.tree_unflatten(leaves, structure) == tree
    assert torch_pytree.tree_map(str, [1, {"a": 2}]) == ["1", {"a": "2"}]
    assert torch_pytree.tree_map_only(int, lambda item: item + 1, [1, "a"]) == [2, "a"]
    paths = torch_pytree.tree_map_with_path(lambda path, _: torch_pytree.keystr(path), {"a": [1, 2]})
    assert paths == {"a": ["['a'][0]", "['a'][1]"]}


class Pair:
    """A container that is registered without names for what it holds, as outputs of transformers 4 are."""

    def __init__(self, *items: object) -> None:
        self.items = items


def test_paths_lead_into_containers_without_names() -> None:
    pytree.register_pytree_node(Pair, lambda pair: (list(pair.items), None), lambda items, _: Pair(*items))
    tree = {"a": Pair(1, [Pair(None, ())])}
    found = torch_pytree.tree_map_with_path(lambda path, item: (torch_pytree.keystr(path), item), tree)["a"]
    first, (second,) = found.items
    assert first == ("['a'][0]", 1)
    assert second.items == (("['a'][1][0][0]", None), ())


@on_gpu
def test_the_allocator_takes_settings_at_any_time() -> None:
    torch.cuda.empty_cache()  # a block that is free there would serve
    torch_cuda.set_allocator_settings("expandable_segments:True")
    try:
        tensor = torch.empty(2**20, device="cuda")
        assert any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())
        del tensor
    finally:
        torch_cuda.set_allocator_settings("expandable_segments:False")


@on_gpu
def test_workspaces_of_cublas_can_be_given_back() -> None:
    x = torch.randn(512, 512, device="cuda")
    torch_cuda.clear_cublas_workspaces()
    before = torch.cuda.memory_allocated()
    result = x @ x
    with_workspace = torch.cuda.memory_allocated() - result.nbytes
    assert with_workspace > before
    torch_cuda.clear_cublas_workspaces()
    assert torch.cuda.memory_allocated() - result.nbytes == before


@on_gpu
def test_a_stream_can_be_kept_busy() -> None:
    torch.cuda.synchronize()
    torch_cuda.occupy_gpu(10**8)
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()


@pytest.mark.parametrize("name", ["clear_cublas_workspaces", "occupy_gpu", "set_allocator_settings"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="is called with a GPU")
def test_torch_for_the_cpu_imports_what_needs_a_gpu(name: str) -> None:
    assert callable(getattr(torch_cuda, name))


def test_the_planner_decides_for_each_operator_of_a_block_on_a_model_without_memory() -> None:
    if lacks_packages():
        pytest.skip("it needs packages that are not installed")
    from torch.distributed._tools.runtime_estimator import RuntimeEstimator

    blocks = [nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(3)]
    model, x = nn.Sequential(*blocks), torch.randn(256, 8)

    def step(model: nn.Module, x: torch.Tensor) -> None:
        model.zero_grad(set_to_none=True)
        model(x).sum().backward()

    kept = RuntimeEstimator.__dict__["_roofline_estimate"]
    planner = auto_sac(model, x, step, "cpu")
    assert RuntimeEstimator.__dict__["_roofline_estimate"] is kept
    assert all(parameter.grad is None for parameter in model.parameters())
    plan = planner.plan(planner.peak_bytes * 8 // 10, ["0", "1", "2"])
    assert plan
    assert set(plan) <= {"0", "1", "2"}
    for decisions in plan.values():
        assert [name for name, _ in decisions if name in ("addmm", "gelu")] == ["addmm", "gelu", "addmm"]
    assert planner.plan(1, ["0", "1", "2"]) == {}


def test_the_code_of_a_graph_is_made_when_it_first_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    root, graph = nn.Module(), fx.Graph()
    root.register_buffer("one", torch.ones(2))
    graph.output(graph.call_function(torch.add, (graph.placeholder("x"), graph.get_attr("one"))))
    made: list[str] = []
    of_code = fx.Graph.python_code
    monkeypatch.setattr(
        fx.Graph, "python_code", lambda *args, **kwargs: (made.append(""), of_code(*args, **kwargs))[1]
    )
    module = graph_module(root, graph)
    assert not made
    assert module(torch.ones(2)).tolist() == [2, 2]
    assert made
    assert isinstance(module, fx.GraphModule)
    assert [name for name, _ in module.named_buffers()] == ["one"]
