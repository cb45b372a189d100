"""Operators, schemas, Python kernels, modes, fake tensors and storages behave as monetlite relies on."""

import functools
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from monetlite.fx.torch_internals.torch_dispatch import (
    GENERATED_FUNCTIONS,
    DispatchKey,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    batch_of,
    changes_of_each,
    decomposition_table,
    failures_unlogged,
    faked_by,
    gradients_of,
    in_batches,
    is_batch_of,
    is_forward_mode,
    is_traced,
    is_transformed,
    python_kernel,
    schema_of,
    special_fake_functions,
    storage_key,
    suggest_memory_format,
    traced_as,
    unchecked,
    watched,
    weak_storage,
    without_batches,
    without_modes,
    without_python_kernels,
    without_transforms,
)

aten = torch.ops.aten


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Any] = []

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.append(func)
        return func(*args, **(kwargs or {}))


def captured(function: Any, *inputs: torch.Tensor) -> list[str]:
    """Operators of a function, as AOTAutograd captures them: with Python's kernels, on fake tensors."""
    from monetlite.fx.torch_internals.torch_aot import aot_autograd

    found: list[str] = []

    def compiler(graph: fx.GraphModule, _: object) -> Any:
        found.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    torch._dynamo.reset()
    torch.compile(function, backend=aot_autograd(fw_compiler=compiler))(*inputs)
    return found


def test_targets_are_overloads_with_a_schema() -> None:
    graph = make_fx(lambda x: x.view(-1).add_(1))(torch.ones(2, 2))
    view, add = (node.target for node in graph.graph.nodes if node.op == "call_function")
    assert isinstance(view, OpOverload)
    assert (str(view), view.namespace, view.overloadpacket.__name__) == ("aten.view.default", "aten", "view")
    assert view.is_view
    assert not add.is_view
    schema = schema_of(view)
    assert (schema.name, [argument.name for argument in schema.arguments]) == ("aten::view", ["self", "size"])
    assert not schema.returns[0].alias_info.is_write
    assert not schema.is_mutable
    assert schema_of(add).returns[0].alias_info.is_write
    assert schema_of(add).arguments[0].alias_info.is_write
    assert schema_of(add).is_mutable
    assert schema_of(aten.relu.default).returns[0].alias_info is None
    assert str(schema_of(aten.relu.default)) == "aten::relu(Tensor self) -> Tensor"
    assert str(schema_of(aten.max_pool2d_with_indices.default).returns[1].type) == "Tensor"
    assert schema_of(aten.add.Tensor).arguments[2].default_value == 1


def test_an_overload_without_checks_computes_the_same() -> None:
    x = torch.randn(3)
    assert torch.equal(unchecked(aten.mul.Scalar)(x, 2.0), x * 2)


def test_generated_functions_call_their_operators() -> None:
    functions, neural = GENERATED_FUNCTIONS
    x = torch.ones(2)
    with Seen() as seen:
        functions.relu(x)
        neural.gelu(x)
    assert seen.operators == [aten.relu.default, aten.gelu.default]


def test_tensors_of_one_storage_share_a_key() -> None:
    with FakeTensorMode():
        fake = torch.empty(4)
    for tensor in (torch.empty(4), fake):
        assert storage_key(tensor) == storage_key(tensor.view(2, 2)) == storage_key(tensor.detach())
        assert storage_key(tensor) != storage_key(torch.empty_like(tensor))


def test_fake_tensors_have_a_device_and_no_memory() -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    real = nn.Parameter(torch.ones(2, 3))
    fake = mode.from_tensor(real, static_shapes=True)
    assert isinstance(fake, FakeTensor)
    assert fake.fake_mode is mode
    assert fake.requires_grad
    with mode:
        made = torch.empty(2**40, device="cuda")
    assert (made.device.type, made.untyped_storage().nbytes()) == ("cuda", 2**42)
    there = FakeTensor(mode, torch.empty(2, device="meta"), torch.device("cpu"))
    assert (there.device.type, (there + 1).fake_mode) == ("cpu", mode)
    with mode:  # a real tensor is let in
        assert isinstance(torch.ones(3) + fake, FakeTensor)


def test_what_fails_on_fake_tensors_is_logged_unless_it_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        with FakeTensorMode(), pytest.raises(RuntimeError, match="reduction dim"):
            torch.empty(4, 8) @ torch.empty(7, 8)

    with failures_unlogged():
        fail()
    assert caplog.records == []
    fail()
    assert "failed while attempting to run meta" in caplog.text


def test_modes_are_noticed_and_left() -> None:
    assert not is_traced()
    with FakeTensorMode():
        assert is_traced()
        assert not is_transformed()
        with without_modes():
            assert not is_traced()
            assert not isinstance(torch.ones(2), FakeTensor)
        assert isinstance(torch.ones(2), FakeTensor)


def test_forward_mode_is_noticed() -> None:
    assert not is_forward_mode()
    with forward_ad.dual_level():
        assert is_forward_mode()
    assert not is_forward_mode()


def test_transforms_are_noticed_and_left() -> None:
    noticed = []

    def run(x: torch.Tensor) -> torch.Tensor:
        noticed.append((is_transformed(), is_traced()))
        with without_transforms():
            noticed.append((is_transformed(), is_traced()))
        return x.sum()

    torch.func.grad(run)(torch.ones(2))
    assert noticed == [(True, True), (False, False)]


UPSAMPLED = aten.upsample_bilinear2d.vec, aten.upsample_bilinear2d.default


def upsample(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.interpolate(x, scale_factor=2, mode="bilinear")


def test_captures_take_kernels_apart_by_python_kernels() -> None:
    """Without this, `without_python_kernels` has nothing to put aside, and may have become idle."""
    x = torch.randn(1, 1, 4, 4, requires_grad=True)
    keys = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)
    assert any(python_kernel(operator, key) for operator in UPSAMPLED for key in keys)
    before = {(operator, key): python_kernel(operator, key) for operator in UPSAMPLED for key in keys}
    apart = captured(upsample, x)
    assert not [name for name in apart if "upsample" in name]
    assert len(apart) > 5
    with without_python_kernels(UPSAMPLED, keys):
        assert captured(upsample, x) == ["aten.upsample_bilinear2d.default"]
    assert before == {(operator, key): python_kernel(operator, key) for operator in UPSAMPLED for key in keys}
    assert captured(upsample, x) == apart


def test_a_python_kernel_decides_what_is_captured() -> None:
    operator, key = aten.dropout.default, DispatchKey.CompositeImplicitAutograd
    before = python_kernel(operator, key)
    assert before is not None
    x = torch.randn(4, requires_grad=True)
    with traced_as(operator, key, lambda x, p, train: x * 3):
        assert captured(lambda x: nn.functional.dropout(x, 0.5, True), x) == ["aten.mul.Tensor"]
    assert python_kernel(operator, key) is before


def test_python_kernels_are_not_run_by_plain_steps() -> None:
    x = torch.ones(4, requires_grad=True)
    with traced_as(aten.dropout.default, DispatchKey.Autograd, lambda x, p, train: pytest.fail("was run")):
        assert torch.equal(nn.functional.dropout(x, 0.0, True), x)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("cudnn_batch_norm", DispatchKey.Autograd),
        ("dropout", DispatchKey.Autograd),
        ("dropout", DispatchKey.CompositeImplicitAutograd),
    ],
)
def test_operators_that_a_capture_replaces_have_python_kernels(name: str, key: DispatchKey) -> None:
    assert python_kernel(getattr(aten, name).default, key) is not None


def test_fake_tensors_are_made_by_the_table() -> None:
    """Of a CPU's batch norm: in the strides of the input, where the real one is in order."""
    operator = aten._native_batch_norm_legit.no_stats
    arguments = (None, None, True, 0.1, 1e-5)
    turned = torch.randn(2, 3, 4, 5).transpose(2, 3)
    before = decomposition_table[operator]

    @functools.wraps(before)  # by whose module and name torch decides whether to run it
    def in_order(*args: Any) -> Any:
        first, *rest = before(*args)
        return first.contiguous(memory_format=suggest_memory_format(turned)), *rest

    mode = FakeTensorMode()

    def made() -> torch.Tensor:
        with mode:
            result: torch.Tensor = operator(mode.from_tensor(turned), *arguments)[0]
        return result

    real = operator(turned, *arguments)[0]
    assert made().stride() == turned.stride() != real.stride()
    with faked_by(decomposition_table, {operator: in_order}):
        assert made().stride() == real.stride()
    assert made().stride() == turned.stride(), "a result that was made meanwhile is remembered"
    assert decomposition_table[operator] is before


def test_special_functions_make_fake_views() -> None:
    before = special_fake_functions[aten.view.default]

    def special(mode: FakeTensorMode, operator: Any, *args: Any) -> Any:
        assert operator is aten.view.default
        return before(mode, operator, *args).as_strided([2, 3], [1, 2])

    mode = FakeTensorMode()
    tensor = mode.from_tensor(torch.ones(6))
    with faked_by(special_fake_functions, {aten.view.default: special}):
        assert tensor.view(2, 3).stride() == (1, 2)
    assert tensor.view(2, 3).stride() == (3, 1)
    assert special_fake_functions[aten.view.default] is before


def test_the_suggested_memory_format() -> None:
    image = torch.empty(2, 3, 4, 5)
    assert suggest_memory_format(image) == torch.contiguous_format
    assert suggest_memory_format(image.to(memory_format=torch.channels_last)) == torch.channels_last


def test_changes_in_place_are_counted_for_a_tensor_and_its_views() -> None:
    tensor = torch.zeros(4)
    (before,) = changes_of_each([tensor])
    tensor.view(2, 2).add_(1)
    counts = changes_of_each([tensor, tensor.view(2, 2)])
    assert counts[0] == counts[1] > before


@pytest.mark.parametrize("grad", [False, True])
def test_changes_are_known_of_a_tensor_that_is_gone(grad: bool) -> None:
    tensor = torch.ones(4, requires_grad=grad) * 1
    view = tensor[1:]
    changed, storage = [watched(tensor), watched(view)], weak_storage(tensor)
    assert not any(asked() for asked in changed)
    with torch.no_grad():
        view.add_(1)
    assert tensor.tolist() == [1, 2, 2, 2]
    del tensor, view
    assert storage.expired()
    assert all(asked() for asked in changed)


def test_a_weak_reference_to_a_storage_outlives_views_and_not_the_storage() -> None:
    tensor = torch.zeros(4)
    reference = weak_storage(tensor)
    view = tensor[1:]
    del tensor
    assert not reference.expired()
    del view
    assert reference.expired()


def test_gradients_in_a_batch_are_told_and_taken_apart() -> None:
    x, found = torch.ones(2, requires_grad=True), []
    y = x * 2

    def note(gradient: torch.Tensor) -> torch.Tensor | None:
        found.append((is_batch_of(gradient), in_batches()))
        with without_batches():
            torch.rand(1)
        return batch_of([3 * item for item in gradients_of(gradient)]) if is_batch_of(gradient) else None

    y.register_hook(note)
    (batch,) = torch.autograd.grad(y, x, torch.eye(2), is_grads_batched=True, retain_graph=True)
    y.sum().backward()
    assert torch.equal(batch, 6 * torch.eye(2))
    assert found == [(True, True), (False, False)]
