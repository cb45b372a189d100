"""The largest batch within a budget: brute force agrees, and what is shown trains."""

import functools
import io
import json
from dataclasses import astuple, replace

import commands
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from step_lists import free_profile
from thoroughness import often
from torch import nn, randn

import monetlite
from monetlite.allocator import reserve
from monetlite.core.costs import Cost
from monetlite.core.errors import DeviceError, InfeasibleBudget, ModelError
from monetlite.core.graph import AS_TRACED, TILED_ROWS
from monetlite.core.options import SolvingOptions
from monetlite.core.simulate import simulate
from monetlite.core.steps import plain_steps
from monetlite.planning.batch_costs import Unlike, at_batch, same_step
from monetlite.planning.batches import BatchLimit, _bisect, largest_batch
from monetlite.reporting.text_solve import print_batches
from monetlite.solving.baselines import checkpointing_settings
from monetlite.solving.smallest import smallest_budget


@given(
    limit=st.integers(0, 3000),
    step=st.sampled_from([1, 2, 8]),
    start=st.integers(1, 400),
    guess=st.sampled_from([None, "right", "low", "high", "wild"]),
)
def test_the_limit_is_found_whatever_is_guessed(limit, step, start, guess):
    asked = []

    def fits(batch):
        asked.append(batch)
        return batch <= limit

    def guessed(low, high):
        return {None: None, "right": limit, "low": 0, "high": 10**6, "wild": (low * 7919) % 5000}[guess]

    found = _bisect(start * step, step, fits, guessed)
    assert found == limit // step * step
    assert all(batch % step == 0 and batch > 0 for batch in asked)


AMPLE = SolvingOptions(time_limit=30)
"""Time that none of these searches takes: each ends as soon as bounds and schedules meet."""


def network():
    layers = [module for _ in range(4) for module in (nn.Linear(256, 256), nn.Tanh())]
    return nn.Sequential(*layers)


@functools.cache
def price(batch):
    return monetlite.profile(monetlite.trace(network(), randn(batch, 256)), "rtx-3090")


@functools.cache
def needs(batch):
    """(plain training's peak, the smallest peak of any schedule), the latter exactly: the graph is small."""
    profile = price(batch).within(0.0)
    exact = smallest_budget(profile, seconds=30)
    assert exact.smallest_proven_bytes == exact.smallest_reached_bytes
    return simulate(profile, plain_steps(profile.graph)).peak_bytes, exact.smallest_reached_bytes


@pytest.mark.parametrize("first", often([1, 700], 1))
def test_brute_force_agrees(first):
    budget_bytes = 8_000_000
    found = largest_batch(price, budget_bytes, AMPLE, first=first)
    assert needs(found.largest)[1] <= budget_bytes < needs(found.largest + 1)[1]
    assert needs(found.plain_largest)[0] <= budget_bytes < needs(found.plain_largest + 1)[0]
    assert found.plain_largest < found.largest
    assert found.proven_impossible is None or found.proven_impossible > found.largest
    assert [point.batch for point in found.points] == sorted({point.batch for point in found.points})
    assert {found.plain_largest, found.largest} <= {point.batch for point in found.points}
    for point in found.points:
        assert point.peak_bytes <= budget_bytes
        assert (point.schedule is None) == (point.batch <= found.plain_largest)
        if point.schedule is not None:
            timeline = simulate(price(point.batch), point.schedule, budget_bytes)
            assert timeline.latency_ms == pytest.approx(point.latency_ms, rel=1e-3)
        assert point.samples_per_s == pytest.approx(1000 * point.batch / point.latency_ms)


def test_without_time_for_a_search_checkpointing_says_what_fits(monkeypatch):
    """Steps that are too large for a search of a second: none is made here."""
    monkeypatch.setattr("monetlite.solving.smallest.SMALL_OPERATORS", 0)
    monkeypatch.setattr("monetlite.solving.smallest._nest_plans", lambda *of, **by: None)
    monkeypatch.setattr("monetlite.solving.smallest._lower_in_threads", lambda *of, **by: None)

    def fits(batch):
        profile = price(batch).within(0.0)
        settings = checkpointing_settings(profile)
        return min(simulate(profile, steps).peak_bytes for steps in settings) <= 8_000_000

    found = largest_batch(price, 8_000_000, SolvingOptions(time_limit=5), first=1)
    assert found.largest > found.plain_largest
    assert fits(found.largest)
    assert not fits(found.largest + 1)


def test_multiples_only():
    found = largest_batch(price, 8_000_000, AMPLE, first=8, step=8)
    assert all(point.batch % 8 == 0 for point in found.points)
    assert needs(found.largest + 8)[1] > 8_000_000


@pytest.mark.parametrize("first", often([32, 5000], 5000))
def test_few_batches_are_traced_and_the_answer_is_dense(first):
    traced = []

    def counted(batch):
        traced.append(batch)
        return price(batch)

    found = largest_batch(counted, 8_000_000, AMPLE, first=first)
    assert len(traced) == len(set(traced)) <= 6
    assert {found.largest, found.largest + 1} <= set(traced)
    assert found.proven_impossible == found.largest + 1
    assert found.profile.graph.fingerprint == price(found.largest).graph.fingerprint


def test_costs_at_a_batch_are_those_of_its_trace():
    derived, traced = at_batch({32: price(32), 640: price(640)}, 101), price(101)
    assert same_step(derived, traced)
    assert derived.graph.resident == traced.graph.resident
    assert derived.graph.values == traced.graph.values
    plain, expected = (simulate(of, plain_steps(of.graph)) for of in (derived, traced))
    assert plain.peak_bytes == expected.peak_bytes
    assert plain.latency_ms == pytest.approx(expected.latency_ms, rel=1e-2)
    assert not same_step(derived, price(102))


def test_every_figure_of_costs_follows_the_batch():
    def at(batch):
        cost = Cost(
            latency_ms=batch,
            workspace_bytes=2 * batch,
            recompute_latency_ms=3 * batch,
            recompute_workspace_bytes=4 * batch,
            host_ms=5 * batch,
            recompute_host_ms=6 * batch,
        )
        return replace(price(batch), costs=tuple(tuple(cost for _ in each) for each in price(batch).costs))

    derived, expected = (profile.costs[0][0] for profile in (at_batch({32: at(32), 640: at(640)}, 101), at(101)))
    assert astuple(derived) == pytest.approx(astuple(expected))


def test_what_is_not_in_proportion_to_the_batch_is_traced():
    class Contrastive(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            x = self.linear(x)
            return (x @ x.T).logsumexp(1)

    @functools.cache
    def squared(batch):
        return monetlite.profile(monetlite.trace(Contrastive(), randn(batch, 8)), "rtx-3090")

    with pytest.raises(Unlike):
        at_batch({4: squared(4), 8: squared(8)}, 6)
    plain = simulate(squared(40), plain_steps(squared(40).graph)).peak_bytes
    found = largest_batch(squared, plain, SolvingOptions(time_limit=1), first=8)
    assert found.plain_largest == 40


@pytest.mark.thorough
def test_where_to_begin_is_only_that():
    assert largest_batch(price, 8_000_000, AMPLE, first=10**9).largest == (
        largest_batch(price, 8_000_000, AMPLE, first=700).largest
    )


def test_a_budget_for_nothing_and_one_for_everything():
    with pytest.raises(InfeasibleBudget, match="a batch of 1 needs"):
        largest_batch(price, 1_500_000, SolvingOptions(time_limit=1), first=4)
    with pytest.raises(ModelError, match="not what limits this model"):
        largest_batch(lambda _: price(2), 2**40, SolvingOptions(time_limit=1), first=4)


OWN = """
import torch
from torch import nn

def build(batch=8):
    layers = [module for _ in range(4) for module in (nn.Linear(256, 256), nn.Tanh())]
    return nn.Sequential(*layers), (torch.randn(batch, 256),)
"""


@pytest.mark.usefixtures("traced_once")
class TestCommand:
    ARGUMENTS = ("solve", "--max-batch", "--model", "own.py:build", "--device", "rtx-3090", "--time-limit", "0.3")

    @pytest.fixture(autouse=True)
    def _own_model(self, work_folder):
        (work_folder / "own.py").write_text(OWN)

    def test_a_table_and_json(self):
        budget = ("--budget", "8MB", "--multiple-of", "64")
        result = commands.run(*self.ARGUMENTS, *budget)
        assert result.exit_code == 0, result.output
        assert "own.py:build within 8 MB: batch" in result.output
        assert "estimated for rtx-3090" in result.output
        assert "monetlite solve --model own.py:build --batch" in result.output
        facts = json.loads(commands.run(*self.ARGUMENTS, *budget, "--json", "--batch", "64").stdout)
        assert facts["largest"] >= facts["plain_largest"]
        assert facts["points"]
        assert max(map(len, result.output.splitlines()[: 2 + len(facts["points"])])) <= 80
        assert all(point["peak_bytes"] <= 8e6 for point in facts["points"])

    def test_a_budget_that_nothing_fits(self):
        result = commands.run(*self.ARGUMENTS, "--budget", "1MB", "--json")
        assert result.exit_code == 3
        assert "a batch of 1 needs" in result.output


def test_a_models_name_is_printed_as_it_is():
    profile = price(8)
    named = replace(profile, graph=replace(profile.graph, name="[old]/[/x]/own.py:build"))
    found = BatchLimit(
        budget_bytes=10**6,
        reserved=False,
        step=1,
        plain_largest=0,
        largest=8,
        proven_impossible=None,
        points=(),
        profile=named,
    )
    console = Console(file=io.StringIO(), width=80)
    print_batches(console, found, "")
    assert console.file.getvalue().startswith("[old]/[/x]/own.py:build within 1 MB: batch 8")


@pytest.mark.thorough
def test_a_budget_of_reserved_memory():
    """Every batch that is shown runs within it; fewer fit than by peaks."""
    budget_bytes = 60 * 10**6

    @functools.cache
    def wide(batch):
        layers = [module for _ in range(6) for module in (nn.Linear(512, 512), nn.Tanh())]
        return monetlite.profile(monetlite.trace(nn.Sequential(*layers), randn(batch, 512)), "rtx-3090")

    found = largest_batch(
        wide,
        budget_bytes,
        first=512,
        step=64,
        options=SolvingOptions(reserved=True, time_limit=1),
    )
    by_peaks = largest_batch(wide, budget_bytes, SolvingOptions(time_limit=1), first=512, step=64)
    assert 0 < found.plain_largest < found.largest < by_peaks.largest
    for point in found.points:
        profile = wide(point.batch)
        steps = plain_steps(profile.graph) if point.schedule is None else point.schedule
        within = reserve(profile, steps, expandable=True, limit_bytes=budget_bytes)
        assert within.fits
        assert point.peak_bytes < point.reserved_bytes <= budget_bytes
        assert reserve(profile, steps, expandable=True, limit_bytes=point.reserved_bytes).fits
    more = wide(found.plain_largest + 64)
    assert not reserve(more, plain_steps(more.graph), expandable=True, limit_bytes=budget_bytes).fits


def test_nothing_is_reserved_on_a_cpu():
    def on_the_cpu(batch):
        return free_profile(monetlite.trace(network(), randn(batch, 256)))

    with pytest.raises(DeviceError, match="--reserved"):
        largest_batch(
            on_the_cpu,
            8_000_000,
            first=8,
            options=SolvingOptions(reserved=True, time_limit=1),
        )


class Words(nn.Module):
    """A head whose logits are the largest of the step, and its loss."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(2000, 32), nn.Linear(32, 2000)

    def forward(self, tokens, targets):
        return nn.functional.cross_entropy(self.head(torch.relu(self.words(tokens))), targets)


@functools.cache
def price_words(batch, layout):
    drawn = torch.zeros(64 * batch, dtype=torch.int64)
    return monetlite.profile(monetlite.trace(Words(), (drawn, drawn), layout=layout), "rtx-3090")


def test_tiles_are_compared_with_plain_training_as_it_is():
    def price_plain(batch):
        return price_words(batch, AS_TRACED)

    options, budget_bytes = SolvingOptions(time_limit=2, tolerance=1e-5), 16_000_000
    alone = largest_batch(price_plain, budget_bytes, options, first=8)
    found = largest_batch(
        lambda batch: price_words(batch, TILED_ROWS), budget_bytes, options, first=8, price_plain=price_plain
    )
    assert found.largest > 2 * alone.largest
    assert found.plain_largest == alone.plain_largest
    last = found.points[-1]
    of_plain = price_plain(last.batch)
    plain_ms = simulate(of_plain, plain_steps(of_plain.graph)).latency_ms
    assert last.batch == found.largest
    assert last.schedule.layout == TILED_ROWS
    assert last.overhead == pytest.approx(last.latency_ms / plain_ms - 1)
    assert found.proven_impossible is None or found.proven_impossible > found.largest
