"""What a name finds: the fastest schedule that fits, for the device that is meant."""

import re
import shutil

import commands
import pytest
from files.schedule_files import full_schedule

import monetlite
from monetlite.core.errors import BudgetError, ScheduleFileError
from monetlite.core.source import ModelSource
from monetlite.zoo.collection import Shelf, find, find_entry, matching

GB = 10**9


def shared(model="resnet50", batch=184, device="p100", budget=6, overhead=0.1, **changes):
    facts = {
        "source": ModelSource(model=model, batch=batch, input_size=(224, 224)),
        "device": device,
        "budget_bytes": budget * GB,
        "peak_bytes": budget * GB - 10**7,
        "plain_peak_bytes": 16 * GB,
        "plain_latency_ms": 100.0,
        "latency_ms": 100.0 * (1 + overhead),
        "lower_bound_ms": 100.0,
        "optimizer": None,
        "autocast": "",
        "tolerance": 0.0,
        "accumulate": False,
        "step_in_backward": False,
    }
    return full_schedule(**(facts | changes))


@pytest.fixture
def shelf(tmp_path):
    made = Shelf(tmp_path / "schedules")
    for schedule in (
        shared(budget=6, overhead=0.1),
        shared(budget=8, overhead=0.05),
        shared(budget=7, overhead=0.02, device="rtx-3090"),
        shared(
            model="hf:gpt2",
            budget=5,
            device="rtx-3090",
            source=ModelSource(model="hf:gpt2", batch=8, sequence_length=1024),
        ),
    ):
        made.add(schedule)
    return made


def test_files_lie_by_device_model_batch_and_budget(shelf):
    assert shelf.files() == (
        "p100/resnet50_184_6GB.yaml",
        "p100/resnet50_184_8GB.yaml",
        "rtx-3090/hf-gpt2_8x1024_5GB.yaml",
        "rtx-3090/resnet50_184_7GB.yaml",
    )
    assert not shelf.stale()


@pytest.mark.parametrize(
    ("text", "file"),
    [
        ("zoo:p100/resnet50@6GB", "p100/resnet50_184_6GB"),
        ("zoo:P100/ResNet-50@7.5GB", "p100/resnet50_184_6GB"),
        ("zoo:p100/resnet50@100%", "p100/resnet50_184_8GB"),
        ("zoo:Tesla P100-PCIE-16GB/resnet50@50%", "p100/resnet50_184_8GB"),
        ("zoo:resnet50@9GB", "rtx-3090/resnet50_184_7GB"),
        ("zoo:resnet50", "rtx-3090/resnet50_184_7GB"),
        ("zoo:hf:gpt2@5GB", "rtx-3090/hf-gpt2_8x1024_5GB"),
        ("zoo:gpt2@5GB", "rtx-3090/hf-gpt2_8x1024_5GB"),
        ("zoo:p100/resnet50_184_6GB", "p100/resnet50_184_6GB"),
        ("p100/resnet50_184_6GB.yaml", "p100/resnet50_184_6GB"),
    ],
)
def test_a_name_finds_the_fastest_that_fits(shelf, text, file):
    assert find_entry(text, shelf).name == file
    assert find(text, shelf) == shelf.load(find_entry(text, shelf))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("zoo:resnet51@6GB", "no schedules of 'resnet51'; there are hf:gpt2, resnet50"),
        ("zoo:t4/resnet50@6GB", "none for 't4'; there are schedules for p100, rtx-3090"),
        ("zoo:p100/resnet50@5GB", r"nothing fits; the smallest peak is 5.99 GB \(p100/resnet50_184_6GB"),
        ("zoo:../../etc/passwd", "names no schedule"),
        ("zoo:", "names no schedule"),
        ("zoo:a@b@c", "names no schedule"),
    ],
)
def test_what_is_not_there_says_what_is(shelf, text, message):
    with pytest.raises(ScheduleFileError, match=message):
        find(text, shelf)


def test_other_bits_are_had_by_name_only(shelf):
    shelf.add(shared(budget=4, overhead=0.01, tolerance=1e-5))
    assert find_entry("zoo:p100/resnet50@6GB", shelf).tolerance == 0
    name = "p100/resnet50_184_4GB_within1e-05"
    with pytest.raises(ScheduleFileError, match=rf"same bits as plain training; zoo:{name} is within 1e-05"):
        find("zoo:p100/resnet50@5GB", shelf)
    assert find_entry(f"zoo:{name}", shelf).tolerance == 1e-5


def test_a_budget_that_is_none(shelf):
    with pytest.raises(BudgetError):
        find("zoo:resnet50@lots", shelf)


def test_queries_narrow_the_list(shelf):
    entries = shelf.entries()
    assert len(matching(entries)) == 4
    assert {entry.device for entry in matching(entries, model="resnet50")} == {"p100", "rtx-3090"}
    assert [entry.model for entry in matching(entries, batch=9, device="rtx-3090")] == ["resnet50"]
    assert [entry.name for entry in matching(entries, budget="40%")] == [
        "rtx-3090/hf-gpt2_8x1024_5GB",
        "p100/resnet50_184_6GB",
    ]


def test_a_gpu_here_is_meant_before_others(shelf, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "Tesla P100-PCIE-16GB")
    assert find_entry("zoo:resnet50@9GB", shelf).name == "p100/resnet50_184_8GB"
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "Some Other GPU")
    assert find_entry("zoo:resnet50@9GB", shelf).name == "rtx-3090/resnet50_184_7GB"


def test_sizes_and_options_are_in_the_name(shelf):
    odd = shared(
        source=ModelSource(model="unet", batch=11, input_size=(416, 608), dtype="bfloat16"),
        optimizer="adamw",
        accumulate=True,
        tolerance=1e-5,
        autocast="float16",
    )
    assert shelf.add(odd).file == "p100/unet_11x416x608_6GB_bfloat16_float16_adamw_accumulate_within1e-05.yaml"


@pytest.mark.parametrize(
    "changes",
    [
        {"source": None},
        {"device": "../.."},
        {"device": ""},
        {"device": "a/b"},
        {"device": "C:\\x"},
        {"optimizer": "../../x"},
        {"autocast": "/etc"},
        {"device": "x" * 300},
    ],
)
def test_nothing_is_written_outside_of_the_collection(shelf, tmp_path, changes):
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ScheduleFileError, match=r"is no name for a file|doesn't say how to build"):
        shelf.add(shared(**changes))
    assert sorted(tmp_path.rglob("*")) == before


def test_what_can_not_be_listed_is_not_added(shelf):
    before = {path: path.read_bytes() for path in shelf.folder.rglob("*.yaml")}
    with pytest.raises(ScheduleFileError, match=r"p100/resnet50_184_5GB.yaml can't be listed .*overhead"):
        shelf.add(shared(budget=5, plain_latency_ms=1e-300))
    assert {path: path.read_bytes() for path in shelf.folder.rglob("*.yaml")} == before
    index = shelf.folder / "index.yaml"
    index.write_text(index.read_text().replace("kind: estimated", "kind: guessed", 1))
    with pytest.raises(ScheduleFileError, match=r"kind is 'guessed'; it should be one of measured, estimated"):
        shelf.add(shared(budget=5))
    assert "p100/resnet50_184_5GB.yaml" not in shelf.files()


def test_an_index_that_lies_is_not_followed_outside(shelf):
    index = shelf.folder / "index.yaml"
    index.write_text(index.read_text().replace("p100/resnet50_184_6GB.yaml", "../../secret.yaml"))
    with pytest.raises(ScheduleFileError, match=r"entries\[2\]\.file is .* it should be DEVICE"):
        shelf.entries()


def test_what_a_list_suggests_is_its_first_schedule(shelf, monkeypatch):
    """Of the shipped collection by its name; of another one, which names don't find, by its file."""
    shelf.add(shared(budget=4, tolerance=1e-5))
    for options in (("--folder", shelf.folder), ()):
        listed = commands.run("zoo", "list", "--budget", "30%", *options)
        name = re.search(r'MONeTWrapper\(model, "(.*)"\)', listed.stdout)[1]
        assert monetlite.load_schedule(name).tolerance == 1e-5
        for module in ("zoo.collection", "cli.zoo_commands"):
            monkeypatch.setattr(f"monetlite.{module}.shipped", lambda: shelf)


def test_a_stale_index_is_noticed(shelf):
    shutil.copy(shelf.folder / "p100/resnet50_184_6GB.yaml", shelf.folder / "p100/other.yaml")
    assert shelf.stale()
    (shelf.folder / "index.yaml").unlink()
    assert shelf.stale()


def test_load_schedule_takes_the_same_names(shelf, monkeypatch):
    monkeypatch.setattr("monetlite.zoo.collection.shipped", lambda: shelf)
    assert monetlite.load_schedule("zoo:p100/resnet50@6GB") == shared()
