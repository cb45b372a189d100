"""Schedule files: what is written is read back, and nothing but a schedule file is read at all."""

import datetime
import json
import math
import os
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from schedule_files import full_schedule
from thoroughness import often, some

import monetlite
from monetlite.core.choices import Choices
from monetlite.core.errors import ScheduleFileError
from monetlite.core.files import documents, plain_data
from monetlite.core.schedule import schedule_problems, schedule_schema, schedule_text


def load_text(text, tmp_path):
    path = tmp_path / "schedule.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return monetlite.load_schedule(path)


@pytest.fixture
def text():
    return schedule_text(full_schedule())


def test_a_saved_schedule_is_read_back_equal(tmp_path):
    for schedule in (
        full_schedule(),
        full_schedule(optimizer=None, smallest_reached_bytes=None, reserved_bytes=None, inputs={}),
    ):
        schedule.save(tmp_path / "s.yaml")
        loaded = monetlite.load_schedule(tmp_path / "s.yaml")
        assert loaded == schedule
        assert loaded.latency_ms == schedule.latency_ms, "to the last bit"
        assert loaded.gap == schedule.gap


names = st.text(
    st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")) | st.sampled_from(" :#-[]{}'\"&*!|>%@`\n\t"),
    max_size=12,
)
runs = st.lists(st.tuples(names, names), max_size=3).map(tuple)


@pytest.mark.thorough
@settings(max_examples=some(150), deadline=None)
@given(
    before=st.dictionaries(names, runs, max_size=3),
    implementations=st.dictionaries(names, names, max_size=3),
    stored=st.lists(names, max_size=4).map(tuple),
    latency_ms=st.floats(0, 1e15),
    name=names,
)
def test_any_names_survive_a_file(tmp_path_factory, before, implementations, stored, latency_ms, name):
    choices = Choices(before=before, implementations=implementations, stored=stored)
    schedule = full_schedule(choices=choices, name=name, latency_ms=latency_ms)
    path = tmp_path_factory.getbasetemp() / "s.yaml"
    schedule.save(path)
    assert monetlite.load_schedule(path) == schedule


def test_a_file_is_readable_in_a_diff(text):
    assert "conv2.backward:\n  - conv1\n  - relu: inplace\n" in text
    assert "shape: [4, 3, 8, 8]" in text
    assert text.startswith("# Net")
    assert max(len(line) for line in text.splitlines()) < 160


HOSTILE = {
    "python object": "format: !!python/object/apply:os.system ['touch HERE']",
    "python name": "format: !!python/name:os.system",
    "python tuple": "format: !!python/tuple [1]",
    "local tag": "format: !Schedule {a: 1}",
    "binary": "format: !!binary aGVsbG8=",
    "set": "format: !!set {a, b}",
    "explicit plain tag": "format: !!str monetlite-schedule",
    "anchor and alias": "format: &a [x]\nversion: *a",
    "anchor alone": "format: &a monetlite-schedule",
    "laughs": "a: &a [x,x]\nb: &b [*a,*a]\nc: &c [*b,*b]",
    "deep lists": "format: " + "[" * 100_000,
    "deep lists, closed": "format: " + "[" * 5000 + "]" * 5000,
    "deep maps": "".join(" " * depth + "a:\n" for depth in range(2000)),
    "empty": "",
    "a number": "12\n...",
    "a list": "- a\n- b\n...",
    "two documents": "format: monetlite-schedule\n---\nformat: monetlite-schedule\n",
    "numbers as keys": "1: 2\n...",
    "a list as key": "? [a, b]\n: c\n...",
    "another format": "format: something-else\nversion: 1\n...",
    "tabs": "format:\tmonetlite-schedule\n\tversion: 1",
    "unclosed": 'format: "monetlite-schedule',
    "binary junk": bytes(range(256)),
    "utf-16": "format: monetlite-schedule".encode("utf-16"),
    "null bytes": b"format: monetlite-schedule\x00",
    "pickle": b"\x80\x04\x95\x1a\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x94\x8c\x06system\x94\x93\x94.",
    "an enormous integer": "format: monetlite-schedule\nversion: " + "9" * 100_000 + "\n...",
    "an impossible date": "format: 2001-99-99\n...",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_files_that_are_not_schedules(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "system", lambda _: pytest.fail("a file was executed"))
    text = HOSTILE[kind]
    with pytest.raises(ScheduleFileError) as raised:
        load_text(text, tmp_path)
    assert "schedule.yaml" in str(raised.value), "the message names the file"
    assert len(str(raised.value)) < 1000
    assert os.listdir(tmp_path) == ["schedule.yaml"]


def test_hostile_values_inside_a_complete_file(text, tmp_path):
    for tag in ("!!python/object/apply:os.system ['true']", "!!python/name:os.system", "!x 1", "&a 1"):
        with pytest.raises(ScheduleFileError, match=r"line \d+: .*not allowed"):
            load_text(text.replace("operators: 13", f"operators: {tag}"), tmp_path)


def test_merge_keys_and_repeated_keys_smuggle_nothing_in(text, tmp_path):
    with pytest.raises(ScheduleFileError, match="merge keys"):
        load_text(text.replace("operators: 13", "<<: {operators: 99}"), tmp_path)
    for repeated in ("operators: 13\noperators: 14", "operators: 13\n'operators': 13"):
        with pytest.raises(ScheduleFileError, match="'operators' is there twice"):
            load_text(text.replace("operators: 13", repeated), tmp_path)
    with pytest.raises(ScheduleFileError, match="'relu' is there twice"):
        load_text(text.replace("  relu: inplace\n", "  relu: inplace\n  relu: default\n"), tmp_path)


@pytest.mark.parametrize(
    ("field", "odd", "says"),
    [
        ("status", "infeasible", "solve.status is 'infeasible'"),
        ("status", "timeout", "solve.status is 'timeout'"),
        ("lower_bound_ms", 1e9, "solve.lower_bound_ms is 1e[+]09, and predicted.latency_ms is .*, below it"),
    ],
)
def test_what_no_solver_says_is_refused(text, tmp_path, field, odd, says):
    data = yaml.safe_load(text)
    data["solve"][field] = odd
    with pytest.raises(ScheduleFileError, match=says):
        load_text(dumped(data), tmp_path)


@pytest.mark.parametrize("section", ["predicted", "plain"])
def test_a_peak_of_nothing_is_none(text, tmp_path, section):
    data = yaml.safe_load(text)
    data[section]["peak_bytes"] = 0
    with pytest.raises(ScheduleFileError, match=rf"{section}.peak_bytes should be .*1, not 0"):
        load_text(dumped(data), tmp_path)


def paths_of(data, path=()):
    """Every place in nested data."""
    yield path
    if isinstance(data, dict):
        for key in data:
            yield from paths_of(data[key], (*path, key))
    elif isinstance(data, list):
        for index in range(len(data)):
            yield from paths_of(data[index], (*path, index))


def changed(data, path, change):
    """Nested data with one place replaced by `change(what was there)`, or deleted if that is `DELETE`."""
    if not path:
        return change(data)
    copied = dict(data) if isinstance(data, dict) else list(data)
    value = changed(copied[path[0]], path[1:], change)
    if value is DELETE:
        del copied[path[0]]
    else:
        copied[path[0]] = value
    return copied


def dumped(data):
    """As `yaml.safe_dump` writes it, in C where there is one: in a tenth of the time."""
    return yaml.dump(data, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper), sort_keys=False, explicit_end=True)


DELETE = object()
ODD = [
    None,
    True,
    -1,
    2**63,
    10**400,
    1.5,
    -0.5,
    float("nan"),
    float("inf"),
    -float("inf"),
    "",
    "text",
    [],
    [[]],
    {},
    {"a": {"b": 1}},
    [None],
    ["x", 1],
    [{"a": 1}],
    [{"a": "b", "c": "d"}],
    datetime.date(2020, 1, 1),
    b"bytes",
]
HALVES = [[DELETE, *ODD[::2]], ODD[1::2]]
IGNORED = {("solve", "gap"), ("inputs", "input1", "requires_grad")}
"""Derived from what is beside it, or what it is where it is missing."""


@pytest.mark.parametrize("odd_ones", often(HALVES, HALVES[0]), ids=["some", "others"])
def test_every_field_of_every_wrong_type(odd_ones, tmp_path, text):
    """Each place of the file, with each odd value: an error that names the file, or another schedule."""
    data = yaml.safe_load(text)
    loaded_anyway = set()
    for path in paths_of(data):
        for odd in odd_ones:
            if path == () and odd is DELETE:
                continue
            mutated = changed(data, path, lambda _, odd=odd: odd)
            if mutated == data:
                continue
            try:
                schedule = load_text(dumped(mutated), tmp_path)
            except ScheduleFileError:
                continue
            loaded_anyway.add((path, repr(odd) if odd is not DELETE else "missing"))
            assert path in IGNORED or schedule != full_schedule()
            schedule.save(tmp_path / "again.yaml")
            assert monetlite.load_schedule(tmp_path / "again.yaml") == schedule, "what loads can be saved"
    for required in (
        "format",
        "version",
        "model",
        "fingerprint",
        "inputs",
        "stored",
        "before",
        "implementations",
    ):
        assert not any(path == (required,) and odd == "missing" for path, odd in loaded_anyway), required
    for numbers in (
        ("predicted", "latency_ms"),
        ("predicted", "peak_bytes"),
        ("budget_bytes",),
        ("operators",),
    ):
        accepted = {odd for path, odd in loaded_anyway if path == numbers}
        assert accepted <= {"1.5", repr(0)}, (numbers, accepted)


def test_truncated_anywhere(text, tmp_path):
    """A file cut short is an error: its last field is the last thing written."""
    raw = text.encode()
    for length in [*range(0, len(raw), 7), len(raw) - 4]:
        with pytest.raises(ScheduleFileError):
            load_text(raw[:length], tmp_path)


def test_bytes_changed_at_random(text, tmp_path):
    """Random damage makes an error or another schedule, and no other exception."""
    rng, raw, refused = random.Random(0), text.encode(), 0
    for _ in range(400):
        damaged = bytearray(raw)
        for _ in range(rng.choice([1, 1, 3, 20])):
            at = rng.randrange(len(damaged))
            kind = rng.randrange(3)
            if kind == 0:
                damaged[at] = rng.randrange(256)
            elif kind == 1:
                del damaged[at : at + rng.randint(1, 30)]
            else:
                damaged[at:at] = rng.choice([b"!!", b"&a ", b"*a ", b"[", b"}", b"\n", b"\x00", b": ", b"\xff"])
        try:
            load_text(bytes(damaged), tmp_path)
        except ScheduleFileError:
            refused += 1
    assert refused > 150


def test_another_version_says_what_to_do(text, tmp_path):
    with pytest.raises(ScheduleFileError, match=r"version is 3; this monetlite reads versions 1 to 2\. Update"):
        load_text(text.replace("version: 2", "version: 3"), tmp_path)


def test_a_file_of_version_1_is_brought_forward(text, tmp_path):
    data = yaml.safe_load(text)
    del data["source"], data["operator_digests"]
    schedule = load_text(yaml.safe_dump({**data, "version": 1}, explicit_end=True), tmp_path)
    assert schedule == full_schedule(source=None, operator_digests=())
    schedule.save(tmp_path / "s.yaml")
    assert "version: 2\n" in (tmp_path / "s.yaml").read_text()
    assert_follows_schema(tmp_path / "s.yaml")


@pytest.mark.parametrize(
    "model", ["evil.py:build", "package.module:build", "../model", "hf:config.json", "hf:/etc", "hf:~", "", "a b"]
)
def test_no_file_or_function_can_be_named_as_a_model(text, tmp_path, model):
    with pytest.raises(ScheduleFileError, match=r"source\.model"):
        load_text(text.replace("hf:vit", json.dumps(model)), tmp_path)


def assert_follows_schema(path):
    Draft202012Validator(schedule_schema()).validate(yaml.safe_load(path.read_text()))


class TestSchema:
    """The JSON Schema says of files what reading them says."""

    def test_it_is_a_schema(self):
        Draft202012Validator.check_schema(schedule_schema())

    def test_what_is_written_follows_it(self, tmp_path):
        for schedule in (
            full_schedule(),
            full_schedule(source=None, operator_digests=(), optimizer=None, autocast=""),
        ):
            schedule.save(tmp_path / "s.yaml")
            assert_follows_schema(tmp_path / "s.yaml")

    def test_every_field_is_described(self, text, tmp_path):
        described, data = schedule_schema(), yaml.safe_load(text)
        assert set(data) == set(described["properties"])
        for part in ("costs", "predicted", "plain", "solve"):
            name = described["properties"][part]["$ref"].rpartition("/")[2]
            assert set(data[part]) == set(described["$defs"][name]["properties"]), part
        data["costs"]["price"] = data["extra"] = data["inputs"]["input0"]["extra"] = 1
        (tmp_path / "s.yaml").write_text(yaml.safe_dump(data, explicit_end=True))
        assert monetlite.load_schedule(tmp_path / "s.yaml") == full_schedule(), (
            "a later version may have written it"
        )
        places = {problem.partition(" ")[0] for problem in schedule_problems(tmp_path / "s.yaml")}
        assert places == {"costs.price", "extra", "inputs.input0.extra"}

    def test_the_published_schema_is_the_present_one(self):
        published = Path(__file__).parents[2] / "docs" / "schedule.schema.json"
        assert published.read_text() == json.dumps(schedule_schema(), indent=2) + "\n", (
            "write it again: json.dumps(monetlite.core.schedule.schedule_schema(), indent=2)"
        )

    def test_what_it_allows_can_be_read(self, text, tmp_path):
        """Each place of the file, with some of the odd values; JSON has no infinite or undefined numbers."""
        data, allowed = yaml.safe_load(text), 0
        odd_values = [value for value in ODD if not (isinstance(value, float) and not math.isfinite(value))]
        for number, path in enumerate(paths_of(data)):
            for odd in [odd_values[(number * 5 + step) % len(odd_values)] for step in range(5)]:
                mutated = changed(data, path, lambda _, odd=odd: odd)
                if Draft202012Validator(schedule_schema()).is_valid(mutated):
                    allowed += 1
                    load_text(dumped(mutated), tmp_path)
        assert allowed > 10


@pytest.mark.parametrize("number", ["0x" + "f" * 5000, "-0x" + "f" * 5000, str(2**62 + 1), "1" + ":59" * 40])
def test_whole_numbers_that_no_file_has_are_refused_wherever_they_stand(text, tmp_path, number):
    """Also where nothing reads them: `solve.gap` follows from other fields."""
    damaged = re.sub(r"gap: .*", f"gap: {number}", text)
    with pytest.raises(ScheduleFileError, match=r"line \d+ has a whole number of \d+ bits"):
        load_text(damaged, tmp_path)


def test_a_larger_file_than_any_schedule_is_not_read(tmp_path, monkeypatch, text):
    monkeypatch.setattr(plain_data, "MAX_YAML_BYTES", len(text) // 2)
    with pytest.raises(ScheduleFileError, match="larger than"):
        load_text(text, tmp_path)


@pytest.mark.parametrize("wrong", [False, True])
def test_many_names_take_no_longer_than_they_must(tmp_path, monkeypatch, wrong):
    """A large file is read in one pass over its names, not in one per name; so is one whose last name is wrong."""
    many = 2_000
    choices = Choices(
        before={f"op{i}": ((f"op{i + 1}", "default"),) for i in range(many)},
        implementations={f"op{i}": "inplace" for i in range(many)},
        stored=(),
    )
    schedule = replace(full_schedule(), choices=choices)
    path = tmp_path / "s.yaml"
    schedule.save(path)
    converted = []
    original = documents.msgspec.convert
    monkeypatch.setattr(documents.msgspec, "convert", lambda *a, **k: converted.append(1) or original(*a, **k))
    if wrong:
        text = path.read_text()
        path.write_text(text.replace(f"  op{many - 1}: inplace\n", f"  op{many - 1}: 5\n"))
        line = text[: text.index(f"  op{many - 1}: inplace\n")].count("\n") + 1
        message = rf"line {line}: implementations\.op{many - 1} should be text, not 5"
        with pytest.raises(ScheduleFileError, match=message):
            monetlite.load_schedule(path)
    else:
        assert monetlite.load_schedule(path) == schedule
    assert 0 < len(converted) < 2 * many


@pytest.mark.parametrize("what", ["absent", "folder", "unreadable name"])
def test_paths_that_cannot_be_read(what, tmp_path):
    path = {"absent": tmp_path / "no.yaml", "folder": tmp_path, "unreadable name": "a\0b"}[what]
    with pytest.raises(ScheduleFileError, match="can't be read"):
        monetlite.load_schedule(path)


@pytest.mark.parametrize(
    ("written", "instead", "where"),
    [
        ("autocast: bfloat16", "autocast: foo", "autocast"),
        ("tolerance: ", "tolerance: 5\nx_tolerance: ", "tolerance"),
        ("model: ", 'model: "\\e[31mred\\e]0;title\\a"\nx_model: ', "line 6.* control characters"),
    ],
)
def test_what_no_step_is_run_with_is_refused(written, instead, where, tmp_path):
    """A type to cast to that there isn't, a tolerance of everything, and text that a terminal would obey."""
    path = tmp_path / "s.yaml"
    full_schedule().save(path)
    text = path.read_text()
    assert written in text
    path.write_text(text.replace(written, instead, 1))
    with pytest.raises(ScheduleFileError, match=where) as refused:
        monetlite.load_schedule(path)
    assert str(refused.value).isprintable()
