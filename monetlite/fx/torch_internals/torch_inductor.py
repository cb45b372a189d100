"""Inductor's compiler, imported where it is used: that takes seconds.

| symbol | use, and what breaks when it changes |
| --- | --- |
| `compile_fx_inner`, `output_strides` | compiles a program of ours, and says in which strides its results come |
| `select_decomp_table`, `lowering` | operators that Inductor knows, for a program traced into those |
| `force_stride_order`, `user_visible_output_idxs` | results in captured strides; views and anchors would fail |
| `cache_dir` | folder of compiled code; regions would be compiled anew by processes beside this one |
| `cache_key_tag` | part of that folder's keys; code for other vectors would be found, and compute nonsense |
| `size_asserts` | checks of strides; a region would read other elements where its operand is laid out otherwise |
| `alignment_asserts` | checks of addresses, which a region need not make |
| `triton.cudagraphs` | graphs with memory of their own; a region's peak would not be the predicted one |
| `TracingContext`, `tracing`, `ShapeEnv` | for which a region is compiled; the cache would not have it |
| `fallback_random` | torch's own random numbers; dropout would draw others than plain training |
| `compile_fx`, `aot_eager_decomp_partition` | `torch.compile` as others use it, to compare with |
"""

import importlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from monetlite.fx.torch_internals.patching import patched
from monetlite.fx.torch_internals.torch_dispatch import FakeTensorMode, without_modes


def torch_random() -> AbstractContextManager[None]:
    """Have compiled programs draw random numbers as torch does.

    AOTAutograd asks for it, too: it then keeps what draws numbers that nobody reads.
    """
    from torch._inductor import config

    return patched(config.patch(fallback_random=True))


def decompositions() -> Any:
    """The table of functions that turn an operator into those that Inductor compiles."""
    from torch._inductor.decomposition import select_decomp_table

    importlib.import_module("torch._inductor.lowering")  # which some of them take to be imported
    return select_decomp_table()


def cache_folder() -> str:
    """The folder in which Inductor keeps what it compiled."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()


def compile_program(program: fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """Compile a program of operators that Inductor knows; returns a function of one list."""
    from torch._inductor.compile_fx import compile_fx_inner

    with torch_random(), _cached_for_this_cpu():
        return compile_fx_inner(program, list(inputs))


def _cached_for_this_cpu() -> AbstractContextManager[None]:
    """Have code be found by CPUs with the same vectors alone.

    Inductor's keys leave them out: it compiles loops over AVX-512's vectors for AVX2's, which then skip elements.
    """
    config = importlib.import_module("torch.compiler.config")  # whose `patch` has no type
    tag = f"{config.cache_key_tag} {torch.backends.cpu.get_cpu_capability()}"
    return patched(config.patch(cache_key_tag=tag))


def decomposed(function: Callable[..., Any], inputs: Sequence[Any], mode: FakeTensorMode) -> fx.GraphModule:
    """A function of fake tensors as a program of operators that Inductor knows."""
    with mode:
        return make_fx(torch.func.functionalize(function), decompositions())(*inputs)


def compile_alone(
    function: Callable[..., Any],
    inputs: Sequence[tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]],
    strides: Sequence[tuple[int, ...]],
) -> Callable[[list[Any]], Any]:
    """Compile a function of tensors that draws no random numbers and changes nothing.

    Args:
        function: returns a flat tuple of tensors.
        inputs: shape, strides, dtype and device of each of its tensors.
        strides: of its results.

    Returns:
        A function of one list.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    # Our functions look things up in tables, which are real tensors.
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    device = inputs[0][3].type if inputs else "cpu"
    as_it_is = torch.autocast(device, enabled=False)
    with without_modes(), torch.no_grad(), as_it_is, tracing(TracingContext(mode)):
        with mode:
            fakes = [
                torch.empty_strided(shape, stride, dtype=dtype, device=device)
                for shape, stride, dtype, device in inputs
            ]
        traced = decomposed(function, fakes, mode)
        made: Any = traced.graph.output_node().args[0]
        captured = [node.meta["val"].stride() for node in made]
        differing = {at: stride for at, stride in enumerate(strides) if stride != captured[at]}
        force_strides(traced, range(len(made)), differing)
        with patched(config.patch({"size_asserts": True, "alignment_asserts": False, "triton.cudagraphs": False})):
            compiled: Callable[[list[Any]], Any] = compile_program(traced, fakes)
        return compiled


def output_strides(compiled: Any) -> list[tuple[int, ...] | None]:
    """Strides of each result of a compiled program; None for a result that is not a tensor."""
    return [None if strides is None else tuple(map(int, strides)) for strides in compiled.output_strides]


def force_strides(
    program: fx.GraphModule, visible: Collection[int], strides: Mapping[int, tuple[int, ...]]
) -> None:
    """Have results of a program, by position, returned in given strides.

    Args:
        visible: all results that other code reads.
        strides: of some of them; the others are in those that they were captured in.
    """
    from torch._inductor.inductor_prims import force_stride_order

    output = program.graph.output_node()
    given: Any = output.args[0]
    made = list(given)
    with program.graph.inserting_before(output):
        for at, stride in strides.items():
            value = made[at].meta["val"]
            made[at] = program.graph.call_function(force_stride_order, (made[at], stride))
            made[at].meta["val"] = value.new_empty_strided(value.shape, stride)
    output.args = (tuple(made),)
    output.meta["user_visible_output_idxs"] = list(visible)
    program.recompile()


def inductor_backend() -> Callable[..., Any]:
    """The backend of `torch.compile(model)`."""
    from torch._inductor.compile_fx import compile_fx

    return compile_fx


def partitioning_backend() -> Callable[..., Any]:
    """The backend `aot_eager_decomp_partition`: Inductor's choice of what to keep, run by torch's own kernels."""
    from torch._dynamo.backends.debugging import aot_eager_decomp_partition

    return aot_eager_decomp_partition
