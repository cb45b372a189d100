"""Two thousand files that were damaged or made to harm, and two hundred writers killed at a random moment."""

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from files.schedule_files import full_schedule
from thoroughness import often

from monetlite.core.errors import MonetliteError
from monetlite.core.schedule import read_schedule, schedule_problems, schedule_text
from monetlite.core.source import ModelSource
from monetlite.zoo.check import Checker
from monetlite.zoo.collection import Shelf

FILES = 2000
SLOWEST_SECONDS = 10.0
"""Of a processor, for one file; on a busy machine the clock would say anything."""
EVIL = [
    "!!python/object/apply:os.system ['touch {here}/executed']",
    "!!python/object/new:subprocess.Popen [['touch', '{here}/executed']]",
    "!!python/module:os",
    "&a [*a]",
    "{<<: *x}",
    "[" * 5000 + "]" * 5000,
    "{a: " * 3000 + "}" * 3000,
    "9" * 100_000,
    "1e99999",
    "-9223372036854775809",
    "0x" + "f" * 5000,
    "1:2:3:4:5:6:7:8:9:0" * 50,
    ".nan",
    "2001-01-01 00:00:00",
    "'" + "x" * 300_000 + "'",
    '"../../../../{here}/outside"',
    '"/etc/passwd"',
    '"{here}/outside.py:build"',
    '"hf:../../outside"',
    '"con"',
    '"a\\0b"',
    "null",
    "true",
    "[]",
    "{}",
]


@pytest.fixture
def text():
    return schedule_text(full_schedule(source=ModelSource(model="resnet18", batch=2, input_size=(32, 32))))


def fields(data, path=()):
    yield path
    if isinstance(data, dict):
        for name, value in data.items():
            yield from fields(value, (*path, name))


def with_evil(data, path, placeholder):
    if not path:
        return placeholder
    copied = dict(data)
    copied[path[0]] = with_evil(copied[path[0]], path[1:], placeholder)
    return copied


def hostile(text, rng, here):
    """One damaged or evil file, as bytes."""
    kind = rng.randrange(4)
    raw = text.encode()
    if kind == 0:  # cut short
        return raw[: rng.randrange(len(raw))]
    if kind == 1:  # bytes changed
        damaged = bytearray(raw)
        for _ in range(rng.choice([1, 3, 30])):
            at = rng.randrange(len(damaged))
            damaged[at : at + rng.randrange(3)] = bytes(rng.randrange(256) for _ in range(rng.randrange(3)))
        return bytes(damaged)
    if kind == 2:  # lines moved, doubled or dropped
        lines = text.splitlines(keepends=True)
        for _ in range(rng.choice([1, 2, 10])):
            at, to = rng.randrange(len(lines)), rng.randrange(len(lines))
            lines[at : at + 1] = [lines[to]] * rng.randrange(3)
        return "".join(lines).encode()
    data = yaml.safe_load(text)
    path = rng.choice(list(fields(data)))
    evil = rng.choice(EVIL).replace("{here}", str(here))
    written = yaml.safe_dump(with_evil(data, path, "EVIL"), sort_keys=False, explicit_end=True)
    return written.replace("EVIL", evil, 1).encode()


@pytest.mark.parametrize("part", often(range(4), 0))
def test_hostile_files_make_errors_and_nothing_else(text, tmp_path, part):
    """Each is refused with an error of ours or is another schedule, in bounded time, and leaves nothing behind."""
    rng = random.Random(part)
    file, shelf = tmp_path / "in" / "s.yaml", Shelf(tmp_path / "shelf")
    file.parent.mkdir()
    shelf.folder.mkdir()
    messages = []
    for _ in range(FILES // 4):
        file.write_bytes(hostile(text, rng, tmp_path))
        began = time.process_time()
        try:
            schedule = read_schedule(file)
            schedule_problems(file)
            shelf.add(schedule)
        except MonetliteError as error:
            messages.append(str(error))
        assert time.process_time() - began < SLOWEST_SECONDS
    assert len(messages) > FILES // 4 * 0.6
    for message in messages:
        assert any(part in message for part in (str(file), "is no name for a file", "how to build")), message
        assert len(message) < 1000
    inside = {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*")}
    assert inside == {"in", "shelf"}
    assert {len(path.relative_to(shelf.folder).parts) for path in shelf.folder.rglob("*.yaml")} <= {1, 2}


def test_a_file_larger_than_memory_should_be_is_not_read(tmp_path):
    file = tmp_path / "huge.yaml"
    with file.open("wb") as sparse:
        sparse.truncate(2**40)
    began = time.process_time()
    with pytest.raises(MonetliteError, match="is larger than"):
        read_schedule(file)
    assert time.process_time() - began < SLOWEST_SECONDS


@pytest.mark.parametrize("line", ["a: [{}]\n", "a: {{{}}}\n"])
def test_millions_of_values_are_refused_before_they_are_built(tmp_path, line):
    file = tmp_path / "many.yaml"
    items = (f"n{number}" if "[" in line else f"n{number}: 1" for number in range(600_000))
    file.write_text("format: monetlite-schedule\n" + line.format(", ".join(items)) + "...\n")
    began = time.process_time()
    with pytest.raises(MonetliteError, match="more than 500000 values"):
        read_schedule(file)
    assert time.process_time() - began < 2 * SLOWEST_SECONDS


def test_checking_runs_no_code_of_a_file(text, tmp_path, monkeypatch):
    """A model's name that is a file beside it, in the folder that the person is in."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text("open('executed', 'w')\ndef build(): ...\n")
    for model in ("evil.py:build", "evil:build", "hf:evil.py", "evil.py", "timm:../evil", "hf:."):
        (tmp_path / "s.yaml").write_text(text.replace("model: resnet18", f"model: {model!r}"))
        assert not Checker().check(tmp_path / "s.yaml").passed
    assert not (tmp_path / "executed").exists()


def test_killed_while_writing_leaves_the_old_file_or_the_new(tmp_path):
    program = [sys.executable, Path(__file__).parent / "killed_writers.py", tmp_path / "s.yaml", "200"]
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    found = done.stdout.splitlines()
    assert len(found) == 200
    assert len(set(found)) == 2
