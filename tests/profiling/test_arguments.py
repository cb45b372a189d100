"""What is made up to measure a call is of the kind that steps have."""

import contextlib

import pytest
import torch
import transformers.integrations.moe  # noqa: F401  # has operators of its own
from torch import nn

import monetlite
from monetlite.profiling import measured_calls
from monetlite.profiling.arguments import _contents, depends_on_contents, index_bound, make_arguments
from monetlite.profiling.measured import measure_profile
from monetlite.profiling.measured_calls import as_function, calls_to_measure
from monetlite.profiling.meters import meter_for


class Bags(nn.Module):
    def __init__(self, mode):
        super().__init__()
        self.bags, self.head = nn.EmbeddingBag(1000, 64, mode=mode), nn.Linear(64, 1)

    def forward(self, words):
        return self.head(self.bags(words))


class Patches(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x):
        return {"loss": nn.functional.unfold(self.conv(x), 3, padding=1).square().mean()}


def test_what_is_measured_is_what_runs():
    """The gradient of `unfold` is copied out of a storage that is nine times as large."""
    model, images = Patches(), torch.randn(8, 3, 64, 64)
    schedule = monetlite.optimize(model, images, "100%", device="cpu", time_limit=1)
    report = monetlite.verify(model, schedule, images, repeats=1)
    assert report.peak_bytes == pytest.approx(schedule.peak_bytes, rel=0.001)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_are_not_empty(mode):
    """The gradient of the largest copies what belongs to bags that have something in them."""
    model, words = Bags(mode), torch.randint(0, 1000, (4096, 8))
    schedule = monetlite.optimize(model, words, "105%", device="cpu", time_limit=1)
    report = monetlite.verify(model, schedule, words, repeats=1)
    assert report.passed, report.reasons
    assert report.peak_bytes == pytest.approx(schedule.peak_bytes, rel=0.02)


class Particular(nn.Module):
    """Operators that refuse what is not a probability, a rate, a class, or the index of something."""

    def __init__(self):
        super().__init__()
        self.words, self.scores = nn.Embedding(7, 6), nn.Linear(6, 5)
        self.bags = nn.EmbeddingBag(7, 6, mode="sum")

    def forward(self, tokens, rows, targets):
        x = self.words(tokens) + self.bags(rows)
        x = x.index_select(0, targets).index_add(0, targets, x) + x[targets] + x.gather(1, rows)
        x = x.scatter_add(1, rows, x).scatter(1, rows, 0.5).index_put((targets,), x, accumulate=True)
        x = x + torch.take_along_dim(x, rows, 1) + torch.take(x, rows) + x.cumsum(1) + x.sort(1).values
        first = (torch.arange(len(x)) == 0)[:, None]
        x = x.masked_scatter(first, x[1:2]).masked_scatter(first.expand_as(x), x[1:2])
        x = x.masked_scatter(first & (x > 9), x[:1] * 2)
        x = x.index_put((torch.arange(len(x)) < 2,), x[2:4].detach())
        scores = self.scores(nn.functional.dropout(x, 0.25))
        odds = scores.sigmoid()
        drawn = torch.bernoulli(odds.detach()) + torch.poisson(odds.detach()) + torch.normal(scores, odds.detach())
        losses = nn.functional
        found = [
            losses.binary_cross_entropy(odds, odds.detach()),
            losses.binary_cross_entropy_with_logits(scores, odds.detach()),
            losses.nll_loss(scores, targets, ignore_index=2),
            losses.cross_entropy(scores.t()[None], targets[None]),
            losses.multi_margin_loss(scores, targets),
            losses.poisson_nll_loss(scores, drawn),
            losses.kl_div(scores, odds.detach()),
            torch.multinomial(odds.detach(), 2).sum() * scores.topk(2).values.mean(),
        ]
        pooled, places = losses.max_pool2d(x[None, None], 2, return_indices=True)
        found.append(losses.max_pool2d(scores[None, None], 1, 2).mean())
        return sum(found) + losses.max_unpool2d(pooled, places, 2).mean() + scores.logsumexp(1).mean()


@pytest.fixture(scope="module")
def particular():
    tokens, rows = torch.randint(0, 6, (6,)), torch.randint(0, 6, (6, 6))
    return monetlite.trace(Particular(), (tokens, rows, torch.randint(0, 5, (6,))))


def test_made_up_arguments_are_valid_at_once(particular, monkeypatch):
    """On a GPU the first invalid ones end the process. The CPU's kernels raise an error."""
    candidates = calls_to_measure(particular)
    for candidate in candidates.values():
        with as_function(candidate.call, "cpu") as (call, _):
            call()
    targets = {candidate.call.target.split(".")[1] for candidate in candidates.values()}
    assert {"bernoulli", "binary_cross_entropy", "poisson", "nll_loss_forward", "gather", "index_put"} <= targets


def test_what_is_unknown_runs_on_the_cpu_before_it_runs_on_a_gpu(particular, monkeypatch):
    devices, unknown = [], []
    make = make_arguments

    def made(call, device, **options):
        devices.append((call.target, device))
        return make(call, "cpu", **options)

    monkeypatch.setattr(measured_calls, "make_arguments", made)
    monkeypatch.setattr(measured_calls, "forked_state", lambda device: contextlib.nullcontext())
    for candidate in calls_to_measure(particular).values():
        with as_function(candidate.call, "cuda"):
            unknown += [candidate.call.target] * depends_on_contents(candidate.call)
    tried = [target for target, device in devices if device == "cpu"]
    assert tried == unknown
    assert not any("embedding.default" in target or "nll_loss" in target for target in tried)


def test_indices_are_of_every_row(particular):
    """Those of a single row would add up at one address, which takes a GPU longer."""
    bounds = {c.call.target: index_bound(c.call) for c in calls_to_measure(particular).values()}
    assert bounds["aten.scatter_add.default"] == 6
    assert bounds["aten.index_put.default"] == 6
    assert bounds["aten.embedding.default"] == 7


def test_bits_of_a_mask_are_as_often_one_as_zero():
    """Of a mask without ones, no element is written, which takes far less time than a step's."""
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 64), nn.Hardtanh())
    graph = monetlite.trace(model, torch.randn(512, 64))
    shares = {}
    for candidate in calls_to_measure(graph).values():
        args, _ = make_arguments(candidate.call, "cpu")
        for made in args:
            if isinstance(made, torch.Tensor) and made.dtype is torch.uint8:
                bits = sum(byte.bit_count() for byte in made.flatten().tolist())
                shares[candidate.call.target] = bits / (8 * made.numel())
    assert any("masked_gradient_" in target for target in shares)
    assert any("dropout" in target for target in shares)
    assert all(share == pytest.approx(0.5, abs=0.05) for share in shares.values())


class Experts(nn.Module):
    """Rows in groups, each of which has a matrix of its own."""

    def __init__(self, product, dtype):
        super().__init__()
        self.product, self.weights = product, nn.Parameter(torch.randn(4, 16, 32, dtype=dtype))

    def forward(self, x, ends):
        return self.product(x, self.weights, offs=ends)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_groups_of_rows_are_of_equal_size(dtype):
    """Without rows in its groups, a product would take no time and no memory."""
    one, own = nn.functional.grouped_mm, torch.ops.transformers.grouped_mm_fallback
    product, count = (one, 3) if dtype is torch.bfloat16 else (own, 2)
    x, ends = torch.randn(64, 16, dtype=dtype, requires_grad=True), torch.tensor([1, 2, 3, 64], dtype=torch.int32)
    graph = monetlite.trace(Experts(product, dtype), (x, ends))
    calls = [item.call for item in calls_to_measure(graph).values() if "grouped_mm" in item.call.target]
    assert len(calls) == count, "also of the gradients"
    for call in calls:
        assert make_arguments(call, "cpu")[0][2].tolist() == [16, 32, 48, 64]


class Rounding(nn.Module):
    """Activations rounded to eight bits, as training in float8 has them."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        h = self.first(x)
        return self.last(h + (h.to(torch.float8_e4m3fn).float() - h).detach())


def test_numbers_of_eight_bits_are_measured():
    graph = monetlite.trace(Rounding(), torch.randn(4, 8))
    assert "float8_e4m3fn" in {value.dtype for value in graph.values}
    measure_profile(graph, "cpu")
    assert _contents(100, torch.float8_e5m2, "cpu", None, True).float().min() > 0


def test_a_result_of_eight_bits_before_a_call_is_brought_into_the_cache():
    meter_for("cpu").latency_ms(lambda: None, torch.zeros(4, 6, dtype=torch.float8_e4m3fn).t())
