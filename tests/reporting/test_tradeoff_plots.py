"""The trade-off that is drawn is the one that was solved for, whatever its shape."""

import csv
import itertools
import json
import random

import numpy as np
import pytest
from matplotlib.patches import StepPatch
from pictures import assert_readable, plot, words_of_svg

from monetlite.core.options import SolvingOptions
from monetlite.core.schedule import Status
from monetlite.planning.tradeoff import (
    BLOCKS,
    CHECKMATE,
    GIST,
    GREEDY,
    SQRT,
    BudgetPoint,
    Tradeoff,
    TradeoffPoint,
    trade_off,
)
from monetlite.reporting.plots.tradeoff_plot import draw_tradeoff


def test_a_trade_off_is_consistent(traded, opened):
    assert [item.budget_bytes for item in traded.budgets] == sorted(item.budget_bytes for item in traded.budgets)
    assert traded.budgets[-1].budget_bytes == traded.plain.peak_bytes
    assert traded.own.peak_bytes in [item.budget_bytes for item in traded.budgets]
    assert traded.smallest_proven_bytes <= traded.smallest_reached_bytes <= traded.own.peak_bytes
    for item in traded.budgets:
        assert item.best is not None
        assert item.best.peak_bytes <= item.budget_bytes
        assert item.lower_bound_ms <= item.best.latency_ms
        for points in traded.others.values():
            for point in points:
                if point.peak_bytes <= item.budget_bytes:
                    assert item.lower_bound_ms <= point.latency_ms * (1 + 1e-9)
                    assert item.best.latency_ms <= point.latency_ms * (1 + 1e-9)
        if traded.own.peak_bytes <= item.budget_bytes:
            assert item.best.latency_ms <= traded.own.latency_ms
    assert set(traded.others) == {SQRT, BLOCKS, CHECKMATE, GIST, GREEDY}
    for name in (CHECKMATE, GIST, GREEDY):
        assert all(point.peak_bytes <= point.budget_bytes for point in traded.others[name])
    for before, after in itertools.pairwise(traded.budgets):
        assert before.best.latency_ms >= after.best.latency_ms
        assert before.lower_bound_ms >= after.lower_bound_ms


def test_a_trade_off_is_drawn_where_it_is(traded, subject):
    figure = draw_tradeoff(traded, subject)
    (axes,) = figure.axes
    lines = {line.get_label().split(":")[0].split("\n")[0]: line.get_xydata() for line in axes.lines}
    ours = [(item.best.peak_bytes, item.best.latency_ms / traded.plain.latency_ms - 1) for item in traded.budgets]
    assert lines["monetlite"] == pytest.approx(np.array(list(dict.fromkeys(ours))))
    for name in (CHECKMATE, GREEDY):
        reached = [(item.peak_bytes, traded.overhead(item.latency_ms)) for item in traded.others[name]]
        assert lines[name] == pytest.approx(np.array(reached))
    (bound,) = (item for item in axes.patches if isinstance(item, StepPatch) and item.get_fill())
    values, edges, _ = bound.get_data()
    assert values == pytest.approx([traded.overhead(item.lower_bound_ms) for item in traded.budgets])
    assert list(edges[1:]) == [item.budget_bytes for item in traded.budgets]
    assert_readable(figure)


@pytest.mark.parametrize("seed", range(5))
def test_trade_offs_of_any_shape_can_be_read(seed, subject):
    rng = random.Random(seed)
    plain = TradeoffPoint(peak_bytes=10**9, latency_ms=100.0)
    budgets = sorted(rng.sample(range(2 * 10**8, 10**9), 6))
    latencies = sorted((100 * (1 + rng.random() ** 3) for _ in budgets), reverse=True)
    best = [
        BudgetPoint(
            budget_bytes=budget_bytes,
            status=Status.FEASIBLE,
            best=None
            if rng.random() < 0.2
            else TradeoffPoint(peak_bytes=budget_bytes - 1000, latency_ms=latency_ms),
            lower_bound_ms=90.0,
        )
        for budget_bytes, latency_ms in zip(budgets, latencies, strict=True)
    ]

    def anywhere():
        return TradeoffPoint(peak_bytes=rng.randrange(2 * 10**8, 10**9), latency_ms=100 + 60 * rng.random())

    greedy = tuple(TradeoffPoint(peak_bytes=size, latency_ms=rng.choice([110.0, 900.0])) for size in budgets[2:])
    others = {SQRT: (anywhere(),), BLOCKS: (anywhere(),), CHECKMATE: (), GIST: (plain,), GREEDY: greedy}
    figure = draw_tradeoff(
        Tradeoff(
            plain=plain,
            own=anywhere(),
            budgets=tuple(best),
            others=others,
            smallest_proven_bytes=budgets[0] - rng.randrange(10**8),
            smallest_reached_bytes=budgets[0],
            time_limit=1.0,
            baseline_seconds=1.0,
        ),
        subject,
    )
    assert_readable(figure)


def test_a_trade_off_by_command(solved, work_folder):
    quick = ("--kind", "tradeoff", "--points", "2", "--time-limit", "0.3")
    result = plot(solved, *quick, "--output", "t.svg", "--csv", "t.csv")
    assert result.exit_code == 0, result.output
    assert "estimated for p100" in " ".join(result.stdout.split())
    assert "smallest budget" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    with open("t.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    ours = [row for row in rows if row["method"] == "monetlite"]
    assert len(ours) == 2
    assert all(float(row["lower_bound_ms"]) <= float(row["latency_ms"]) for row in ours)
    words = words_of_svg("t.svg")
    for named in ("this schedule", "plain training", "√n checkpointing", "nothing fits below", "Checkmate"):
        assert named in words
    result = plot(solved, *quick, "--output", "t.png", "--json")
    facts = json.loads(result.stdout)
    assert facts["kind"] == "tradeoff"
    assert {"plain training", "this schedule", "monetlite", GREEDY, SQRT, BLOCKS} <= {
        point["method"] for point in facts["points"]
    }


def test_what_was_proven_of_a_schedule_holds_for_smaller_budgets(opened):
    known_bytes = opened.schedule.budget_bytes
    plain_ms = opened.schedule.plain_latency_ms
    found = trade_off(
        opened.profile,
        opened.plain,
        opened.steps,
        SolvingOptions(time_limit=0.5),
        points=3,
        known_bound=(known_bytes, 10 * plain_ms),
    )
    below = [item for item in found.budgets if item.budget_bytes <= known_bytes]
    above = [item for item in found.budgets if item.budget_bytes > known_bytes]
    assert below
    assert above
    assert all(item.lower_bound_ms >= 10 * plain_ms for item in below)
    assert all(item.lower_bound_ms < 10 * plain_ms for item in above)
