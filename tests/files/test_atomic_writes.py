"""A write that fails leaves the file as it was and nothing beside it."""

import errno
import os
import stat
from pathlib import Path

import pytest
from schedule_files import full_schedule

import monetlite
from monetlite.core.errors import ScheduleFileError
from monetlite.core.files.atomic import write_atomically


def failing(number):
    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    return fail


@pytest.fixture
def old(tmp_path):
    path = tmp_path / "s.yaml"
    path.write_text("what was there")
    return path


def assert_untouched(path):
    assert path.read_text() == "what was there"
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("broken", ["replace", "fsync", "chmod"])
def test_a_failing_system_call(broken, old, monkeypatch):
    monkeypatch.setattr(os, broken, failing(errno.EIO))
    with pytest.raises(ScheduleFileError, match=r"can't be written: .*unchanged"):
        full_schedule().save(old)
    assert_untouched(old)


class _FullDisk:
    """A file that takes a few characters and then no more."""

    def __init__(self, file):
        self.file = file

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.close()

    def write(self, text):
        self.file.write(text[: len(text) // 2])
        self.file.flush()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def __getattr__(self, name):
        return getattr(self.file, name)


def test_a_full_disk(old, monkeypatch):
    original = os.fdopen
    monkeypatch.setattr(os, "fdopen", lambda *a, **k: _FullDisk(original(*a, **k)))
    with pytest.raises(ScheduleFileError, match="No space left on device"):
        full_schedule().save(old)
    assert_untouched(old)


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, MemoryError])
def test_an_interrupted_write(interruption, old, monkeypatch):
    def interrupted(_):
        raise interruption

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(interruption):
        full_schedule().save(old)
    assert_untouched(old)


def test_a_missing_folder(tmp_path):
    with pytest.raises(ScheduleFileError, match="can't be written: No such file or directory"):
        full_schedule().save(tmp_path / "absent" / "s.yaml")
    assert os.listdir(tmp_path) == []


def test_a_folder_in_the_place_of_the_file(tmp_path):
    (tmp_path / "s.yaml").mkdir()
    with pytest.raises(ScheduleFileError, match="can't be written"):
        full_schedule().save(tmp_path / "s.yaml")
    assert os.listdir(tmp_path) == ["s.yaml"]


@pytest.mark.parametrize("path", ["a\0b.yaml", "x" * 300 + ".yaml", ""])
def test_names_that_no_file_can_have(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ScheduleFileError, match="can't be written"):
        full_schedule().save(path)
    assert os.listdir(tmp_path) == []


def test_a_device_is_not_replaced_by_a_file(tmp_path):
    """Root may replace anything, /dev/null included."""
    fifo = tmp_path / "pipe"
    os.mkfifo(fifo)
    with pytest.raises(ScheduleFileError, match="not a regular file"):
        write_atomically(fifo, "text")
    assert stat.S_ISFIFO(fifo.stat().st_mode)
    assert os.listdir(tmp_path) == ["pipe"]


def test_a_link_stays_a_link_to_the_new_contents(tmp_path):
    (tmp_path / "real").mkdir()
    target, link = tmp_path / "real" / "s.yaml", tmp_path / "link.yaml"
    target.write_text("old")
    link.symlink_to(target)
    write_atomically(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert sorted(os.listdir(tmp_path)) == ["link.yaml", "real"]


def test_permissions(tmp_path):
    new, old = tmp_path / "new", tmp_path / "old"
    old.write_text("")
    old.chmod(0o640)
    mask = os.umask(0o027)
    try:
        for path in (new, old):
            write_atomically(path, "text")
    finally:
        os.umask(mask)
    assert stat.S_IMODE(new.stat().st_mode) == 0o640
    assert stat.S_IMODE(old.stat().st_mode) == 0o640
    old.chmod(0o600)
    write_atomically(old, "more")
    assert stat.S_IMODE(old.stat().st_mode) == 0o600


def test_what_is_written_is_complete(old):
    schedule = full_schedule()
    schedule.save(old)
    assert monetlite.load_schedule(old) == schedule
    assert os.listdir(old.parent) == [old.name]
    assert Path(old).read_text().endswith("\n")
