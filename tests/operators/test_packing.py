"""One bit an element, in the order of a storage, whatever the size and the layout."""

import pytest
import torch
from contents import drawn, work_in_small_pieces
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from monetlite.operators import packing
from monetlite.operators.packing import in_order, out_of_order, over_in_order, pack, packed_bytes, unpacked


@drawn(max_examples=60)
@given(st.integers(0, 200), st.integers(0, 1000), st.booleans())
def test_bits_come_back_in_order(count, seed, in_pieces):
    kept = torch.rand(count, generator=torch.Generator().manual_seed(seed)) < 0.5
    with pytest.MonkeyPatch.context() as patch:
        if in_pieces:
            work_in_small_pieces(patch)
        packed = pack(kept, (1,))
        assert packed.dtype is torch.uint8
        assert len(packed) == packed_bytes(count) == -(-count // 8)
        assert packed.untyped_storage().nbytes() == packed_bytes(count)
        found = list(unpacked(packed, count))
    assert [where.start for where, _ in found] == [0, *(where.stop for where, _ in found[:-1])][: len(found)]
    assert torch.equal(torch.cat([torch.empty(0, dtype=torch.bool), *(piece for _, piece in found)]), kept)


def test_every_byte_unpacks_to_its_own_bits():
    packed = torch.arange(256, dtype=torch.uint8)
    ((_, bits),) = unpacked(packed, 2048)
    assert len({tuple(row.tolist()) for row in bits.view(256, 8)}) == 256
    assert torch.equal(pack(bits, (1,)), packed)


def test_a_large_tensor_goes_through_several_pieces_of_the_size_that_is_used():
    kept = torch.rand(2**19 + 13) < 0.5
    pieces = list(unpacked(pack(kept, (1,)), len(kept)))
    assert len(pieces) == 3
    assert torch.equal(torch.cat([piece for _, piece in pieces]), kept)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0), (2, 1, 0)])
def test_elements_in_the_order_of_a_storage_that_they_are_not_in(order):
    tensor = torch.arange(60.0).view(3, 4, 5)
    wanted = torch.empty_strided(
        (3, 4, 5), torch.empty([(3, 4, 5)[i] for i in order]).permute(_inverse(order)).stride()
    )
    flat = in_order(tensor, wanted.stride())
    assert torch.equal(flat.as_strided(wanted.shape, wanted.stride()), tensor)
    assert (flat.data_ptr() == tensor.data_ptr()) == (order == (0, 1, 2)), "a view where it can be one"

    def negate_some(flat):
        flat[7:30].neg_()

    expected = wanted.copy_(tensor).clone(memory_format=torch.preserve_format)
    expected.as_strided((60,), (1,))[7:30].neg_()
    assert over_in_order(tensor, wanted.stride(), negate_some) is tensor
    assert torch.equal(tensor, expected)


@drawn(max_examples=60)
@given(
    st.lists(st.integers(1, 4), max_size=5).flatmap(
        lambda shape: st.tuples(st.just(shape), st.permutations(range(len(shape))))
    )
)
def test_a_dense_storage_is_seen_in_its_order_and_back(drawn_layout):
    shape, order = drawn_layout
    storage = torch.arange(float(torch.Size(shape).numel()))
    tensor = storage.view([shape[i] for i in order]).permute(_inverse(order))
    strides = tensor.stride()
    flat = in_order(tensor, strides)
    assert torch.equal(flat, storage)
    assert flat.data_ptr() == storage.data_ptr()
    back = out_of_order(flat, shape, strides)
    assert torch.equal(back, tensor)
    assert back.data_ptr() == storage.data_ptr()
    expected = -tensor
    # What compiles these views has to tell that a write through them is a write to the tensor.
    negated = torch.func.functionalize(lambda one: over_in_order(one.clone(), strides, torch.Tensor.neg_))(tensor)
    assert torch.equal(negated, expected)


def _inverse(order):
    return [order.index(i) for i in range(len(order))]


def test_a_table_that_is_first_needed_while_a_program_is_compiled_serves_afterwards():
    """`compile=True` traces our functions under functionalization; what they look up must not stay its tensor."""
    gradient, kept = torch.randn(64), torch.rand(64) < 0.5
    blocked = pack(~kept, (1,))
    packing._table.cache_clear()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        make_fx(torch.func.functionalize(lambda one, other: packing.masked_gradient(one, other, [1])))(
            mode.from_tensor(gradient), mode.from_tensor(blocked)
        )
    assert torch.equal(packing.masked_gradient(gradient, blocked, [1]), gradient * kept)
