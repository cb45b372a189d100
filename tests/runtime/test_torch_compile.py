"""`torch.compile(model, backend="monetlite", options=...)`: plain training, within the budget, by another door."""

import contextlib
import logging
import subprocess
import sys
import time
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from small_models import SmallCNN, TinyCNN, assert_same, step, twin
from thoroughness import often
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import monetlite
from monetlite.planning import beside_training
from monetlite.profiling import meters
from monetlite.profiling.memory_records import is_profiling, peak_growth_bytes
from monetlite.runtime import pieces
from monetlite.runtime.torch_compile import whole_step
from monetlite.tracing.step_inputs import device_of, gpu_of

log = logging.getLogger(__name__)


@pytest.fixture(autouse=True)
def quick_measurements(monkeypatch):
    monkeypatch.setattr(meters, "MIN_RUNS", 1)
    monkeypatch.setattr(meters, "MAX_RUNS", 1)


def compiled(model, **options):
    model.compile(backend="monetlite", options={"time_limit": 0.5, **options})
    return model


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[module for _ in range(5) for module in (nn.Linear(256, 256), nn.GELU())])

    def forward(self, x):
        return self.layers(x)


def test_parameters_count_as_in_other_plans(tmp_path):
    model, x, file = Deep(), torch.randn(8, 256), tmp_path / "deep.yaml"
    options = {"budget": "100%", "optimizer": "adamw", "device": "rtx-4090"}
    compiled(model, schedule=str(file), **options)(x).sum().backward()
    found, plan = monetlite.load_schedule(file), monetlite.optimize(model, x, **options)
    assert found.plain_peak_bytes == pytest.approx(plan.plain_peak_bytes, rel=0.01)
    assert [spec.shape for spec in found.inputs.values()] == [(8, 256)]


@pytest.mark.thorough
@pytest.mark.parametrize("planned", [monetlite.MONeTWrapper, monetlite.within])
def test_torch_compile_of_a_model_with_a_plan_leaves_the_plan(planned):
    """TorchDynamo would capture the model itself, and no budget would hold."""
    model, x = Deep(), torch.randn(2048, 256)
    other = planned(twin(model), budget="60%", device="cpu", time_limit=0.5)
    outer = torch.compile(other, backend="eager")
    for _ in range(2):
        for owner in (model, outer):
            owner(x).square().mean().backward()
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    schedule = monetlite.schedule_of(other)
    assert schedule.peak_bytes <= schedule.budget_bytes


def test_it_is_known_by_name():
    assert "monetlite" in torch._dynamo.list_backends(exclude_tags=())


def test_training_is_plain_training_within_the_budget():
    model, x = Deep(), torch.randn(2048, 256)
    other = compiled(twin(model), budget="60%", device="cpu")
    for _ in range(2):
        assert_same(step(other, (x,)), step(model, (x,)))

    def train(owner):
        for parameter in owner.parameters():
            parameter.grad = None
        owner(x).square().mean().backward()

    peaks = {}
    for name, owner in (("plain", model), ("compiled", other)):
        train(owner)
        peaks[name] = peak_growth_bytes(lambda owner=owner: train(owner))
    assert peaks["compiled"] < 0.75 * peaks["plain"]


def test_it_begins_at_once_and_takes_a_better_plan_later(caplog, monkeypatch):
    solve_layouts, limits = beside_training.solve_layouts, []

    def solved(profiles, budget, solving, **others):
        limits.append(solving.time_limit)
        return solve_layouts(profiles, budget, solving, **others)

    class Process:
        """The process beside training: it finds a plan for less memory at once."""

        running, failure = False, None

        def __init__(self, profiles, budget, solving, layout, first):
            self.found = [solve_layouts(profiles, first.peak_bytes - 1, replace(solving, time_limit=0.5))]

        def better(self):
            return self.found.pop() if self.found else None

    monkeypatch.setattr(beside_training, "solve_layouts", solved)
    monkeypatch.setattr(beside_training, "SolvingProcess", Process)
    model, x = SmallCNN(), (torch.randn(4, 3, 12, 12),)
    other = compiled(twin(model), budget="95%", device="cpu", time_limit=60)
    caplog.set_level(logging.INFO, logger="monetlite")
    assert_same(step(other, x), step(model, x))
    assert caplog.messages[0].startswith("plan: ")
    assert caplog.messages[0].endswith("looking for a better plan beside training")
    assert 0 < max(limits) <= beside_training.FIRST_SECONDS[1]
    end = time.monotonic() + 60
    while not any("better plan," in line for line in caplog.messages):
        assert time.monotonic() < end, caplog.messages
        assert_same(step(other, x), step(model, x))
    assert_same(step(other, x), step(model, x))  # by its programs


def test_dropout_and_statistics():
    model, x = TinyCNN(), (torch.randn(4, 3, 12, 12),)
    other = compiled(twin(model), budget="95%", device="rtx-4090")
    for _ in range(2):
        assert_same(step(other, x), step(model, x))


def test_evaluation_and_no_grad():
    model, x = TinyCNN(), torch.randn(4, 3, 12, 12)
    other = compiled(twin(model), budget="95%", device="rtx-4090")
    other.eval()
    model.eval()
    assert torch.equal(other(x), model(x))
    with torch.no_grad():
        assert torch.equal(other(x), model(x))


def test_a_budget_that_is_too_small_asks_for_no_batch():
    """The graph's first input is a weight."""
    with pytest.raises(Exception, match="every schedule needs at least") as refused:
        compiled(Deep(), budget="10%", device="rtx-4090")(torch.randn(64, 256))
    assert "batch" not in str(refused.value)


def test_a_schedule_file_is_written_and_read(tmp_path, monkeypatch):
    model, x = Deep(), torch.randn(64, 256)
    file = tmp_path / "compiled.yaml"
    first = compiled(twin(model), budget="110%", device="rtx-4090", schedule=str(file))
    assert_same(step(first, (x,)), step(model, (x,)))
    assert monetlite.load_schedule(file).budget_bytes > 0
    file.rename(tmp_path / "elsewhere.yaml")
    torch._dynamo.reset()
    again = compiled(twin(model), budget="110%", device="rtx-4090", schedule=str(file))
    assert_same(step(again, (x,)), step(model, (x,)))
    assert file.exists(), "the file is written whenever it isn't there"
    torch._dynamo.reset()
    monkeypatch.setattr("monetlite.runtime.graph_plan._solved", {})
    monkeypatch.setattr(beside_training, "solve_layouts", lambda *_, **__: pytest.fail("solved again"))
    second = compiled(twin(model), schedule=str(file))
    assert_same(step(second, (x,)), step(model, (x,)))


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 8, 3, padding=1)
        self.last = nn.Linear(8 * 144, 4)

    def forward(self, x):
        x = torch.relu(self.second(torch.relu(self.first(x))))
        return self.last(x.flatten(1))


def test_another_layout_runs_and_is_kept_in_the_file(tmp_path, monkeypatch):
    model, x = Images(), (torch.randn(4, 3, 12, 12),)
    file = tmp_path / "compiled.yaml"
    first = compiled(
        twin(model), budget="110%", device="cpu", tolerance=1e-4, layout="channels_last", schedule=str(file)
    )
    assert_same(step(first, x), step(twin(model), x), within=1e-4)
    assert monetlite.load_schedule(file).layout == "channels_last"
    torch._dynamo.reset()
    monkeypatch.setattr("monetlite.runtime.graph_plan._solved", {})
    monkeypatch.setattr(beside_training, "solve_layouts", lambda *_, **__: pytest.fail("solved again"))
    second = compiled(twin(model), schedule=str(file))
    assert_same(step(second, x), step(twin(model), x), within=1e-4)


def test_a_budget_of_reserved_memory(tmp_path):
    model, x = Deep(), torch.randn(64, 256)
    file = tmp_path / "compiled.yaml"
    other = compiled(twin(model), budget="64MiB", reserved=True, device="rtx-4090", schedule=str(file))
    assert_same(step(other, (x,)), step(model, (x,)))
    schedule = monetlite.load_schedule(file)
    assert schedule.peak_bytes < schedule.reserved_bytes <= schedule.budget_bytes == 64 * 2**20


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"budget": "1GB", "reserved": True, "device": "cpu"}, "leave out reserved=True"),
        ({"budget": "1GB", "layout": "channels_last"}, "allow 1e-05 or more"),
        ({}, "needs a budget"),
        ({"schedule": "not-there.yaml"}, "there is no schedule file not-there.yaml. With a budget"),
        ({"schedule": "zoo:nothing@1GB"}, "nothing"),
        ({"budget": "1GB", "colour": "red"}, "there is no option 'colour'; there are accumulate, budget"),
        ({"budget": "much"}, "much"),
        ({"budget": "1GB", "optimizer": "adamw", "step_in_backward": True}, "monetlite.within"),
        ({"budget": 200, "device": "rtx-4090"}, "too small"),
    ],
)
def test_errors_say_what_to_do(options, problem):
    with pytest.raises(Exception, match=problem):
        compiled(Deep(), **options)(torch.randn(2, 256))


def test_sizes_that_change():
    model = Deep()
    options = {"budget": "110%", "device": "rtx-4090", "time_limit": 1}
    fixed = torch.compile(twin(model), backend="monetlite", dynamic=False, options=options)
    for batch in (8, 5, 3):
        x = torch.randn(batch, 256)
        assert torch.equal(fixed(x), model(x))
    torch._dynamo.reset()
    changing = compiled(twin(model), budget="110%", device="rtx-4090")
    changing(torch.randn(8, 256))
    with pytest.raises(Exception, match="dynamic=False"):
        changing(torch.randn(5, 256))


class Breaks(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        y = self.layer(x)
        if y.sum() > 0:
            y = y * 2
        return self.layer(y)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"budget": "1GB", "whole": True}, "whole=True refuses that"),
        ({"budget": "1GB", "schedule": "breaks.yaml"}, "give a budget in its place"),
        ({"budget": "1GB", "reserved": True}, "leave out reserved=True"),
    ],
)
def test_a_model_that_is_taken_apart_is_refused_where_it_is_to_be_whole(options, problem):
    with pytest.raises(Exception, match=rf"takes the model apart at .*test_torch_compile.py:\d+(.|\n)*{problem}"):
        compiled(Breaks(), device="rtx-4090", **options)(torch.randn(2, 8))


def test_a_function_that_is_taken_apart_is_refused():
    model = Breaks()
    function = torch.compile(lambda x: model(x) + 1, backend="monetlite", options={"budget": "1GB"})
    with pytest.raises(Exception, match="compile the model itself"):
        function(torch.randn(2, 8))


def both(build, *inputs):
    """A model, and one of equal weights that is compiled."""
    torch.manual_seed(0)
    model = build()
    return model, compiled(twin(model), budget="105%", device="rtx-4090"), inputs


class Layers(nn.Module):
    """Breaks in a loop, of which TorchDynamo captures nothing by itself."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Breaks() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) + x
            if x.mean() > 1e9:
                break
        return x


@pytest.mark.parametrize(
    "build", often([Breaks, Layers, lambda: nn.Sequential(nn.Linear(8, 8), Layers())], Breaks, Layers)
)
def test_a_model_that_is_taken_apart_trains_in_pieces(build, caplog):
    model, other, x = both(build, torch.randn(4, 8))
    caplog.set_level(logging.INFO, "monetlite")
    for seed in range(2):
        assert_same(step(other, x, seed), step(model, x, seed))
    with pytest.warns(UserWarning, match=r"trains in \d pieces"):
        third = step(other, x, 2)
    assert_same(third, step(model, x, 2))
    assert "pieces: +" in caplog.text
    with torch.no_grad():
        assert torch.equal(other(*x), model(*x))


def test_a_step_in_pieces_is_planned_where_an_error_is_being_handled_but_not_where_it_fails():
    model, other, x = both(Breaks, torch.randn(4, 8))
    step(other, x)
    with pytest.raises(TypeError):
        other()
    assert not is_profiling()
    try:
        raise MemoryError
    except MemoryError:
        step(other, x)
    with pytest.warns(UserWarning, match=r"trains in \d pieces"):
        planned = step(other, x)
    assert_same(planned, step(model, x))


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.*can't be captured whole")
def test_equal_models_have_pieces_of_their_own():
    """TorchDynamo would run the code of one for the other."""
    pairs = [both(Breaks, torch.randn(4, 8)) for _ in range(2)]
    for seed in range(5):
        for model, other, x in pairs:
            assert_same(step(other, x, seed), step(model, x, seed))
    smaller = torch.randn(3, 8)
    for model, other, _ in pairs:
        assert_same(step(other, (smaller,)), step(model, (smaller,)))


def spans(count):
    """Some numbers below another one, by numpy's generator."""
    more = np.random.rand(1).item()  # as transformers' models of speech draw
    return np.random.choice(np.arange(count), count // 2 + int(more), replace=False)


class MasksSpans(Breaks):
    def forward(self, x):
        kept = torch.ones(8)
        kept[torch.from_numpy(spans(8))] = 0.0
        return super().forward(x * kept)


@pytest.mark.filterwarnings("ignore:.*can't be captured whole")
def test_functions_that_draw_by_numpy_are_not_compiled_in_each_step(monkeypatch):
    compiled, backend = [], pieces.PiecewiseTraining.backend
    monkeypatch.setattr(
        pieces.PiecewiseTraining, "backend", lambda *given: (compiled.append(1), backend(*given))[1]
    )
    model, other, x = both(MasksSpans, torch.randn(4, 8))
    for seed in range(6):
        if seed == 3:
            compiled.clear()
        steps = []
        for trained in (other, model):
            np.random.seed(seed)
            steps.append(step(trained, x, seed))
        assert_same(*steps)
    assert not compiled


class OutOfSight(Breaks):
    def forward(self, x):
        return torch.compiler.disable(lambda: super(OutOfSight, self).forward(x))()


def test_a_model_of_which_nothing_is_captured_is_measured():
    model, x = OutOfSight(), (torch.randn(4, 8),)
    other = compiled(twin(model), budget="1MB", device="rtx-4090")
    for seed in range(2):
        assert_same(step(other, x, seed), step(model, x, seed))
    with pytest.warns(UserWarning, match="None of it can be planned"):
        third = step(other, x, 2)
    assert_same(third, step(model, x, 2))
    other = compiled(twin(model), budget="2kB", device="rtx-4090")
    for _ in range(2):
        step(other, x)
    with pytest.raises(Exception, match="raise the budget"):
        step(other, x)


def test_a_step_runs_with_its_gpu_as_the_current_one(monkeypatch):
    """Operators that draw again look at the current GPU's generator."""
    now = [0]

    @contextlib.contextmanager
    def current(device):
        before, now[0] = now[0], device.index
        yield
        now[0] = before

    monkeypatch.setattr(torch.cuda, "device", current)
    with FakeTensorMode():
        there = torch.empty(2, device="cuda:1")
    assert gpu_of(nn.Linear(2, 2), (there,)) == torch.device("cuda:1")
    assert gpu_of(nn.Linear(2, 2), (torch.ones(()), there)) == torch.device("cuda:1"), "after a number on the CPU"
    assert device_of(nn.Linear(2, 2), (torch.ones(()), there)) == "cuda"
    assert gpu_of(nn.Linear(2, 2), (torch.ones(2),)) is None
    assert whole_step(lambda number: (number, now[0]), there.device)(7) == (7, 1)
    assert now == [0]


@pytest.mark.thorough
def test_importing_it_changes_nothing():
    program = (
        "import sys, torch, torch._dynamo\n"
        "before = torch._dynamo.config.get_config_copy()\n"
        "import monetlite.runtime.torch_compile\n"
        "assert torch._dynamo.config.get_config_copy() == before\n"
        "assert 'transformers' not in sys.modules\n"
        "torch.compile(torch.nn.ReLU(), backend='monetlite', options={'budget': '1GB'})\n"
        "assert 'transformers' not in sys.modules\n"
        "import logging, transformers\n"  # which gives loggers a method of its own
        "assert logging.Logger.warning_once in torch._dynamo.config.ignore_logging_functions"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


class Talks(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.first(x).tanh()
        log.warning("a message")
        print("a line")  # noqa: T201  # as a model may
        warnings.warn("a warning", stacklevel=2)
        return self.second(x)


@pytest.mark.filterwarnings("ignore:a warning")
def test_messages_do_not_take_a_model_apart():
    model, x = Talks(), torch.randn(2, 8)
    assert_same(step(compiled(twin(model), budget="100%", device="rtx-4090"), (x,)), step(model, (x,)))


def test_a_share_for_a_small_last_batch_is_not_less_than_before():
    blocks = [nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(4)]
    plain = nn.Sequential(*blocks, nn.Linear(128, 1))
    options = {"budget": "70%", "time_limit": 0.3}
    alone = torch.compile(twin(plain), backend="monetlite", options=options, dynamic=False)
    with pytest.raises(Exception, match="is too small"):
        alone(torch.randn(2, 128))
    model = torch.compile(twin(plain), backend="monetlite", options=options, dynamic=False)
    for batch in (1024, 2):
        x = torch.randn(batch, 128)
        for trained in (model, plain):
            trained.zero_grad()
            trained(x).square().mean().backward()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine.grad, theirs.grad)
