"""Which storages a traced step has: views that schemas keep quiet about, and what has none that can be planned."""

import inspect
import random

import pytest
import torch
from small_models import assert_same, step, twin
from step_lists import free_profile, recompute_with_any_reads, schedule_of, with_random_implementations
from thoroughness import often
from torch import nn

import monetlite
from monetlite.core.errors import TraceError
from monetlite.core.graph import ValueKind


class Chunks(nn.Module):
    """Parts of a tensor that is read whole too, after them."""

    def __init__(self, split):
        super().__init__()
        self.split, self.layer = split, nn.Linear(6, 6)

    def forward(self, x):
        whole = self.layer(x)
        first, second = self.split(whole)
        return (first * 2).cos() * second.sin() + torch.sigmoid(whole)[:, :3]


SPLITS = {
    "chunk": lambda x: torch.unsafe_chunk(x, 2, 1),
    "split": lambda x: torch.unsafe_split(x, 3, 1),
    "sizes": lambda x: torch.ops.aten.unsafe_split_with_sizes(x, [3, 3], 1),
}


@pytest.mark.parametrize("kind", often(SPLITS, "split", "sizes"))
def test_unsafe_parts_are_views(kind):
    """No implementation overwrites one while the others, or the whole, are read."""
    model, inputs = Chunks(SPLITS[kind]), (torch.randn(4, 6),)
    graph = monetlite.trace(model, inputs)
    assert not any("split" in operator.family for operator in graph.operators)
    expected = step(twin(model), inputs)
    for seed in range(2):
        rng = random.Random(seed)
        steps = with_random_implementations(graph, recompute_with_any_reads(graph, rng, 0.5), rng)
        wrapper = monetlite.MONeTWrapper(twin(model), schedule_of(free_profile(graph), steps))
        assert_same(step(wrapper, inputs), expected)


def test_gates_of_a_cell_are_counted_once():
    graph = monetlite.trace(nn.LSTMCell(16, 16), torch.randn(8, 16))
    gates = [value for value in graph.values if value.kind is ValueKind.ACTIVATION and value.shape == (8, 64)]
    assert len(gates) == 3, "two products and their sum"
    assert not any("split" in value.name for value in graph.values)


@torch.library.custom_op("monetlite_tests::same_or_double", mutates_args=())
def same_or_double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@same_or_double.register_fake
def _(x):
    return x.view(-1).view(x.shape)


same_or_double.register_autograd(lambda _, gradient: gradient * 2)


def line_of(owner):
    """The line of a class that is marked."""
    lines, start = inspect.getsourcelines(owner)
    return start + next(number for number, text in enumerate(lines) if "# here" in text)


class Sharing(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return same_or_double(self.layer(x)).exp()  # here


def test_an_operator_that_shares_storage_unsaid_is_refused():
    where = rf"test_storages\.py:{line_of(Sharing)}: monetlite_tests.*returns memory that it was given"
    with pytest.raises(TraceError, match=where):
        monetlite.trace(Sharing(), torch.randn(4, 6))


class Sparse(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.embed, self.layer = kind(9, 6, sparse=True), nn.Linear(6, 6)

    def forward(self, x):
        return self.layer(self.embed(x))  # here


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_refused_and_what_to_do_is_said(kind):
    where = rf"test_storages\.py:{line_of(Sparse)}.*sparse tensor.*sparse=False"
    with pytest.raises(TraceError, match=where):
        monetlite.trace(Sparse(kind), torch.randint(0, 9, (3, 5)))


def test_a_budget_for_sparse_gradients_is_refused():
    wrapper = monetlite.MONeTWrapper(Sparse(nn.Embedding), budget="100%", device="rtx-4090", whole=True)
    with pytest.raises(TraceError, match="sparse=False"):
        wrapper(torch.randint(0, 9, (3, 5)))
