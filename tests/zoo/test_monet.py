"""MONeT's pickles: read as data, compared, and whatever else a pickle can do is refused."""

import json
import os
import pickle
import pickletools
import random
import sys

import commands
import numpy as np
import pytest
from monet_files import FORWARD, monet_classes, solution

from monetlite.core.errors import ScheduleFileError
from monetlite.zoo.monet import read_monet


@pytest.fixture
def classes(monkeypatch):
    return monet_classes(monkeypatch)


def read(raw, tmp_path):
    (tmp_path / "s.pkl").write_bytes(raw)
    return read_monet(tmp_path / "s.pkl")


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4])
def test_a_solution_is_read_as_data(classes, tmp_path, protocol, monkeypatch):
    raw = solution(classes, protocol)
    for name in [name for name in sys.modules if name.startswith("monet.")]:
        monkeypatch.delitem(sys.modules, name)
    found = read(raw, tmp_path)
    assert (found.model, found.batch, found.operators) == ("resnet50", 184, FORWARD)
    assert found.stored == (0, 4)
    assert found.runs_again == (0, 2, 1, 0, 0)
    assert found.latency_ms == pytest.approx(961.05)
    assert found.solve_seconds == 86400.5


class Evil:
    def __init__(self, run, *args):
        self.run, self.args = run, args

    def __reduce__(self):
        return self.run, self.args


@pytest.mark.parametrize("run", [os.system, eval, exec, print, os.remove, __import__, getattr, open, bytearray])
def test_nothing_in_a_file_is_run(classes, tmp_path, run, capfd):
    target = tmp_path / "executed"
    for raw in (pickle.dumps(Evil(run, f"touch {target}")), solution(classes, r=Evil(run, f"touch {target}"))):
        with pytest.raises(ScheduleFileError, match=r"names .*nothing was run"):
            read(raw, tmp_path)
    assert not target.exists()
    assert capfd.readouterr().out == ""


HOSTILE = {
    "not a pickle": b"hello",
    "empty": b"",
    "another object": pickle.dumps([1, 2]),
    "a huge bytearray": b"\x80\x05\x96" + (2**40).to_bytes(8, "little") + b".",
    "a huge memo index": b"\x80\x04Nr\xff\xff\xff\xff.",
    "a huge string": b"\x80\x04\x8e" + (2**50).to_bytes(8, "little") + b"abc.",
    "a persistent object": b"Pabc\n.",
    "an extension": b"\x82\x01.",
    "attributes of a stand-in": b"\x80\x04cbuiltins\nset\n}(X\x08\x00\x00\x00__code__Nu\x86b.",
    "nested without end": b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b".",
    "objects without a state": (
        b"\x80\x04]cmonet.solver_info\nSolverInfo\n)\x81acmonet.cvxpy_solver\nSolution\n)\x81a."
    ),
    "a name with dots": b"\x80\x04\x8c\x05monet\x8c\x0eos.system.evil\x93.",
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_file_is_refused(tmp_path, what):
    with pytest.raises(ScheduleFileError, match=r"s\.pkl"):
        read(HOSTILE[what], tmp_path)


def laughs():
    """Little to write down, more than any memory to spell out."""
    made = []
    for _ in range(60):
        made = [made] * 10
    return made


@pytest.mark.parametrize("opens", [b"}h\x00Ns.", b"\x8f(h\x00\x90."])
def test_nothing_takes_forever_to_hash(tmp_path, opens):
    """Sixty tuples, each twice in the next, as a key of a dictionary and as a member of a set."""
    tuples = b")" + b"q\x00h\x00\x86" * 60 + b"q\x00"
    with pytest.raises(ScheduleFileError, match="unhashable"):
        read(b"\x80\x04" + tuples + opens, tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": 0}, "as its loss"),
        ({"loss": 10**9}, "as its loss"),
        ({"nodes": []}, "as its loss"),
        ({"loss": laughs()}, "as its loss"),
        ({"model_name": laughs()}, "model_name is"),
        ({"r": laughs()}, "where an array"),
        ({"r": np.zeros((3, 3))}, "have the shapes"),
        ({"r": "text"}, "where an array"),
        ({"r": np.array([object()])}, "no type of numbers"),
        ({"bs": "many"}, "bs is 'many'"),
        ({"runtime_expected": float("nan")}, "runtime_expected is nan"),
        ({"solve_time": None}, "solve_time is None"),
    ],
)
def test_what_is_no_solution_says_why(classes, tmp_path, changes, message):
    with pytest.raises(ScheduleFileError, match=message):
        read(solution(classes, **changes), tmp_path)


def test_damage_makes_errors_of_ours(classes, tmp_path):
    """Cut short, or with bytes changed: an error, or a solution with other figures."""
    rng, raw, refused = random.Random(0), solution(classes), 0
    for _ in range(300):
        damaged = bytearray(raw)
        for _ in range(rng.choice([1, 2, 10])):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        if rng.random() < 0.3:
            del damaged[rng.randrange(len(damaged)) :]
        try:
            read(bytes(damaged), tmp_path)
        except ScheduleFileError:
            refused += 1
    assert refused > 150


def test_side_by_side(classes, tmp_path):
    (tmp_path / "monet.pkl").write_bytes(solution(classes))
    arguments = ["zoo", "import", str(tmp_path / "monet.pkl")]
    shown = commands.run(*arguments, "--with", "zoo:p100/resnet50@6GB")
    assert shown.exit_code == 0, shown.output
    assert "961 ms" in shown.output
    assert "resnet50" in shown.output
    assert "batch_norm" in shown.output
    assert max(map(len, shown.output.splitlines())) <= 80
    facts = json.loads(commands.run(*arguments, "--json").output)
    assert facts["monet"]["stored"] == [0, 4]
    assert facts["monet"]["latency_ms"] == pytest.approx(961.05)
    failed = commands.run("zoo", "import", str(tmp_path / "missing.pkl"))
    assert failed.exit_code == 4


def test_what_is_allowed_covers_what_pickles_of_arrays_name():
    """numpy's own spelling of its names, in this version."""
    array = pickle.dumps(np.zeros(3), protocol=2)
    names = {argument for opcode, argument, _ in pickletools.genops(array) if opcode.name == "GLOBAL"}
    assert names <= {"numpy._core.multiarray _reconstruct", "numpy ndarray", "numpy dtype", "_codecs encode"}
