"""MONeT's pickles: read as data, compared, and whatever else a pickle can do is refused."""

import json
import lzma
import os
import pickle
import pickletools
import random
import sys
from pathlib import Path

import commands
import numpy as np
import pytest
from monet_files import FORWARD, checkmate_solution, monet_classes, solution

from monetlite.core.errors import ScheduleFileError
from monetlite.core.simulate import simulate
from monetlite.zoo.monet_pickles import as_array, load_pickle
from monetlite.zoo.monet_solutions import read_monet

SAMPLES = Path(__file__).parent / "monet_samples"
"""Two of the files that MONeT's authors publish, compressed; their licence lies beside them."""


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
    assert found.stored == (0, 2)
    assert found.runs_again == (0, 2, 1, 1, 0)
    assert found.latency_ms == pytest.approx(961.05)
    assert found.solve_seconds == 86400.5


def sample(name, tmp_path):
    (packed,) = SAMPLES.glob(f"solution_{name}*.pkl.xz")
    path = tmp_path / packed.name.removesuffix(".xz")
    path.write_bytes(lzma.decompress(packed.read_bytes()))
    return path


@pytest.mark.parametrize(
    ("name", "model", "batch", "budget_gib", "objective"),
    [("un_11", "unet", 11, 6.0, 121_617), ("vgg16_176", "vgg16", 176, 7.0, 143_866)],
)
def test_published_files_replay_to_their_objectives(tmp_path, name, model, batch, budget_gib, objective):
    found = read_monet(sample(name, tmp_path))
    assert (found.model, found.batch, found.budget_gib) == (model, batch, budget_gib)
    assert (found.mode, found.method) == ("inplace_conv_multiway_newnode", "MONeT")
    assert found.objective == objective
    assert found.replay.objective == objective, "under the rules of simulate"
    assert found.replay.peak_bytes <= budget_gib * 2**30
    assert simulate(found.profile, found.steps).peak_bytes == found.replay.peak_bytes
    assert found.replay.overhead == pytest.approx(objective * 0.01 / found.replay.fastest_ms - 1)


def test_a_published_file_beside_ours(tmp_path):
    arguments = ["zoo", "import", str(sample("un_11", tmp_path))]
    shown = commands.run(*arguments)
    assert shown.exit_code == 0, shown.output
    for text in ("budget 6 GiB", "121617", "replayed", "monetlite zoo", "p100/unet_11x416x608"):
        assert text in " ".join(shown.output.split())
    assert max(map(len, shown.output.splitlines())) <= 80
    facts = json.loads(commands.run(*arguments, "--json", "--time-limit", "1").stdout)
    assert facts["monet"]["replay"]["objective"] == facts["monet"]["objective"] == 121_617
    assert facts["ours"]["peak_bytes"] <= 6 * 2**30
    assert facts["ours"]["model"] == "unet"
    assert facts["same_costs"]["peak_bytes"] <= 6 * 2**30
    assert facts["same_costs"]["latency_ms"] >= facts["monet"]["replay"]["fastest_ms"]


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4])
def test_a_solution_is_replayed(classes, tmp_path, protocol):
    """In ceilings of 0.01 ms: algorithms, options and what overwrites are those that are marked."""
    found = read(solution(classes, protocol), tmp_path)
    names = [
        (operator.name.partition(":")[0], operator.implementations[choice].name)
        for operator, choice in ((found.profile.graph.operators[index], choice) for index, choice in found.steps)
    ]
    assert names == [
        ("0", "algorithm1"),
        ("1", "default"),
        ("2", "inplace"),
        ("4", "default"),
        ("5", "default"),
        ("6", "option0"),
        ("7", "option0"),
        ("1", "default"),
        ("2", "default"),
        ("3", "default"),
        ("8", "option2"),
        ("1", "default"),
        ("9", "algorithm1"),
    ]
    assert found.replay.objective == 704


def as_objects(array):
    return np.array(array.tolist(), dtype=object)


@pytest.mark.parametrize("form", [np.asfortranarray, as_objects, lambda array: array.tolist(), lambda a: a > 0.5])
@pytest.mark.parametrize("form_of_r", [np.float32, np.int8, np.dtype(">f8")])
def test_other_forms_of_arrays(classes, tmp_path, form, form_of_r):
    """Objects, lists, booleans, other sizes and orders of bytes."""
    plain = pickle.loads(solution(classes))[1]
    changes = {name: form(getattr(plain, name)) for name in ("s", "m", "rf", "ip")}
    found = read(solution(classes, **changes, r=plain.r.astype(form_of_r)), tmp_path)
    assert (found.replay.objective, found.stored) == (704, (0, 2))


def test_what_a_solution_may_lack(classes, tmp_path):
    found = read(solution(classes, solve_time=-1, runtime_expected=-1, without=("s",)), tmp_path)
    assert (found.solve_seconds, found.objective, found.latency_ms) == (None, None, None)
    assert found.replay.objective == 704, "Gurobi's files hold no objective"
    found = read(solution(classes, solve_time=None, without=("rf", "m", "ip", "conv_list", "data_path")), tmp_path)
    assert found.mode == "conv_multiway_newnode"
    assert found.replay.objective == 904, "with first options"
    once = np.zeros((5, 6))
    once[0, [0, 1, 2, 4, 5]] = 1
    found = read(solution(classes, r=once), tmp_path)
    assert found.replay is None
    assert "not in memory" in found.replay_problem
    named = tmp_path / "solution_net_7_newnode_5.50_ablation.pkl"
    named.write_bytes(solution(classes, without=("bs", "model_name", "mode", "data_path")))
    found = read_monet(named)
    assert (found.model, found.batch, found.mode, found.budget_gib) == ("net", 7, "newnode", 5.5)
    with pytest.raises(ScheduleFileError, match="holds no schedule"):
        read(solution(classes, r=None), tmp_path)
    shown = commands.run("zoo", "import", str(named))
    assert shown.exit_code == 0, shown.output


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_solution_of_checkmates(classes, tmp_path, protocol):
    found = read(checkmate_solution(classes, protocol), tmp_path)
    assert (found.method, found.mode, found.stored) == ("Checkmate", "normal", (0, 1, 2, 3))
    assert found.runs_again == (0, 0, 0, 0)
    assert found.replay.objective == 810, "rounded, not ceilings"


def nested_class(outer, name):
    """`builtins.getattr(outer, name)`, as protocol 2 writes a nested class."""
    return b"\x80\x02cbuiltins\ngetattr\n" + outer + pickle.dumps(name, 0)[:-1].rpartition(b"p0\n")[0] + b"\x86R."


@pytest.mark.parametrize(
    "outer", [b"cbuiltins\nset\n", b"cbuiltins\ngetattr\n", b"c_codecs\nencode\n", b"]", b"N", b"K\x01", b"}"]
)
def test_getattr_of_anything_but_a_class_of_theirs(tmp_path, outer):
    with pytest.raises(ScheduleFileError, match=r"names builtins\.getattr .*nothing was run"):
        read(nested_class(outer, "D"), tmp_path)


@pytest.mark.parametrize("name", ["__class__", "__init__", "a.b", "no name", "", "D" * 1000])
def test_getattr_of_what_is_no_nested_class(tmp_path, name):
    with pytest.raises(ScheduleFileError, match=r"names builtins\.getattr .*nothing was run"):
        read(nested_class(b"cmonet.graph\nComputeNode\n", name), tmp_path)


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
    "a special name": b"\x80\x04\x8c\x05monet\x8c\x09__class__\x93.",
    "attributes of a class": b"\x80\x04cmonet.graph\nParam\n}X\x08\x00\x00\x00__call__Nsb.",
    "a set of sets": b"\x80\x04(K\x01\x91.",
    "something rebuilt": b"\x80\x02ccopyreg\n_reconstructor\n(cbuiltins\nset\ncbuiltins\nobject\nNtR.",
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
        ({"solve_time": "long"}, "solve_time is 'long'"),
        ({"r": [[0.0, 1.0], [2.0]]}, "lists of different lengths"),
    ],
)
def test_what_is_no_solution_says_why(classes, tmp_path, changes, message):
    with pytest.raises(ScheduleFileError, match=message):
        read(solution(classes, **changes), tmp_path)


def test_aliases_take_no_time(classes, tmp_path):
    """One list that every node reads and prices again and again."""
    nodes, long = pickle.loads(solution(classes))[0].nodes, [0] * 200_000
    for node in nodes.values():
        node.args, node.workspace_compute, node.workspace_mem = [long] * 50_000, long, long
    found = read(solution(classes, nodes=nodes), tmp_path)
    assert found.replay is None
    assert "which are no nodes" in found.replay_problem


def test_an_array_of_a_million_dimensions(tmp_path):
    class Array:
        def __reduce__(self):
            return (
                np._core.multiarray._reconstruct,
                (np.ndarray, (0,), b"b"),
                (1, (2**30,) * 10**6, None, False, b""),
            )

    (tmp_path / "a.pkl").write_bytes(pickle.dumps(Array()))
    with pytest.raises(ScheduleFileError, match="has the shape"):
        as_array(load_pickle(tmp_path / "a.pkl"))


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
    facts = json.loads(commands.run(*arguments, "--json").stdout)
    assert facts["monet"]["stored"] == [0, 2]
    assert facts["monet"]["latency_ms"] == pytest.approx(961.05)
    failed = commands.run("zoo", "import", str(tmp_path / "missing.pkl"))
    assert failed.exit_code == 4


def test_a_models_name_is_printed_as_it_is(classes, tmp_path):
    (tmp_path / "monet.pkl").write_bytes(solution(classes, model_name="[old]net[/x]"))
    shown = commands.run("zoo", "import", tmp_path / "monet.pkl")
    assert shown.exit_code == 0, shown.output
    assert "[old]net[/x]" in shown.output


def test_what_is_allowed_covers_what_pickles_of_arrays_name():
    """numpy's own spelling of its names, in this version."""
    array = pickle.dumps(np.zeros(3), protocol=2)
    names = {argument for opcode, argument, _ in pickletools.genops(array) if opcode.name == "GLOBAL"}
    assert names <= {"numpy._core.multiarray _reconstruct", "numpy ndarray", "numpy dtype", "_codecs encode"}
