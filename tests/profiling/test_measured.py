"""Measuring: each call once, and a cache that can be lost or broken."""

import contextlib
import json
import logging
import os
import sys

import pytest
import torch
from thoroughness import often
from torch import nn

import monetlite
from monetlite.core.errors import DeviceError, ModelError, ProfileError
from monetlite.core.graph import (
    Call,
    Implementation,
    Operator,
    OperatorGraph,
    Phase,
    Resident,
    TensorRef,
    TensorSpec,
)
from monetlite.core.simulate import simulate
from monetlite.core.steps import plain_steps
from monetlite.profiling import cost_cache, measured, measured_calls, meters
from monetlite.profiling.arguments import make_arguments
from monetlite.profiling.memory_records import peak_growth_bytes
from monetlite.profiling.step_additions import OPTIMIZERS, make_optimizer, with_optimizer


def small_net():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
    )


@pytest.fixture(scope="module")
def graph():
    return monetlite.trace(small_net(), torch.randn(4, 3, 32, 32))


class CountingMeter:
    """Stands in for a device: counts what it is asked to measure."""

    device = "cpu"

    def __init__(self):
        self.measured = 0

    def latency_ms(self, run, recent=None, room_bytes=0):
        run()
        self.measured += 1
        return self.measured / 1000

    def host_ms(self, run):
        return 0.0

    def growth_bytes(self, run):
        return 10**9

    def kept_bytes(self, runs):
        return 0

    def environment(self):
        return {"device": "a counting meter"}


@pytest.fixture
def counting(monkeypatch):
    meter = CountingMeter()
    monkeypatch.setattr(measured, "meter_for", lambda _: meter)
    return meter


def test_a_measured_profile_is_plausible(graph):
    profile = monetlite.profile(graph, "cpu")
    assert profile.kind == "measured"
    assert profile.device == "cpu"
    assert profile.environment["torch"] == torch.__version__
    largest = max(value.size_bytes for value in graph.values)
    for operator, costs in zip(profile.graph.operators, profile.costs, strict=True):
        for item, cost in zip(operator.implementations, costs, strict=True):
            assert (cost.latency_ms > 0) == (item.call is not None and bool(item.call.outputs)), operator.name
            assert 0 <= cost.workspace_bytes <= 40 * largest, operator.name
            if operator.family in ("relu", "relu_backward") and "mask" not in item.name:
                assert cost.workspace_bytes <= 4096, operator.name
    timeline = simulate(profile, plain_steps(graph))
    assert timeline.peak_bytes > graph.resident.total + largest


def test_identical_calls_are_measured_once(counting):
    layers = [nn.Linear(16, 16, bias=False) for _ in range(5)]
    graph = monetlite.trace(nn.Sequential(*layers), torch.randn(4, 16, requires_grad=True))
    calls = [item.call for op in graph.operators for item in op.implementations if item.call and item.call.outputs]
    told = []
    profile = monetlite.profile(graph, "cpu", progress=lambda done, total: told.append((done, total)))
    assert len(calls) == 15
    assert counting.measured == 3, "a product forward, one for the weight and one for the input"
    assert told == [(1, 3), (2, 3), (3, 3)]
    forward = [
        costs[0] for op, costs in zip(graph.operators, profile.costs, strict=True) if op.phase is Phase.FORWARD
    ]
    assert len(set(forward)) == 1


def test_calls_that_differ_are_measured_apart(counting):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6, 6))

        def forward(self, x):
            y = x @ self.weight
            return (y * y).sum() + (y * x).sum() + (y.t() * x).sum() + y.double().sum()

    graph = monetlite.trace(Net(), torch.randn(6, 6))
    products = [
        op
        for op in graph.operators
        if op.phase is Phase.FORWARD and op.implementations[0].call.target == "aten.mul.Tensor"
    ]
    signatures = {op.implementations[0].call.signature for op in products}
    assert len(products) == len(signatures) == 3, "shared storage, own storage, and another stride"


def test_the_cache_is_used_again(graph, counting, cache_folder):
    first = monetlite.profile(graph, "cpu")
    measured_once = counting.measured
    second = monetlite.profile(graph, "cpu")
    assert counting.measured == measured_once
    assert second.costs == first.costs
    (file,) = (cache_folder / "costs").iterdir()
    data = json.loads(file.read_text())
    assert data["environment"] == {"device": "a counting meter"}
    assert len(data["costs"]) == measured_once


def test_another_environment_is_measured_again(graph, counting, monkeypatch, cache_folder):
    monetlite.profile(graph, "cpu")
    measured_once = counting.measured
    monkeypatch.setattr(counting, "environment", lambda: {"device": "another"})
    monetlite.profile(graph, "cpu")
    assert counting.measured == 2 * measured_once
    assert len(list((cache_folder / "costs").iterdir())) == 2


CORRUPT = (
    "",
    "{",
    "[]",
    "null",
    '{"costs": 3}',
    '{"costs": {"a": 1}}',
    '{"costs": {"a": ["x", "y"]}}',
    "\x00",
    '{"costs": {"KEY": [NaN, 0]}}',
    '{"costs": {"KEY": [1e999, 0]}}',
    '{"costs": {"KEY": [-1, 0]}}',
    "[" * 100_000,
)


def test_a_corrupt_cache_is_measured_again(graph, counting, cache_folder, caplog):
    expected = monetlite.profile(graph, "cpu")
    (file,) = (cache_folder / "costs").iterdir()
    key = next(iter(json.loads(file.read_text())["costs"]))
    for text in CORRUPT:
        file.write_text(text.replace('"KEY"', json.dumps(key)))
        counting.measured = 0
        caplog.clear()
        cost_cache._warn_once.cache_clear()
        with caplog.at_level(logging.WARNING, logger="monetlite"):
            assert monetlite.profile(graph, "cpu").costs == expected.costs, text[:40]
        assert "will be measured again" in caplog.text, text[:40]
        assert len(json.loads(file.read_text())["costs"]) == counting.measured, text[:40]


def test_a_cache_that_cannot_be_written_only_warns(graph, counting, cache_folder, caplog, monkeypatch):
    cache_folder.write_text("a file in the folder's place")
    with caplog.at_level(logging.WARNING, logger="monetlite"):
        assert monetlite.profile(graph, "cpu").costs
    assert "could not be kept" in caplog.text
    assert cache_folder.read_text() == "a file in the folder's place"
    cache_folder.unlink()

    def full_disk(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    assert monetlite.profile(graph, "cpu").costs
    assert not list((cache_folder / "costs").iterdir())


def test_what_was_measured_before_an_interruption_is_kept(graph, counting, cache_folder):
    def stop(done, total):
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        monetlite.profile(graph, "cpu", progress=stop)
    (file,) = (cache_folder / "costs").iterdir()
    assert len(json.loads(file.read_text())["costs"]) == 4


def test_measuring_leaves_the_generator_alone(graph, monkeypatch):
    monkeypatch.setattr(meters, "MIN_RUNS", 1)
    monkeypatch.setattr(meters, "MAX_RUNS", 1)
    state = torch.get_rng_state()
    monetlite.profile(graph, "cpu")
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("rough", [False, True])
def test_calls_are_measured_without_the_callers_autocast(rough, counting, monkeypatch):
    made = []
    monkeypatch.setattr(counting, "growth_bytes", lambda run: made.append(run()) or 0)
    monkeypatch.setattr(counting, "once_ms", lambda run: made.append(run()) or 1.0, raising=False)
    monkeypatch.setattr(measured, "_rough", {})
    graph = monetlite.trace(nn.Linear(8, 8), torch.randn(4, 8))
    with torch.autocast("cpu", torch.bfloat16):
        measurement = measured.Measurement(graph, "cpu", tolerance=0.0)
        measurement.rough_profile(1.0) if rough else measurement.run()
    dtypes = {item.dtype for item in torch.utils._pytree.tree_leaves(made) if isinstance(item, torch.Tensor)}
    assert dtypes == {torch.float32}


def test_an_operator_that_cannot_be_run_alone_is_named():
    spec = TensorSpec(shape=(4, 4), stride=(4, 1), dtype="float32")
    other = TensorSpec(shape=(5, 4), stride=(4, 1), dtype="float32")
    call = Call(
        target="aten.mm.default",
        args=(TensorRef(node="a", value=None, spec=spec), TensorRef(node="b", value=None, spec=other)),
        outputs=(None,),
    )
    graph = OperatorGraph(
        name="broken",
        operators=(
            Operator(
                name="net.layer",
                family="mm",
                phase=Phase.FORWARD,
                implementations=(Implementation(name="default", reads=(), writes=(), call=call),),
            ),
        ),
        values=(),
        resident=Resident(),
    )
    with pytest.raises(
        ProfileError, match=r"net\.layer \(aten\.mm\.default, default\) can't be measured alone on cpu"
    ):
        monetlite.profile(graph, "cpu")


def test_arguments_have_their_layouts_and_share_storages():
    def ref(node, value, shape, stride, dtype="float32"):
        return TensorRef(node=node, value=value, spec=TensorSpec(shape=shape, stride=stride, dtype=dtype))

    call = Call(
        target="aten.add.Tensor",
        args=(ref("a", 0, (4, 6), (1, 4)), ref("b", 0, (6, 4), (4, 1)), ref("c", 1, (4, 6), (0, 1)), 3, None),
        kwargs=(("mask", ref("d", None, (4, 6), (6, 1), "bool")),),
        outputs=("out",),
    )
    (first, second, third, number, nothing), keywords = make_arguments(call, "cpu")
    assert (first.shape, first.stride()) == ((4, 6), (1, 4))
    assert first.data_ptr() == second.data_ptr() != third.data_ptr()
    assert third.stride() == (0, 1)
    assert (number, nothing) == (3, None)
    assert keywords["mask"].dtype is torch.bool


def test_a_seed_that_is_read_on_the_host_is_there():
    """Memory-efficient attention reads the generator's seed and offset by pointers of the CPU's."""

    def ref(node, shape, dtype="float32"):
        return TensorRef(node=node, value=None, spec=TensorSpec(shape=shape, stride=(1,) * len(shape), dtype=dtype))

    operands = (
        ref("q", (8,)),
        ref("seed", (), "int64"),
        ref("offset", (), "int64"),
        ref("cu_seqlens", (2,), "int64"),
    )
    places = {}
    for target in ("efficient", "flash"):
        name = f"aten._scaled_dot_product_{target}_attention_backward.default"
        args, _ = make_arguments(Call(target=name, args=operands, kwargs=(), outputs=("out",)), "meta")
        places[target] = [item.device.type for item in args]
    assert places == {"efficient": ["meta", "cpu", "cpu", "meta"], "flash": ["meta"] * 4}


@pytest.mark.parametrize("shape", [(5,), (2, 5), (2, 5, 3, 64)], ids=["one", "batch", "images"])
def test_labels_are_classes_whatever_else_is_larger(shape):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, scores, labels):
            return nn.functional.cross_entropy(scores * self.scale, labels)

    labels = torch.randint(0, 5, (*shape[:1], *shape[2:]) if len(shape) > 1 else ())
    graph = monetlite.trace(Net(), (torch.randn(shape), labels))
    assert any("nll_loss" in operator.family for operator in graph.operators)
    for operator in graph.operators:
        for item in operator.implementations:
            if item.call is not None and "nll_loss" in item.call.target:
                args, _ = make_arguments(item.call, "cpu")
                drawn = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.dtype is torch.int64]
                assert all(arg.max() < 5 for arg in drawn)
    assert monetlite.profile(graph, "cpu").kind == "measured"


def test_a_gpu_is_timed_with_cold_operands_and_the_host_ahead(monkeypatch):
    """The GPU is held up until the call is queued behind the first event, so its launch is not in the figure."""
    meter, did = object.__new__(meters.CudaMeter), []

    class Event:
        def record(self):
            did.append("event")

        def synchronize(self):
            did.append("wait")

        def elapsed_time(self, _):
            return 2.0

    class Scratch:
        def zero_(self):
            did.append("flush")

        def __del__(self):
            did.append("free")

    meter._cache_bytes = 2**20
    monkeypatch.setattr(torch, "empty", lambda *_, **__: Scratch())
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: did.append("hold") if cycles >= 100_000 else None)
    assert meter.once_ms(lambda: did.append("call")) == 2.0
    assert did == ["hold", "event", "call", "event", "wait"]
    did.clear()
    assert meter.latency_ms(lambda: did.append("call")) == 2.0
    assert did[:4] == ["call"] * 4
    assert did.pop() == "free", "a training step beside it has no room for that"
    turns = [did[at : at + 6] for at in range(4, len(did), 6)]
    assert len(turns) >= meters.MIN_RUNS
    assert all(turn == ["flush", "hold", "event", "call", "event", "wait"] for turn in turns)


def test_what_a_library_keeps_after_its_first_call_is_no_workspace(monkeypatch, counting):
    """cuBLAS allocates its own when a thread first multiplies matrices."""
    kept = []

    @contextlib.contextmanager
    def loading(call, device, **_):
        yield (lambda: kept or kept.append("workspace")), None

    def growth_bytes(run):
        before = len(kept)
        run()
        return 10**7 * (len(kept) - before) + 10**3

    counting.device = "cuda"
    monkeypatch.setattr(counting, "once_ms", lambda run: run() and 1.0, raising=False)
    monkeypatch.setattr(counting, "growth_bytes", growth_bytes)
    monkeypatch.setattr(measured_calls, "as_function", loading)
    product = measured_calls.MeasuredCall(
        call=Call(target="aten.mm.default", args=(), outputs=("made",)), result_bytes=0
    )
    assert measured_calls.cost_of_call(product, counting).workspace_bytes == 10**3


def test_indices_are_in_range():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(5, 8)

        def forward(self, tokens, labels):
            return nn.functional.cross_entropy(self.embed(tokens), labels)

    graph = monetlite.trace(Net(), (torch.randint(0, 5, (64,)), torch.randint(0, 8, (64,))))
    profile = monetlite.profile(graph, "cpu")
    assert all(
        costs[0].latency_ms > 0
        for op, costs in zip(graph.operators, profile.costs, strict=True)
        if op.implementations[0].writes and op.name != "loss"
    )


HELD = [("sgd", 0, (1, 0)), ("momentum", 1, (1, 0)), ("adam", 2, (3, 1)), ("adamw", 2, (2, 1))]


@pytest.mark.parametrize(("name", "copies", "momentary"), often(HELD, HELD[1], HELD[3]))
def test_an_optimizers_state_and_step(name, copies, momentary, graph, counting):
    plain = monetlite.profile(graph, "cpu")
    made = monetlite.profile(graph, "cpu", optimizer=name)
    gradients = [value.size_bytes for value in graph.values if value.kind == "param_grad"]
    assert made.optimizer == name
    assert made.graph.resident.optimizer == copies * sum(gradients)
    assert made.graph.resident.total - plain.graph.resident.total == copies * sum(gradients)
    assert made.graph.operators[:-1] == plain.graph.operators
    assert set(made.graph.operators[-1].implementations[0].reads) == {
        index for index, value in enumerate(graph.values) if value.kind == "param_grad"
    }
    largest = zip(momentary, sorted(gradients, reverse=True), strict=False)
    step_bytes = sum(count * size for count, size in largest)
    assert made.costs[-1][0].workspace_bytes == step_bytes, "one parameter after another on the CPU"
    last = simulate(made, plain_steps(made.graph)).memory_bytes[-1]
    outputs = sum(value.size_bytes for value in graph.values if value.held)
    assert last == made.graph.resident.total + outputs + step_bytes
    assert made.graph.fingerprint == graph.fingerprint, "the model is the same one"


def test_optimizer_state_is_what_torch_keeps():
    model = small_net()
    graph = monetlite.trace(model, torch.randn(4, 3, 32, 32))
    makers = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
    }
    profile = monetlite.profile(graph, "p100")
    for name, maker in makers.items():
        optimizer = maker(model.parameters())
        model(torch.randn(4, 3, 32, 32)).sum().backward()
        optimizer.step()
        kept = sum(
            item.nbytes
            for state in optimizer.state.values()
            for item in state.values()
            if isinstance(item, torch.Tensor) and item.dim() > 0
        )
        assert with_optimizer(profile, name).graph.resident.optimizer == kept


def test_gradients_of_inputs_have_no_optimizers_state():
    graph = monetlite.trace(nn.Linear(64, 4, bias=False), torch.randn(2, 8, 64, requires_grad=True))
    made = with_optimizer(monetlite.profile(graph, "p100"), "adamw")
    assert made.graph.resident.optimizer == 2 * 64 * 4 * 4
    assert made.costs[-1][0].workspace_bytes == 64 * 4 * 4


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "adamw"])
def test_an_optimizers_step_with_weight_decay_holds_what_is_counted(name):
    for foreach, sizes in ((False, [2**16, 2**18, 2**18]), (True, [2**16, 2**18])):
        parameters = [nn.Parameter(torch.ones(size)) for size in sizes]
        optimizer = make_optimizer(name, parameters, 0.1)
        optimizer.param_groups[0].update(foreach=foreach, weight_decay=0.1)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()  # makes the state
        counted = OPTIMIZERS[name].step_bytes("cuda" if foreach else "cpu", [4 * size for size in sizes])
        assert peak_growth_bytes(optimizer.step) == pytest.approx(counted, rel=0.01)


def test_the_state_of_8_bit_adamw(monkeypatch):
    """Two bytes and two scales for each block of 256; small parameters in float32, whatever their own dtype."""
    layers = nn.Sequential(nn.Linear(100, 60), nn.Linear(60, 68, bias=False), nn.Linear(68, 4)).bfloat16()
    graph = monetlite.trace(layers, torch.randn(2, 100, dtype=torch.bfloat16))
    made = with_optimizer(monetlite.profile(graph, "p100"), "adamw8bit")
    large = 2 * 6000 + 2 * 4 * 24  # the last block is not full
    small = 8 * (60 + 60 * 68 + 4 * 68 + 4)
    assert made.graph.resident.optimizer == large + small
    assert made.costs[-1][0].workspace_bytes == 0
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ModelError, match="to take its step: pip install bitsandbytes"):
        make_optimizer("adamw8bit", layers.parameters(), 0.1)


def test_unknown_optimizers_and_devices(graph, monkeypatch):
    with pytest.raises(ModelError, match="optimizer 'lion' is unknown; there are sgd, momentum, adam, adamw"):
        monetlite.profile(graph, "p100", optimizer="lion")
    with pytest.raises(DeviceError, match="traced on cpu, so its operators can't be measured on cuda"):
        monetlite.profile(graph, "cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="no GPU that torch can use"):
        meters.meter_for("cuda")


class Words(nn.Module):
    """A large head, whose loss takes the memory of three tensors of logits as torch runs it."""

    def __init__(self):
        super().__init__()
        self.words, self.inner, self.head = nn.Embedding(3000, 32), nn.Linear(32, 32), nn.Linear(32, 3000)

    def forward(self, tokens, targets):
        return nn.functional.cross_entropy(self.head(torch.relu(self.inner(self.words(tokens)))), targets)


@pytest.mark.parametrize("room_bytes", [2**18, 0, -5])
def test_caches_are_emptied_by_no_more_than_the_room(room_bytes):
    meter, run = meters.CpuMeter(), torch.zeros(4).sum
    whole = peak_growth_bytes(lambda: meter.latency_ms(run))
    assert whole > 2**19
    assert peak_growth_bytes(lambda: meter.latency_ms(run, None, room_bytes)) <= max(0, room_bytes) + 2**12


def test_nothing_is_measured_that_takes_more_than_the_room(monkeypatch):
    drawn = torch.randint(0, 3000, (256,))
    traced = monetlite.trace(Words(), (drawn, drawn))
    logits_bytes = 256 * 3000 * 4
    room_bytes = int(2.5 * logits_bytes)
    measured_bytes, emptied_bytes = [], []

    class Meter(CountingMeter):
        def latency_ms(self, run, recent=None, room_bytes=0):
            measured_bytes.append(self.growth_bytes(run))
            emptied_bytes.append(room_bytes)
            return super().latency_ms(run)

        def growth_bytes(self, run):
            return peak_growth_bytes(run)

        def once_ms(self, run):
            run()
            return 1.0

    monkeypatch.setattr(measured, "meter_for", lambda _: Meter())
    measurement = measured.Measurement(traced, "cpu", room_bytes=room_bytes)
    measurement.run()
    profile = measurement.profile()
    assert measurement.too_large > 0
    assert measured_bytes
    assert max(measured_bytes) < room_bytes
    assert max(emptied_bytes) < room_bytes
    families = {item.family: at for at, item in enumerate(profile.graph.operators)}
    loss = profile.costs[families["cross_entropy_backward"]]
    assert len(loss) > 1, "its leaner ways are there"
    assert loss[0].workspace_bytes >= logits_bytes
    assert loss[0].latency_ms > 0


def test_weights_that_are_resident_rule_no_implementation_out():
    """They are copied to measure a call; a schedule has them anyway."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8192), nn.ReLU(), nn.Linear(8192, 8)).requires_grad_(
        False
    )
    model[0].requires_grad_(True)
    traced = monetlite.trace(model, torch.randn(8, 64))
    room_bytes = 4 * 8 * 8192 * 4
    assert room_bytes < 4 * model[1].weight.numel()
    measurement = measured.Measurement(traced, "cpu", room_bytes=room_bytes)
    assert measurement.too_large == 0
    measurement.run()
    names = [[item.name for item in operator.implementations] for operator in measurement.profile().graph.operators]
    every = [[item.name for item in operator.implementations] for operator in traced.available("cpu").operators]
    assert names == every
