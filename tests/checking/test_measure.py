"""Measuring a model: what is reported is what there is, and running out of memory is a result."""

import csv
import json
import sys
from dataclasses import replace

import pytest
import torch
from commands import run
from rich.console import Console
from small_models import WithLoss
from torch import nn

import monetlite
from monetlite.checking import measuring
from monetlite.checking.measurements import (
    BatchRun,
    Growth,
    Line,
    Loading,
    Measurements,
    Mode,
    Place,
    StepMemory,
    fit,
    largest_batch,
    tells_enough,
)
from monetlite.checking.measuring import ModelMeasurer, measured_place
from monetlite.checking.trainee import Trainee, default_loss
from monetlite.core.errors import ScheduleFileError
from monetlite.core.simulate import simulate
from monetlite.core.steps import plain_steps
from monetlite.models.built_model import BuiltModel
from monetlite.profiling import memory_use
from monetlite.profiling.memory_use import is_out_of_memory
from monetlite.profiling.step_additions import OPTIMIZERS, make_optimizer
from monetlite.reporting.text_measure import as_text, print_measurements

MIB = 2**20
TORCHS_OWN = sorted(name for name, kind in OPTIMIZERS.items() if kind.made_by.startswith("torch."))


def measure(build, batches, modes=tuple(Mode), **options):
    return ModelMeasurer(build, **options).run(batches, modes)


MODEL = """
import torch
from torch import nn

def build(batch=2):
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    return model, (torch.randn(batch, 64),)

def own():
    return nn.Linear(8, 8), (torch.randn(3, 8),)

class Hungry(nn.Module):
    "Asks for a pebibyte where the batch is four or more, in training only where it is two or more."
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        if len(x) >= 4 or (self.training and len(x) >= 2):
            torch.empty(2**50)
        return self.linear(x)

def hungry(batch=1):
    return Hungry(), (torch.randn(batch, 8),)

def huge(batch=1):
    return nn.Linear(8, 8), (torch.randn(batch * 2**48, 8),)

def normalised(batch=1):
    return nn.BatchNorm1d(8), (torch.randn(batch, 8),)
"""


@pytest.fixture
def folder(work_folder):
    (work_folder / "net.py").write_text(MODEL)
    return work_folder


def built(model, inputs, batch):
    return BuiltModel(name="model", model=model.train(), example_inputs=inputs, batch=batch, description="a model")


QUICK = ("--device", "cpu", "--repeats", "2", "--warmup", "0")


def test_a_training_steps_peak_is_what_simulate_and_verify_say():
    """Three ways to the same number: this one, `verify`'s, and the graph's."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.Sigmoid())

        def forward(self, x):
            return {"loss": self.layers(x).mean()}

    inputs, model = (torch.randn(256, 64),), Net()
    found = measure(lambda _: built(model, inputs, 256), [256], [Mode.TRAINING], repeats=1)
    measured = found.runs[0].memory.peak_bytes
    trainee = Trainee(model, inputs, {}, default_loss, "cpu")
    trainee.step()
    assert measured == pytest.approx(trainee.memory().peak_bytes, rel=0.01)
    profile = monetlite.profile(monetlite.trace(model, inputs), "cpu")
    assert measured == pytest.approx(simulate(profile, plain_steps(profile.graph)).peak_bytes, rel=0.01)


def test_inference_takes_no_gradients_and_runs_in_evaluation_mode():
    seen = []

    class Watching(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))

        def forward(self, x):
            seen.append((self.training, torch.is_grad_enabled()))
            return self.layers(x)

    inputs = (torch.randn(4096, 256),)
    found = measure(lambda _: built(Watching(), inputs, 4096), [4096], repeats=1)
    inference, training = (found.of(mode)[0].memory for mode in (Mode.INFERENCE, Mode.TRAINING))
    assert set(seen) == {(False, False), (True, True)}
    activation = 4096 * 256 * 4
    # Inference holds an input and an output of one layer beside the example input, training every layer's.
    assert inference.peak_bytes - inference.resident_bytes <= 2 * activation + MIB
    assert training.peak_bytes - training.resident_bytes >= 6 * activation
    assert inference.resident_bytes == training.resident_bytes == 4 * (6 * (256 * 256 + 256) + 4096 * 256)


@pytest.mark.parametrize("name", TORCHS_OWN)
def test_an_optimizers_state_is_there_before_the_step(name):
    def build(_):
        return built(nn.Linear(512, 512, bias=False), (torch.randn(1, 512),), 1)

    without = measure(build, [1], [Mode.TRAINING], repeats=1).runs[0].memory
    stepping = measure(build, [1], [Mode.TRAINING], repeats=1, optimizer=name).runs[0].memory
    added = stepping.resident_bytes - without.resident_bytes
    assert added == pytest.approx(OPTIMIZERS[name].state * MIB, abs=64)
    assert stepping.peak_bytes >= without.peak_bytes + added


def test_torchs_optimizers_can_be_made():
    weight = nn.Parameter(torch.ones(2))
    for name in TORCHS_OWN:
        optimizer = make_optimizer(name, [weight], 1e-6)
        weight.grad = torch.ones(2)
        optimizer.step()
        state = sum(item.numel() for item in optimizer.state[weight].values() if item is not None and item.dim())
        assert state == OPTIMIZERS[name].state * 2
    with pytest.raises(monetlite.MonetliteError, match="lion"):
        make_optimizer("lion", [weight], 1e-6)


def test_each_batch_begins_with_a_new_model_without_gradients():
    made = []

    def build(batch):
        model = nn.Linear(8, 8)
        made.append(model)
        return built(model, (torch.randn(batch, 8),), batch)

    measure(build, [1, 2], repeats=1, optimizer="adam")
    assert len(made) == 2
    assert all(parameter.grad is None for model in made for parameter in model.parameters())


def test_labels_are_for_training():
    seen = []

    class Optional(WithLoss):
        def forward(self, x, labels=None):
            seen.append((self.training, labels is not None))
            return super().forward(x, torch.zeros(len(x), dtype=torch.long) if labels is None else labels)

    inputs = {"x": torch.randn(4, 6), "labels": torch.zeros(4, dtype=torch.long)}
    found = measure(lambda _: built(Optional(), inputs, 4), [4], repeats=1)
    assert found.labels_left_out
    assert set(seen) == {(False, False), (True, True)}
    required = measure(lambda _: built(WithLoss(), inputs, 4), [4], [Mode.INFERENCE], repeats=1)
    assert not required.labels_left_out


def runs_of(needed, reserved=None, out=()):
    ran = [
        BatchRun(
            mode=Mode.TRAINING,
            batch=batch,
            memory=StepMemory(peak_bytes=size, resident_bytes=0, reserved_bytes=reserved and size * reserved),
            times_ms=(1.0,),
        )
        for batch, size in needed.items()
    ]
    return [*ran, *(BatchRun(mode=Mode.TRAINING, batch=batch) for batch in out)]


def test_the_line_is_through_the_largest_batches_as_the_peak_only_gets_steeper():
    def peak(batch):
        return max(1000, 400 + 100 * batch)

    runs = runs_of({batch: peak(batch) for batch in (1, 8, 16)})
    line = fit(runs)
    assert (line.bytes_per_sample, line.fixed_bytes, line.batches) == (100, 400, (8, 16))
    assert line.deviation == pytest.approx(0.5)
    most = largest_batch(line, runs, 10_000)
    assert peak(most) <= 10_000 < peak(most + 1)
    assert fit(runs_of({4: 100})) is None


def test_predictions_never_contradict_what_was_seen():
    runs = runs_of({1: 200, 2: 300}, out=(8,))
    assert largest_batch(fit(runs), runs, 10**6) == 7
    assert largest_batch(fit(runs), runs, 100) == 2
    # An allocator that reserves twice the peak fills the device at half the batch.
    twice = runs_of({1: 200, 2: 300}, reserved=2)
    assert largest_batch(fit(twice), twice, 2000) == 9
    assert largest_batch(fit(twice), runs_of({1: 200, 2: 300}), 2000) == 19


def test_weights_alone_predict_nothing():
    line = Line(bytes_per_sample=1.0, fixed_bytes=10**6, batches=(1, 2), deviation=0.0)
    assert not tells_enough(line)
    assert largest_batch(line, runs_of({1: 10**6, 2: 10**6 + 1}), 10**9) is None
    flat = runs_of({1: 100, 2: 100})
    assert largest_batch(fit(flat), flat, 10**9) is None


def test_a_process_is_kept_within_a_size_by_an_error_and_let_go_again():
    """What keeps the system from ending the process: real allocations, really refused."""
    with pytest.raises(RuntimeError) as refused, memory_use.memory_limited(64 * MIB):
        torch.zeros(128 * MIB)
    assert is_out_of_memory(refused.value)
    assert torch.zeros(128 * MIB).numel() == 128 * MIB
    with memory_use.memory_limited(None):
        assert torch.zeros(64 * MIB).numel() == 64 * MIB


def test_what_says_that_memory_ran_out(monkeypatch):
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"))
    assert is_out_of_memory(MemoryError())
    # None of cuDNN's plans ran, for lack of memory if the allocator has refused some: the loop over them hides it.
    no_engine = RuntimeError("GET was unable to find an engine to execute this computation")
    monkeypatch.setattr("monetlite.profiling.memory_use.refusals", lambda: 0)
    assert not is_out_of_memory(no_engine)
    monkeypatch.setattr("monetlite.profiling.memory_use.refusals", lambda: 2)
    assert is_out_of_memory(no_engine)
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("out of memory"))
    wrapped = monetlite.MonetliteError("failed")
    wrapped.__cause__ = MemoryError()
    assert is_out_of_memory(wrapped)


@pytest.mark.skipif(memory_use.available_bytes() is None, reason="Linux says what memory there is")
def test_a_machines_memory():
    assert 0 < memory_use.available_bytes() <= memory_use.machine_bytes()


def test_out_of_memory_is_a_row_and_ends_that_modes_larger_batches(folder):
    result = run("measure", "--model", "net.py:hungry", "--batch", "8,1,2,4", *QUICK, "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    outcomes = {(item["mode"], item["batch"]): item["outcome"] for item in facts["runs"]}
    assert outcomes == {
        ("inference", 1): "ran",
        ("inference", 2): "ran",
        ("inference", 4): "out of memory",
        ("inference", 8): "not tried",
        ("training", 1): "ran",
        ("training", 2): "out of memory",
        ("training", 4): "not tried",
        ("training", 8): "not tried",
    }
    assert facts["lines"]["inference"]["largest_batch"] in (2, 3, None)
    printed = run("measure", "--model", "net.py:hungry", "--batch", "1,2,4", "--mode", "training", *QUICK)
    assert printed.exit_code == 0
    assert "Out of memory at batch 2." in printed.stdout
    assert "not tried" in printed.stdout


def test_inputs_that_do_not_fit_are_out_of_memory_too(folder):
    result = run("measure", "--model", "net.py:huge", "--batch", "1,2", *QUICK, "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert (facts["model"], facts["loading"]) == ("net.py:huge", None)
    assert {item["outcome"] for item in facts["runs"] if item["batch"] == 1} == {"out of memory"}
    assert {item["outcome"] for item in facts["runs"] if item["batch"] == 2} == {"not tried"}
    assert run("measure", "--model", "net.py:huge", "--batch", "1", *QUICK).exit_code == 0


def test_the_command_reports_in_words_that_fit_a_terminal(folder, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    result = run("measure", "--model", "net.py:build", "--batch", "1,64", "--optimizer", "adamw", *QUICK)
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert max(map(len, result.stdout.splitlines())) <= 80
    for words in ("loading", "parameters", "inference:", "training:", "step of adamw", "samples/s"):
        assert words in text, words


def test_the_facts_are_those_of_the_model(folder):
    facts = json.loads(run("measure", "--model", "net.py:build", "--batch", "4096,8192", *QUICK, "--json").stdout)
    # Each sample's floats in training: at least the input, the hidden activation and its gradient, and the output.
    per_sample = facts["lines"]["training"]["bytes_per_sample"] / 4
    assert 64 + 2 * 256 + 64 <= per_sample <= 64 * 4 + 256 * 3
    assert facts["loading"]["parameter_bytes"] == 4 * (64 * 256 + 256 + 256 * 64 + 64)
    for item in facts["runs"]:
        assert item["fastest_ms"] <= item["median_ms"] <= item["slowest_ms"]
        assert len(item["times_ms"]) == 2
        assert item["samples_per_s"] == pytest.approx(1000 * item["batch"] / item["median_ms"])


def test_the_table_is_printed_before_it_is_written(folder, monkeypatch):
    def full(*_):
        raise ScheduleFileError("no space is left")

    monkeypatch.setattr(sys.modules["monetlite.cli.measure_command"], "write_atomically", full)
    result = run("measure", "--model", "net.py:build", "--batch", "2", *QUICK, "--output", folder / "table.md")
    assert result.exit_code == 4
    assert "training:" in result.stdout
    assert "no space is left" in result.stderr


def test_the_table_is_written_in_three_formats(folder):
    arguments = ("measure", "--model", "net.py:build", "--batch", "2,4", "--mode", "training", *QUICK)
    result = run(*arguments, "--output", "table.csv")
    assert result.exit_code == 0, result.output
    assert "written to table.csv" in result.stdout
    rows = list(csv.DictReader((folder / "table.csv").read_text().splitlines()))
    assert [(row["mode"], row["batch"], row["outcome"]) for row in rows] == [
        ("training", "2", "ran"),
        ("training", "4", "ran"),
    ]
    found = measure(lambda batch: built(nn.Linear(8, 8), (torch.randn(batch, 8),), batch), [2, 4])
    assert [item["batch"] for item in json.loads(as_text(found, ".json"))["runs"]] == [2, 4, 2, 4]
    assert as_text(found, ".md").count("| batch | peak |") == 2


def test_without_a_batch_the_models_own_is_measured(folder):
    facts = json.loads(run("measure", "--model", "net.py:own", *QUICK, "--json").stdout)
    assert [item["batch"] for item in facts["runs"]] == [3, 3]
    assert facts["lines"] == {"inference": None, "training": None}


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (("--batch", "1,1"), 2, "1 is there twice"),
        (("--batch", "0"), 2, "not a batch size"),
        (("--batch", "2,-1"), 2, "not a batch size"),
        (("--batch", "1,,2"), 2, "not a batch size"),
        (("--batch", "two"), 2, "not a batch size"),
        (("--mode", "testing"), 2, "neither inference nor training"),
        (("--mode", "training,training"), 2, "twice"),
        (("--repeats", "0"), 2, "--repeats"),
        (("--device", "p100"), 2, "--device"),
        (("--optimizer", "lion"), 2, "--optimizer"),
        (("--output", "table.txt"), 2, ".csv"),
        (("--output", "absent/table.md"), 4, "no folder absent"),
        (("--input-size", "32"), 2, "takes no argument 'input_size'"),
    ],
)
def test_usage_errors(options, code, says, folder):
    result = run("measure", "--model", "net.py:build", *options)
    assert result.exit_code == code, result.output
    assert says in result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.output


def test_other_failures_name_the_mode_and_the_batch(folder):
    result = run("measure", "--model", "net.py:normalised", "--batch", "1,2", *QUICK)
    assert result.exit_code == 2
    assert "training at batch 1" in result.stderr
    assert "more than 1 value per channel" in result.stderr
    refused = run("measure", "--model", "net.py:own", "--batch", "2", *QUICK)
    assert refused.exit_code == 2
    assert "takes no argument 'batch'" in refused.stderr


def test_a_gpus_table_tells_its_memory_apart(capsys):
    """Nothing here runs on a GPU: what such a measurement would say is printed from figures."""
    gib = 2**30
    found = Measurements(
        model="model",
        description="a model",
        place=Place(
            device="cuda",
            environment={"device": "NVIDIA GeForce RTX 3090", "torch": "2.13"},
            total_bytes=24 * gib,
            available_bytes=23 * gib,
            context_bytes=512 * MIB,
        ),
        loading=Loading(
            times_ms=(900.0, 1000.0),
            parameter_bytes=gib,
            buffer_bytes=MIB,
            input_bytes=MIB,
            growth=Growth(kept_bytes=gib, peak_bytes=gib),
        ),
        runs=tuple(
            BatchRun(
                mode=Mode.TRAINING,
                batch=batch,
                memory=StepMemory(
                    peak_bytes=(2 + batch) * gib,
                    resident_bytes=gib,
                    reserved_bytes=(2 + batch) * gib * 5 // 4,
                    in_use_bytes=(4 + batch) * gib,
                ),
                times_ms=(1000.0, 1100.0, 1200.0),
            )
            for batch in (1, 2, 4)
        ),
    )
    print_measurements(Console(width=80, highlight=False), found)
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    text = " ".join(printed.split())
    assert "batch peak reserved in use time spread samples/s" in text
    assert "its context: 537 MB" in text
    assert "Each sample takes 1.07 GB beside 2.15 GB" in text
    # 23 GiB hold a peak of 23 / 1.25 = 18.4 GiB, which is 2 GiB and 16 samples.
    assert "a batch of at most 16" in text
    lacking = replace(found, place=replace(found.place, context_bytes=None))
    assert "its context: not known" in " ".join(as_text(lacking, ".md").split())


def test_a_gpu_that_is_not_there(folder, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = run("measure", "--model", "net.py:build", "--device", "cuda")
    assert result.exit_code == 2
    assert "no GPU" in result.stderr


def test_the_context_is_what_the_first_tensor_brings(monkeypatch):
    """Looked for before anything, the meter's own buffer included, is on the GPU."""
    there = {"context": 0}

    def start(*_, **__):
        there["context"] = 500 * MIB

    class Meter:
        def environment(self):
            start()
            return {"device": "a GPU"}

    monkeypatch.setattr(measuring, "meter_for", lambda _: Meter())
    monkeypatch.setattr(memory_use, "gpu_in_use_bytes", lambda: 600 * MIB + there["context"])
    monkeypatch.setattr(torch, "zeros", start)
    for name, answer in (
        ("synchronize", None),
        ("empty_cache", None),
        ("memory_reserved", 0),
        ("mem_get_info", (7 * 2**30, 8 * 2**30)),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    assert measured_place("cuda").context_bytes == 500 * MIB
