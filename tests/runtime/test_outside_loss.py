"""A loss that the caller computes: measured in the first steps, counted from then on, within the budget."""

import pytest
import torch
from thoroughness import often
from torch import nn
from torch.nn import functional as F

import monetlite
from monetlite.core.errors import InfeasibleBudget
from monetlite.profiling.memory_records import peak_growth_bytes
from monetlite.runtime import outside_loss
from monetlite.runtime.serving import own_bytes

pytestmark = pytest.mark.early  # where memory is in many pieces, looks at it come late, and a loss may be missed

CLASSES, ROWS = 4000, 768
QUICK = {"device": "rtx-4090", "time_limit": 0.3}


class Growth:
    """A measurement that found nothing, by looks that were late or not."""

    def __init__(self, late):
        self.was_late = late

    def end(self):
        return 0, 0


def model():
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64)]
    for _ in range(3):
        layers += [nn.Linear(64, 1024), nn.GELU(), nn.Linear(1024, 64)]
    return nn.Sequential(*layers, nn.Linear(64, CLASSES, bias=False))


def cross_entropy(output):
    return F.cross_entropy(output, torch.arange(len(output)) % CLASSES)


def steps(trained, x, loss, count=16):
    """As many steps as it takes, on a busy machine, to see what a loss needs that began to count."""
    for _ in range(count):
        trained.zero_grad()
        loss(trained(x)).backward()


def peak_bytes(trained, x, loss):
    """The measured peak of a step."""

    def step():
        steps(trained, x, loss, 1)

    step()
    trained.zero_grad()
    return own_bytes([*trained.parameters(), x]) + peak_growth_bytes(step)


@pytest.mark.parametrize("wait", often([False, True], False))
def test_a_step_keeps_to_its_budget_with_the_loss(wait, caplog):
    x = torch.randn(ROWS, 64)
    plain_bytes = peak_bytes(model(), x, cross_entropy)
    budget = int(0.87 * plain_bytes)
    trained = monetlite.MONeTWrapper(model(), budget=budget, wait=wait, **QUICK)
    with caplog.at_level("INFO", logger="monetlite"):
        steps(trained, x, cross_entropy)
        measured = peak_bytes(trained, x, cross_entropy)
    assert any("with the loss outside of the model" in line for line in caplog.messages)
    assert 0.97 * trained.schedule.peak_bytes <= measured <= budget
    assert trained.schedule.peak_bytes > 3 * ROWS * CLASSES * 4


def test_a_compiled_step_keeps_to_its_budget_with_the_loss(caplog):
    x, compiled = torch.randn(ROWS, 64), model()
    budget = int(0.87 * peak_bytes(model(), x, cross_entropy))
    compiled.compile(backend="monetlite", dynamic=False, options={"budget": budget, "time_limit": 0.3})
    with caplog.at_level("INFO", logger="monetlite"):
        steps(compiled, x, cross_entropy)
        measured = peak_bytes(compiled, x, cross_entropy)
    assert any("with the loss outside of the model" in line for line in caplog.messages)
    assert measured <= budget


@pytest.mark.thorough
def test_a_compiled_step_warns_where_a_file_keeps_its_schedule(tmp_path):
    x, compiled = torch.randn(ROWS, 64), model()
    options = {"budget": int(0.87 * peak_bytes(model(), x, cross_entropy)), "schedule": str(tmp_path / "kept.yaml")}
    compiled.compile(backend="monetlite", dynamic=False, options={"time_limit": 0.3, **options})
    with pytest.warns(UserWarning, match="A schedule file can't count it"):
        peak_bytes(compiled, x, cross_entropy)


@pytest.mark.thorough
def test_what_a_caller_keeps_counts_through_the_backward_pass():
    x, kept = torch.randn(ROWS, 64), []

    def keeping(output):
        kept[:] = [output, torch.empty_like(output)]
        return output.square().sum()

    trained = monetlite.MONeTWrapper(model(), budget="100%", **QUICK)
    peak_bytes(trained, x, keeping)
    memory = trained._training.schedules.search.outside.memory
    kept_bytes, _ = memory.of(monetlite.trace(model(), x))
    assert kept_bytes == pytest.approx(ROWS * CLASSES * 4, rel=0.1)


def test_a_loss_that_does_not_fit_is_said():
    x = torch.randn(ROWS, 64)
    trained = monetlite.MONeTWrapper(model(), budget=int(3.05 * ROWS * CLASSES * 4), **QUICK)

    with pytest.raises(InfeasibleBudget, match="at loss"):
        steps(trained, x, cross_entropy)


def test_a_refusal_says_that_the_loss_is_not_counted_yet():
    trained = monetlite.within(model(), budget="1MB", device="cpu", time_limit=1)
    with pytest.raises(InfeasibleBudget, match=r"A loss of the model's outputs \(.*\) comes on top"):
        trained(torch.randn(ROWS, 64))


def test_a_given_schedule_warns_and_trains_on():
    x = torch.randn(ROWS, 64)
    graph = monetlite.trace(model(), x)
    loose = monetlite.solve(monetlite.profile(graph, "rtx-4090"), "100%", time_limit=0.3)
    tight = monetlite.solve(monetlite.profile(graph, "rtx-4090"), loose.peak_bytes, time_limit=0.3)
    trained = monetlite.MONeTWrapper(model(), tight)
    with pytest.warns(UserWarning, match="with the loss outside of the model, this step takes at least"):
        steps(trained, x, cross_entropy)
    plain = model()
    cross_entropy(plain(x)).backward()
    for ours, theirs in zip(trained.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_a_small_loss_changes_nothing():
    trained = monetlite.MONeTWrapper(nn.Linear(8, 8), budget="100%", time_limit=0.3)
    for _ in range(3):
        trained(torch.randn(4, 8)).sum().backward()
    assert trained._training.schedules.search.outside.memory is None


@pytest.mark.thorough
def test_a_given_schedule_gives_way_to_one_that_counts_the_loss():
    x = torch.randn(ROWS, 64)
    plain_bytes = peak_bytes(model(), x, cross_entropy)
    budget = int(0.87 * plain_bytes)
    profile = monetlite.profile(monetlite.trace(model(), x), "rtx-4090")
    given = monetlite.solve(
        profile, min(budget, monetlite.solve(profile, "100%", time_limit=0.3).peak_bytes), time_limit=1
    )
    trained = monetlite.MONeTWrapper(model(), given, budget=budget, **QUICK)
    steps(trained, x, cross_entropy)
    measured = peak_bytes(trained, x, cross_entropy)
    assert given not in trained._training.schedules.known
    assert measured <= budget


@pytest.mark.parametrize(
    ("late", "measured_in"),
    [(False, [1, 2, 3, 4, 8, 16, 32, 64]), (True, [*range(1, 26), *range(32, 42), 64])],
)
def test_a_loss_is_measured_again_where_looks_were_late(monkeypatch, late, measured_in):
    monkeypatch.setattr(outside_loss, "AllocatedGrowth", lambda _: Growth(late))
    outside, output, found = outside_loss.OutsideLoss(), torch.ones(8, 8, requires_grad=True), []
    for number in range(1, 65):
        if outside.forward_ends(output, "cpu", least_bytes=0):
            found.append(number)
        outside.backward_begins()
        outside.measured()
    assert found == measured_in


def test_garbage_is_collected_once_after_a_capture(monkeypatch):
    """It takes as long as many steps."""
    x, collected = torch.randn(ROWS, 64), []
    trained = monetlite.MONeTWrapper(model(), budget="1GB", **QUICK)
    steps(trained, x, torch.sum, 1)  # captures it
    monkeypatch.setattr(outside_loss.gc, "collect", lambda: collected.append(1))
    steps(trained, x, torch.sum, 8)
    assert not collected


def test_a_loss_that_grows_later_is_counted():
    x = torch.randn(ROWS, 64)
    budget = int(0.87 * peak_bytes(model(), x, cross_entropy))
    trained = monetlite.MONeTWrapper(model(), budget=budget, wait=True, **QUICK)
    steps(trained, x, torch.sum, 4)
    steps(trained, x, cross_entropy)
    counted = trained.schedule.peak_bytes
    assert counted <= budget
    assert 0.95 * counted <= peak_bytes(trained, x, cross_entropy) <= budget
