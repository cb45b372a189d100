"""`verify` says what differs from plain training, where that begins, and why a schedule doesn't pass."""

import contextlib
import functools
import io
import json
from dataclasses import replace

import commands
import pytest
import torch
from rich.console import Console
from step_lists import free_profile, recompute, recompute_everything, schedule_of
from thoroughness import often
from torch import nn
from torch._subclasses import FakeTensorMode

import monetlite
from monetlite.checking import verification
from monetlite.checking.comparison import runner
from monetlite.checking.measurements import StepMemory
from monetlite.checking.report import VerificationLimits
from monetlite.checking.trainee import Trainee, default_loss
from monetlite.core.files.plain_data import json_text
from monetlite.core.source import ModelSource
from monetlite.core.steps import plain_steps
from monetlite.operators import implementations, resolve
from monetlite.profiling.meters import meter_for
from monetlite.profiling.step_additions import with_optimizer
from monetlite.reporting.text_verify import print_report, report_facts
from monetlite.tracing import trace
from monetlite.tracing.step_inputs import resident_bytes
from monetlite.zoo.check import build

AMPLE = 10**9
"""A budget in bytes that nothing here exceeds."""


def steps_with(graph, **implementations):
    """The steps of plain training, some operators run by other implementations."""
    chosen = {graph.by_name[name]: how for name, how in implementations.items()}

    def choose(index):
        names = [item.name for item in graph.operators[index].implementations]
        return names.index(chosen.get(index, names[0]))

    return recompute(graph, lambda _: False, choose)


def schedule_for(model, inputs, tolerance=0.0, **implementations):
    graph = trace(model, inputs).available("cpu")
    schedule = schedule_of(free_profile(graph), steps_with(graph, **implementations), AMPLE)
    return replace(schedule, tolerance=tolerance, autocast=graph.autocast)


class Images(nn.Module):
    """As few layers as there are things to tell apart: every operation is captured again for every report."""

    def __init__(self):
        super().__init__()
        self.stem, self.bn, self.pool = (
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.MaxPool2d(2),
        )
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1, stride=2)
        self.dropout, self.head = nn.Dropout(0.3), nn.Linear(72, 5)

    def forward(self, x):
        x = self.pool(torch.relu(self.bn(self.stem(x))))
        return self.head(self.dropout(self.conv2(x)).flatten(1))


@functools.cache
def traced_images(autocast=False):
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return trace(Images(), torch.randn(4, 3, 12, 12)).available("cpu")


def verify(model, schedule, inputs, **options):
    return monetlite.verify(model, schedule, inputs, repeats=1, **options)


def relative(expected, found):
    return ((expected.double() - found.double()).abs().max() / expected.double().abs().max()).item()


class ConvolutionAndGelu(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.act = nn.GELU()
        self.last = nn.Conv2d(8, 8, 3, padding=1, bias=False)

    def forward(self, x):
        return self.last(self.act(self.conv(x)))


def test_what_introduces_a_difference_is_told_from_what_passes_it_on():
    """Beside a computation of our own: autograd's tensors, caught by hooks, and the same formulas on them."""
    model, x = ConvolutionAndGelu(), torch.randn(8, 3, 10, 10)
    schedule = schedule_for(model, x, 4e-3, **{"act.backward": "from_bfloat16", "conv.backward_weight": "chunks2"})
    report = verify(model, schedule, x, operators=True)
    caught = {}
    model.conv.register_forward_hook(lambda *call: caught.update(source=call[2].detach()))
    model.act.register_full_backward_hook(lambda *call: caught.update(upstream=call[2][0], gradient=call[1][0]))
    model(x).square().mean().backward()

    kept = caught["source"].bfloat16().float()
    from_kept = torch.ops.aten.gelu_backward(caught["upstream"], kept)
    halves = [
        torch.nn.grad.conv2d_weight(part, model.conv.weight.shape, gradient, padding=1)
        for part, gradient in zip(x.chunk(2), caught["gradient"].chunk(2), strict=True)
    ]
    expected = {
        "act.backward": relative(caught["gradient"], from_kept),
        "conv.backward_weight": relative(model.conv.weight.grad, sum(halves)),
    }
    introduced = {item.operator: item.introduced for item in report.operators.introducing}
    assert introduced.keys() == expected.keys()
    assert introduced["act.backward"] == pytest.approx(expected["act.backward"])
    assert 1e-4 < introduced["act.backward"] < 4e-3
    assert 0 < introduced["conv.backward_weight"] < 1e-6
    differing = {item.operator: item for item in report.operators.differing}
    weight = differing["conv.backward_weight"]
    assert weight.difference == pytest.approx(report.gradients["conv.weight"])
    assert weight.difference > 10 * weight.introduced, "most of it comes with its operand"
    assert "last.backward_weight" not in differing
    assert [item.difference for item in report.operators.differing] == sorted(
        (item.difference for item in report.operators.differing), reverse=True
    )
    assert not any(item.broken for item in report.operators.differing)
    assert report.passed, report.reasons


@pytest.mark.parametrize("autocast", often([False, True], False))
def test_an_exact_schedule_differs_nowhere_and_computes_again_what_it_did(autocast):
    model, x = Images(), torch.randn(4, 3, 12, 12)
    graph = traced_images(autocast)
    steps = recompute_everything(graph)
    schedule = replace(schedule_of(free_profile(graph), steps, AMPLE), autocast=graph.autocast)
    report = verify(model, schedule, x, operators=True)
    assert report.operators.differing == ()
    assert report.operators.captured == 0
    assert report.operators.again == len(steps) - len({index for index, _ in steps}) > 20
    assert (report.exact, report.passed) == (True, True)
    assert not verify(model, schedule, x).operators


ROUNDINGS = [(torch.float32, False, 1e-6), (torch.float32, True, 1e-6), (torch.bfloat16, False, 2**-6)]


@pytest.mark.parametrize(
    ("dtype", "autocast", "allowed"),
    often(ROUNDINGS, *ROUNDINGS[1:]),
)
def test_gradients_in_16_bits_may_differ_by_two_roundings(dtype, autocast, allowed):
    model, inputs = (
        nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)).to(dtype),
        torch.randn(3, 6, dtype=dtype),
    )
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        schedule = schedule_for(model, inputs)
    assert verify(model, schedule, inputs).allowed_difference == allowed


@pytest.mark.thorough
def test_images_in_another_layout_are_compared_with_those_of_plain_training():
    model, x = Images(), torch.randn(4, 3, 12, 12)
    graph = trace(model, x, layout="channels_last").available("cpu")
    schedule = replace(schedule_of(free_profile(graph), recompute_everything(graph), AMPLE), tolerance=1e-5)
    report = verify(model, schedule, x, operators=True)
    copies = [operator.name for operator in graph.operators if operator.family == "clone"]
    assert copies
    assert report.operators.runs > len(traced_images().operators)
    assert report.operators.introducing
    assert all(0 < item.introduced < 1e-4 for item in report.operators.introducing)
    assert not set(copies) & {item.operator for item in report.operators.introducing}
    assert not any(item.broken for item in report.operators.differing)
    assert report.passed, report.reasons


def broken(monkeypatch, name, run):
    function = implementations.FUNCTIONS[f"monetlite.{name}"]
    run.__annotations__ = function.run.__annotations__
    monkeypatch.setitem(implementations.FUNCTIONS, f"monetlite.{name}", replace(function, run=run))
    return function.run


def test_an_implementation_that_breaks_its_promise_is_named(monkeypatch):
    model, x = Images(), torch.randn(4, 3, 12, 12)
    schedule = schedule_for(model, x, **{"pool.backward": "from_offsets"})
    sound = broken(monkeypatch, "max_pool2d_backward_from_offsets", lambda *a, **k: sound(*a, **k).add_(1e-3))
    report = verify(model, schedule, x)
    assert not report.passed
    (named,) = report.operators.introducing
    assert (named.operator, named.implementation, named.broken) == ("pool.backward", "from_offsets", True)
    assert "stem.weight" in report.differences
    assert "conv2.weight" not in report.differences
    reasons = {reason.check: reason for reason in report.reasons}
    assert reasons.keys() == {"difference", "operator"}
    assert "pool.backward (from_offsets)" in reasons["operator"].message
    assert reasons["difference"].measured == report.largest_difference > reasons["difference"].allowed == 1e-6


def test_random_numbers_that_are_drawn_anew_are_found(monkeypatch):
    model, x = Images(), torch.randn(4, 3, 12, 12)
    graph = traced_images()
    schedule = schedule_of(free_profile(graph), recompute_everything(graph), AMPLE)

    def anew(state, device, target, *args):
        return resolve(target)(*args)

    broken(monkeypatch, "replay", anew)
    report = verify(model, schedule, x)
    assert {reason.check for reason in report.reasons} == {"difference", "operator", "random_state"}
    again = report.operators.introducing[0]
    assert (again.operator, again.number) == ("dropout", 1)
    assert again.repeated > 0
    assert again in report.operators.unrepeated
    assert any("dropout (default, run 2)" in reason.message for reason in report.reasons)


def test_an_optimizers_state_is_part_of_the_measured_peak():
    model, x = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)), torch.randn(4, 256)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    profile = free_profile(trace(model, x).available("cpu"))
    peaks = {}
    for optimizer in (None, "adamw"):
        priced = with_optimizer(profile, optimizer) if optimizer else profile
        schedule = replace(schedule_of(priced, plain_steps(priced.graph), AMPLE), optimizer=optimizer)
        report = verify(model, schedule, x)
        assert report.exact
        assert report.peak_bytes == pytest.approx(schedule.peak_bytes, rel=0.15)
        peaks[optimizer] = report.peak_bytes
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert peaks["adamw"] - peaks[None] >= 2 * weights
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_buffers_of_truth_values():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("mask", torch.tensor([True, False, True, True]))

        def forward(self, x):
            return self.layer(x) * self.mask

    model, x = Masked(), torch.randn(2, 4)
    report = verify(model, schedule_for(model, x, tolerance=1e-5), x)
    assert report.buffers == {"mask": 0.0}
    assert report.passed


def test_no_tolerance_lets_a_gradient_of_zeros_pass():
    class Steep(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.rand(32) + 0.5)

        def forward(self, x):
            return torch.sin(1e6 * self.weight * x)

    model, x = Steep(), torch.randn(4, 32)
    report = verify(model, schedule_for(model, x, tolerance=4e-3), x)
    assert report.passed
    lost = replace(report, gradients={"weight": 1.0})
    assert [reason.check for reason in lost.reasons] == ["difference"]


@pytest.fixture(scope="module")
def measured():
    """A report, and its schedule as if it had been solved with costs of this machine."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), torch.randn(16, 64)
    schedule = replace(schedule_for(model, x), kind="measured", environment=meter_for("cpu").environment())
    return verify(model, schedule, x), schedule


def test_figures_are_judged_where_that_is_asked_for(measured):
    report, _ = measured
    assert report.incomparable == ()
    assert report.passed
    off = replace(report, predicted_peak_bytes=report.peak_bytes * 5 // 4, predicted_step_ms=report.step_ms / 3)
    assert off.passed, "predictions alone fail nothing"
    assert off.peak_error == pytest.approx(-0.2, abs=1e-4)
    assert off.latency_error == pytest.approx(2.0)
    for limits, failing in (
        (VerificationLimits(peak_error=0.25, latency_error=2.1), []),
        (VerificationLimits(peak_error=0.1, latency_error=2.1), ["peak_error"]),
        (VerificationLimits(peak_error=0.1, latency_error=0.5), ["peak_error", "latency_error"]),
    ):
        judged = replace(off, limits=limits)
        assert [reason.check for reason in judged.reasons] == failing
        assert judged.passed == (not failing)
    elsewhere = replace(off, incomparable=("measured on another",), limits=VerificationLimits(latency_error=100.0))
    assert elsewhere.latency_error is None
    (reason,) = elsewhere.reasons
    assert "measured on another" in reason.message


def test_what_the_allocator_reserves_is_held_to_a_budget_of_reserved_memory(measured):
    report, _ = measured
    budget_bytes = report.peak_bytes + 1000
    for reserved_bytes, limits, of_reserved, failing in (
        (budget_bytes, VerificationLimits(), True, []),
        (budget_bytes + 1, VerificationLimits(), True, ["reserved"]),
        (budget_bytes + 1, VerificationLimits(budget=False), True, []),
        (budget_bytes + 1, VerificationLimits(), False, []),
    ):
        judged = replace(
            report,
            budget_bytes=budget_bytes,
            reserved_bytes=reserved_bytes,
            plain_reserved_bytes=2 * reserved_bytes,
            of_reserved=of_reserved,
            limits=limits,
        )
        assert [reason.check for reason in judged.reasons] == failing
        for reason in judged.reasons:
            assert (reason.measured, reason.allowed) == (reserved_bytes, budget_bytes)
            assert "though it was limited" in reason.message
        console = Console(file=io.StringIO(), width=80)
        print_report(console, judged, 0)
        exceeded = of_reserved and reserved_bytes > budget_bytes
        assert ("EXCEEDED by 1 B" in console.file.getvalue()) is exceeded
        assert (" of reserved memory, " in console.file.getvalue()) is of_reserved
    facts = report_facts(judged)
    assert (facts["reserved_bytes"], facts["plain_reserved_bytes"]) == (budget_bytes + 1, 2 * (budget_bytes + 1))
    console = Console(file=io.StringIO(), width=80)
    print_report(console, judged, 0)
    rows = [line.split() for line in console.file.getvalue().splitlines()]
    (at,) = (number for number, row in enumerate(rows) if row[:1] == ["reserved"])
    assert [rows[at][0], rows[at + 1][0]] == ["reserved", "plain"]
    assert "--reserved keeps that in it" in " ".join(console.file.getvalue().split())
    assert report_facts(report)["reserved_bytes"] is None


def test_plain_training_that_does_not_repeat_itself_is_no_schedules_fault(measured, monkeypatch):
    """As where a GPU's kernels add up in no fixed order."""
    _, schedule = measured
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    snapshot, taken = Trainee.snapshot, []

    def off(within):
        def noisy(self, seed):
            found = snapshot(self, seed)
            if within(self):
                taken.append(self)
                for gradient in found.gradients.values():
                    gradient.mul_(1 + 1e-5 * len(taken))
            return found

        return noisy

    monkeypatch.setattr(Trainee, "snapshot", off(lambda _: True))
    report = verify(model, schedule, torch.randn(16, 64), limits=VerificationLimits(budget=False))
    assert report.passed
    assert 1e-6 < report.largest_difference <= report.allowed_difference
    assert report.unrepeated == pytest.approx(2e-5, rel=0.01)
    assert report_facts(report)["unrepeated"] == report.unrepeated
    console = Console(file=io.StringIO(), width=80)
    print_report(console, report, 0)
    assert "plain, twice" in console.file.getvalue()
    monkeypatch.setattr(Trainee, "snapshot", off(lambda trainee: isinstance(trainee.model, monetlite.MONeTWrapper)))
    report = verify(model, schedule, torch.randn(16, 64), limits=VerificationLimits(budget=False))
    assert not report.passed
    assert report.unrepeated == 0.0


class Allocator:
    """Stands in for torch's CUDA allocator: a step takes 700 bytes at most, 900 with what falls between."""

    def __init__(self, monkeypatch, others_bytes):
        self.allocated = others_bytes
        self.workspaces = 50
        self.most = self.reserved = 0
        for name, answer in (
            ("synchronize", lambda: None),
            ("empty_cache", lambda: None),
            ("current_device", lambda: 0),
            ("get_allocator_backend", lambda: "native"),
            ("memory_stats", self.statistics),
            ("memory_reserved", lambda: self.allocated + 3_000),
            ("reset_peak_memory_stats", lambda _: None),
            ("max_memory_reserved", lambda: self.reserved),
        ):
            monkeypatch.setattr(torch.cuda, name, answer)
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", self.clear, raising=False)

    def clear(self):
        self.workspaces = 0

    def step(self):
        self.workspaces = 50
        self.most, self.reserved = self.allocated + self.workspaces + 650, self.allocated + 3_000 + 900

    def statistics(self, _):
        return {
            "requested_bytes.all.current": self.allocated + self.workspaces,
            "requested_bytes.all.peak": self.most,
        }


def test_a_peak_on_cuda_is_that_of_the_step_with_its_workspaces_and_nothing_elses(monkeypatch):
    model = nn.Linear(4, 4)
    trainee = Trainee(model, (torch.randn(2, 4),), {}, default_loss, "cpu")
    own_bytes = resident_bytes(model, trainee.inputs).total
    assert own_bytes == 4 * (16 + 4 + 8)
    trainee.device = "cuda"
    allocator = Allocator(monkeypatch, others_bytes=own_bytes + 10_000)
    monkeypatch.setattr(trainee, "step", allocator.step)
    assert trainee.memory() == StepMemory(
        peak_bytes=own_bytes + 700, resident_bytes=own_bytes, reserved_bytes=own_bytes + 900
    )


def test_steps_are_checked_with_the_models_gpu_as_the_current_one(monkeypatch):
    """The memory and the generator of the current GPU are looked at."""
    noted = []

    def begin(*_, **__):
        noted.append("begins")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.cuda, "device", lambda gpu: contextlib.nullcontext(noted.append(str(gpu))))
    monkeypatch.setattr(verification, "verify_own", begin)
    monkeypatch.setattr(runner, "forked_state", begin)
    model = nn.Linear(4, 4)
    graph = trace(model, torch.randn(2, 4))
    schedule = schedule_of(free_profile(graph), plain_steps(graph))
    with FakeTensorMode():
        model.weight, inputs = nn.Parameter(torch.empty(4, 4, device="cuda:1")), torch.empty(2, 4, device="cuda:1")
    for check in (lambda: monetlite.verify(model, schedule, inputs), lambda: monetlite.compare(model, inputs)):
        noted.clear()
        with pytest.raises(KeyboardInterrupt):
            check()
        assert noted == ["cuda:1", "begins"]


def test_predictions_of_other_devices_threads_and_shapes_are_not_compared(measured):
    _, schedule = measured
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    for changed, rows, says in (
        (replace(schedule, environment={"device": "abacus"}), 8, ["measured on abacus", "for inputs of 16×64"]),
        (replace(schedule, environment={**schedule.environment, "threads": "77"}), 16, ["with 77 threads"]),
        (replace(schedule, kind="estimated", device="rtx-3090"), 16, ["estimated for rtx-3090"]),
    ):
        report = verify(model, changed, torch.randn(rows, 64))
        for words, found in zip(says, report.incomparable, strict=True):
            assert words in found
        assert report.peak_error is report.latency_error is report.overhead_error is None


def test_what_no_number_says_is_null_in_json(measured):
    report = replace(measured[0], gradients={"0.weight": float("inf")})
    facts = json.loads(json_text(report_facts(report)), parse_constant=pytest.fail)
    assert facts["differences"] == {"0.weight": None}
    assert facts["reasons"][0]["check"] == "difference"


@pytest.mark.thorough
def test_long_lists_are_cut_with_a_count_at_80_columns(measured):
    model, x = Images(), torch.randn(4, 3, 12, 12)
    schedule = schedule_for(
        model, x, 1e-5, **{"conv2.backward_input": "chunks2", "stem.backward_weight": "chunks2"}
    )
    report = verify(model, schedule, x, operators=True)
    many = {f"block{number}.weight": 1e-3 / (number + 1) for number in range(12)}
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_report(console, replace(report, gradients=many, allowed_difference=1.5e-4), 2)
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert "block0.weight: 1.0e-03" in text
    assert "and 7 more" in text
    assert "block5.weight" not in text
    last = " ".join(text.split("FAIL: ")[1].split())
    assert last.startswith("block0.weight (and 5 more) differs from plain training's by 1.0e-03, 1.5e-04 allowed")


def run(*arguments):
    return commands.run("check", *arguments)


@pytest.mark.thorough
def test_the_command_needs_no_model_where_the_file_names_it(tmp_path):
    source = ModelSource(model="resnet18", batch=2, input_size=(32, 32))
    built = build(source)
    graph = trace(built.model, built.example_inputs).available("cpu")
    schedule = replace(schedule_of(free_profile(graph), plain_steps(graph), 50_000_000), source=source)
    schedule.save(tmp_path / "s.yaml")
    result = run(tmp_path / "s.yaml", "--json", "--repeats", "1", "--max-peak-error", "5%")
    assert result.exit_code == 4, result.output
    facts = json.loads(result.stdout, parse_constant=pytest.fail)
    assert (facts["passed"], facts["exact"], facts["same_shapes"]) == (False, True, True)
    assert [reason["check"] for reason in facts["reasons"]] == ["budget", "peak_error"]
    over, unjudged = facts["reasons"]
    assert (over["measured"], over["allowed"]) == (facts["peak_bytes"], 50_000_000)
    assert "50 MB" in over["message"]
    assert facts["incomparable"] == [unjudged["message"].split("which is ")[1]]
    assert facts["operators"] is None


def test_what_the_command_prints_ends_in_the_verdict(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(
        "import torch\ndef build():\n    return torch.nn.Linear(8, 4), (torch.randn(16, 8),)\n"
    )
    replace(schedule_for(nn.Linear(8, 4), torch.randn(16, 8)), budget_bytes=600).save("s.yaml")
    refused = run("s.yaml")
    assert refused.exit_code == 2
    assert "--model" in refused.stderr
    arguments = ("s.yaml", "--model", "net.py:build", "--repeats", "1")
    failed = run(*arguments)
    assert failed.exit_code == 4, failed.output
    assert failed.stdout.splitlines()[-1].startswith("FAIL: the peak, ")
    passed = run(*arguments, "--no-budget-check", "--operators")
    assert passed.exit_code == 0, passed.output
    assert passed.stdout.splitlines()[-1] == "PASS"
    assert "EXCEEDED" in passed.stdout
    assert "write what plain training writes" in " ".join(passed.stdout.split())


@pytest.mark.parametrize(
    "arguments",
    [
        ("--max-difference", "nan"),
        ("--max-peak-error", "-1%"),
        ("--max-latency-error", "much"),
        ("--operators", "x"),
    ],
)
def test_limits_that_are_not(arguments):
    result = run("s.yaml", *arguments)
    assert result.exit_code == 2
    assert arguments[0] in result.stderr
