"""Row chains: every form of them beside the default one, and the gradients of autograd, wherever they are found."""

import copy

import pytest
import torch
from harness import Captured, Seen
from thoroughness import often
from torch import nn
from torch.nn import functional as F

import monetlite
from monetlite.core.graph import TILED_ROWS
from monetlite.operators.implementations import FUNCTIONS
from monetlite.planning.budgets import as_schedule
from monetlite.profiling.memory_records import peak_growth_bytes
from monetlite.solving.incumbent import Solution

WIDTH, HIDDEN, CLASSES = 16, 40, 53


class RootMeanSquare(nn.Module):
    """A norm in pieces, as transformers' models have it; `cast` computes it in float32."""

    def __init__(self, width, cast=False):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)
        self.cast = cast

    def forward(self, x):
        dtype = x.dtype
        x = x.float() if self.cast else x
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * x.to(dtype)


class LowRank(nn.Module):
    """A frozen linear layer with a trained one of low rank beside it (LoRA)."""

    def __init__(self, features, results):
        super().__init__()
        self.base = nn.Linear(features, results, bias=False).requires_grad_(False)
        self.down, self.up = nn.Linear(features, 4, bias=False), nn.Linear(4, results, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x)) * 0.5


class Layer(nn.Module):
    """Projections with something that mixes rows, and an MLP, in one of the forms that models have."""

    def __init__(self, form):
        super().__init__()
        norm = nn.LayerNorm if form == "layer_norm" else nn.RMSNorm if form == "fused" else RootMeanSquare
        biased = form in ("gelu", "layer_norm")
        linear = LowRank if form == "lora" else lambda a, b: nn.Linear(a, b, bias=biased)
        self.norm, self.after, self.last = norm(WIDTH), norm(WIDTH), RootMeanSquare(WIDTH)
        self.query, self.key = nn.Linear(WIDTH, WIDTH, bias=biased), nn.Linear(WIDTH, WIDTH, bias=biased)
        self.gate, self.up, self.down = linear(WIDTH, HIDDEN), linear(WIDTH, HIDDEN), linear(HIDDEN, WIDTH)
        self.form = form
        if form == "frozen":
            for layer in (self.gate, self.up, self.down):
                layer.requires_grad_(False)

    def forward(self, x):
        hidden = self.norm(x)
        x = x + self.query(hidden).cumsum(1) * torch.sigmoid(self.key(hidden)).mean(1, keepdim=True)
        hidden = self.after(x)
        if self.form in ("gelu", "layer_norm"):
            return x + self.down(F.gelu(self.up(hidden), approximate="tanh" if self.form == "gelu" else "none"))
        gate = self.gate(hidden)
        gate = F.gelu(gate, approximate="tanh") if self.form == "geglu" else F.silu(gate)
        made = self.down(gate * self.up(hidden))
        return x + (self.last(made) if self.form == "geglu" else made)


class Model(nn.Module):
    def __init__(self, form, layers=2, dtype=torch.float32):
        super().__init__()
        self.body = nn.Embedding(CLASSES, WIDTH)
        self.layers = nn.ModuleList(Layer(form) for _ in range(layers))
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.to(dtype)

    def forward(self, tokens):
        x = self.body(tokens)
        for layer in self.layers:
            x = layer(x)
        return {"loss": self.head(x).softmax(-1).square().mean()}


FORMS = ["swiglu", "geglu", "gelu", "layer_norm", "fused", "frozen", "lora"]


def chains(graph):
    return [op for op in graph.operators if op.family == "row_chain"]


def in_tiles(model, tokens, form="tiles_4"):
    """A schedule that runs every chain in this form, where it offers it."""
    graph = monetlite.trace(model, tokens, layout=TILED_ROWS)
    profile = monetlite.profile(graph, "rtx-4090")
    steps, live = [], set()

    def run(index):
        names = [item.name for item in profile.graph.operators[index].implementations]
        choice = names.index(form) if form in names else 0
        chosen = profile.graph.operators[index].implementations[choice]
        for value in chosen.reads:
            if value not in live:
                run(graph.writer[value])
        steps.append((index, choice))
        live.update(chosen.writes)

    for index, op in enumerate(graph.operators):
        if not op.optional:
            run(index)
    solution = Solution.of_steps(profile, tuple(steps), method="test")
    return as_schedule(profile, solution.peak_bytes, solution, 1e-5)


def tokens_of(batch=4, length=64):
    return torch.randint(0, CLASSES, (batch, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("form", often(FORMS, "fused", "lora", "layer_norm"))
def test_every_form_of_a_chain_agrees_with_the_default(form):
    torch.manual_seed(0)
    model = Model(form, layers=1).train()
    seen = Seen()
    captured = Captured(model, tokens_of(), layout=TILED_ROWS)
    captured.check(lambda spec: torch.ones(spec.shape), seen)
    names = seen.names("row_chain")
    assert {"tiles_2", "tiles_4", "tiles_8"} <= names
    assert {"products", "products_tiles_4"} <= names


def held_bytes(target, arguments):
    """Bytes that a chain holds at most, beside its operands and results."""
    results = []
    most_bytes = peak_growth_bytes(lambda: results.extend(FUNCTIONS[target].run(*arguments)))
    given = {tensor.untyped_storage().data_ptr() for tensor in arguments[0] if tensor is not None}
    storages = [tensor.untyped_storage() for tensor in results if tensor is not None]
    made = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return most_bytes - sum(size_bytes for at, size_bytes in made.items() if at not in given)


@pytest.mark.parametrize("form", often(FORMS, "swiglu", "layer_norm"))
def test_chains_hold_what_is_declared(form):
    """Beside operands and results: one tile's rows, and nothing of the tile before."""
    torch.manual_seed(0)
    captured = Captured(Model(form, layers=1).train(), tokens_of(16, 256), layout=TILED_ROWS)
    rows_bytes, tried = 16 * 256 * WIDTH * 4, set()
    for item, arguments in captured.runs("row_chain"):
        declared_bytes = FUNCTIONS[item.call.target].workspace_bytes(item.call)
        assert abs(held_bytes(item.call.target, arguments) - declared_bytes) <= rows_bytes / 20, item.name
        tried.add(item.name)
    assert {"default", "products", "tiles_2", "tiles_8", "tiles_8_inplace"} <= tried


@pytest.mark.thorough
def test_a_batch_without_rows_has_plain_trainings_gradients():
    model, tokens = Model("gelu", layers=1).train(), tokens_of()
    trained, plain = monetlite.MONeTWrapper(model, in_tiles(model, tokens)), copy.deepcopy(model)
    for each in (trained, plain):
        each(tokens[:0])["loss"].backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, equal_nan=True)


@pytest.mark.parametrize("form", often(FORMS, "lora"))
def test_a_step_in_tiles_has_plain_trainings_gradients(form):
    torch.manual_seed(0)
    model, tokens = Model(form).train(), tokens_of()
    plain = copy.deepcopy(model)
    schedule = in_tiles(model, tokens)
    trained = monetlite.MONeTWrapper(model, schedule)
    for each in (trained, plain):
        each(tokens)["loss"].backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        if theirs.grad is not None:
            largest = theirs.grad.abs().max().item()
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-5 * largest)
