"""MONeT's published schedules, read without running anything in them, to stand beside ours.

They are pickles of two objects (`SolverInfo`, `Solution`) of MONeT's own classes, written by its solver in 2020. A
pickle is a program: this reader runs the part that builds data, and every class that it names becomes an empty one.

What the fields mean (Shah et al., ICLR 2021, section 4, as its solver writes them): stages t = 0 … T − 1, where
stage 0 is the forward pass and each later one prepares a backward operator; `r[t, v]` runs forward operator v in
stage t, `s[t, v]` keeps its result until stage t; `runtime_expected` is the objective in units of 0.01 ms.
"""

import io
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from monetlite.core.errors import ScheduleFileError
from monetlite.core.files.plain_data import shown

LARGEST_FILE_BYTES = 256 * 2**20
_MS_PER_UNIT = 0.01
_THEIRS = ("monet", "models", "checkmate", "gist", "__main__")
"""Packages whose classes a solution may name."""
_REFUSED_OPCODES = (
    pickle.PERSID,
    pickle.BINPERSID,
    pickle.EXT1,
    pickle.EXT2,
    pickle.EXT4,
    pickle.BYTEARRAY8,
    pickle.NEXT_BUFFER,
    pickle.READONLY_BUFFER,
)
"""What would look something up outside of the file, or make room for as much as it says."""
_TUPLES = (pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3)


@dataclass(frozen=True, kw_only=True)
class MonetSolution:
    """What a published schedule chose.

    Attributes:
        model, mode: MONeT's names of the model, and of the kinds of implementations that its solver could choose.
        batch: samples of a step.
        operators: forward operators by name, in order, packed intermediates included.
        stored: which of them are kept after the forward pass, by index.
        runs_again: how often each runs again in the backward pass.
        latency_ms: the objective that its solver reached, on the authors' P100. solve_seconds: how long it took.
    """

    model: str
    mode: str
    batch: int
    operators: tuple[str, ...]
    stored: tuple[int, ...]
    runs_again: tuple[int, ...]
    latency_ms: float
    solve_seconds: float


def read_monet(path: str | PathLike[str]) -> MonetSolution:
    """Read one of MONeT's solution files. Nothing in it is executed.

    Raises:
        ScheduleFileError: it can't be read, is too large, names anything but MONeT's classes and plain data, or is
            no solution; says what and where.
    """
    try:
        with Path(path).open("rb") as file:
            raw = file.read(LARGEST_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ScheduleFileError(f"{path} can't be read: {getattr(error, 'strerror', None) or error}") from error
    if len(raw) > LARGEST_FILE_BYTES:
        raise ScheduleFileError(f"{path} is larger than {LARGEST_FILE_BYTES} bytes, which no MONeT solution is")
    try:
        loaded = _Reader(raw).load()
    except ScheduleFileError as error:
        raise ScheduleFileError(f"{path}: {error}") from None
    except Exception as error:  # a damaged pickle fails in any way at all
        reason = f"{type(error).__name__}: {error}"
        raise ScheduleFileError(f"{path} is not a complete pickle: {reason:.200}") from error
    try:
        return _solution(loaded)
    except ScheduleFileError as error:
        raise ScheduleFileError(f"{path}: {error}") from None
    except Exception as error:  # whatever else stands where a solution has something
        reason = f"{type(error).__name__}: {error}"
        raise ScheduleFileError(f"{path} is not a MONeT solution: {reason:.200}") from error


class _Inert:
    """An object of a class that was not looked up: what the file says of it, and nothing else."""

    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> "_Inert":
        made = super().__new__(cls)
        made.args, made.state = args, None
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __getitem__(self, name: str) -> Any:
        state = self.state
        if not isinstance(state, dict) or name not in state:
            raise ScheduleFileError(f"{type(self).__name__} has no {name!r}, which a MONeT solution has")
        return state[name]


class _Items(dict[Any, Any]):
    """A dictionary whose default doesn't matter here."""

    def __init__(self, *_: Any) -> None:
        super().__init__()


class _Tuple(tuple[Any, ...]):
    """No key and no member of a set: tuples of tuples, each there many times, would take forever to hash."""

    __hash__ = None  # type: ignore[assignment]  # how Python says that a class has none


def _as_tuple(run: Callable[[Any], None]) -> Callable[[Any], None]:
    def load(reader: Any) -> None:
        run(reader)
        reader.stack[-1] = _Tuple(reader.stack[-1])

    return load


class _Reader(pickle._Unpickler):
    """Builds data; every name in the file stands for one of a few stand-ins, made anew for each file."""

    dispatch: ClassVar[dict[int, Any]] = {
        code: _as_tuple(run) if bytes([code]) in _TUPLES else run
        for code, run in pickle._Unpickler.dispatch.items()
        if bytes([code]) not in _REFUSED_OPCODES
    }

    def __init__(self, raw: bytes) -> None:
        super().__init__(io.BytesIO(raw), encoding="latin1")
        self._classes: dict[tuple[str, str], Any] = {}
        array = type("ndarray", (_Inert,), {})
        self._plain: dict[tuple[str, str], Any] = {
            ("collections", "defaultdict"): type("defaultdict", (_Items,), {}),
            ("collections", "OrderedDict"): type("OrderedDict", (_Items,), {}),
            ("torch", "Size"): lambda items=(): tuple(items),
            ("_codecs", "encode"): lambda text, _="latin1": text.encode("latin1"),
            ("copyreg", "_reconstructor"): lambda cls, *_: cls(),
            ("numpy", "ndarray"): array,
            ("numpy", "dtype"): type("dtype", (_Inert,), {}),
        }
        for module in ("builtins", "__builtin__"):
            self._plain |= {
                (module, "set"): lambda items=(): frozenset(items),
                (module, "frozenset"): lambda items=(): frozenset(items),
                (module, "list"): lambda *_: [],
                (module, "int"): lambda *_: 0,
                (module, "object"): type("object", (_Inert,), {}),
            }
        for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            self._plain |= {
                (module, "_reconstruct"): lambda *_: array(),
                (module, "scalar"): lambda dtype, raw: _numbers(dtype, raw, (1,)).item(),
            }

    def find_class(self, module: str, name: str) -> Any:
        """A stand-in for what the file names.

        Raises:
            ScheduleFileError: it is neither plain data nor a class of MONeT's.
        """
        if module == "copy_reg":
            module = "copyreg"
        if (module, name) in self._plain:
            return self._plain[module, name]
        if module.partition(".")[0] not in _THEIRS or not name.isidentifier():
            raise ScheduleFileError(f"names {module:.60}.{name:.60}, which no MONeT solution does; nothing was run")
        if (module, name) not in self._classes:
            self._classes[module, name] = type(name, (_Inert,), {})
        return self._classes[module, name]


def _array(value: Any) -> np.ndarray[Any, np.dtype[Any]]:
    """A numpy array from what its pickle says of it."""
    state = value.state if isinstance(value, _Inert) else None
    if not isinstance(state, tuple) or len(state) != 5:
        raise ScheduleFileError(f"{shown(type(value).__name__)} stands where an array of numbers should")
    _, shape, dtype, by_columns, raw = state
    if not isinstance(shape, tuple) or not all(isinstance(size, int) and 0 <= size < 2**31 for size in shape):
        raise ScheduleFileError(f"an array has the shape {shown(shape)}")
    return _numbers(dtype, raw, shape, "F" if by_columns else "C")


def _numbers(dtype: Any, raw: Any, shape: tuple[int, ...], order: Any = "C") -> np.ndarray[Any, np.dtype[Any]]:
    code = dtype.args[0] if isinstance(dtype, _Inert) and dtype.args else None
    if code not in ("f8", "f4", "i8", "i4", "b1", "u1"):
        raise ScheduleFileError(f"an array is of {shown(code)}, which is no type of numbers")
    raw = raw.encode("latin1") if isinstance(raw, str) else raw
    if not isinstance(raw, bytes) or len(raw) != math.prod(shape) * np.dtype(code).itemsize:
        raise ScheduleFileError(f"an array of shape {shown(shape)} has not as many bytes")
    return np.frombuffer(raw, dtype=np.dtype(code).newbyteorder("<")).reshape(shape, order=order)


def _solution(loaded: Any) -> MonetSolution:
    kinds = [type(item).__name__ for item in loaded] if isinstance(loaded, (list, tuple)) else []
    if kinds != ["SolverInfo", "Solution"]:
        raise ScheduleFileError("is not a MONeT solution, which is a pair of SolverInfo and Solution")
    info, solution = loaded
    nodes, loss = info["nodes"], info["loss"]
    if not isinstance(nodes, dict) or not isinstance(loss, int) or not 0 < loss < len(nodes) or loss > 10**6:
        raise ScheduleFileError(f"SolverInfo has {shown(loss)} as its loss, which is none of its nodes")
    runs, kept = _array(solution["r"]), _array(solution["s"])
    stages = len(nodes) - loss
    if runs.shape != (stages, loss + 1) or kept.shape != (stages + 1, loss + 1):
        raise ScheduleFileError(
            f"r and s have the shapes {runs.shape} and {kept.shape}; for {loss} forward operators and {stages} "
            f"stages they should be {(stages, loss + 1)} and {(stages + 1, loss + 1)}"
        )
    names = [_text(nodes.get(index), "op") for index in range(loss)]
    return MonetSolution(
        model=_text(info, "model_name"),
        mode=_text(info, "mode"),
        batch=_number(info["bs"], "bs", int),
        operators=tuple(names),
        stored=tuple(int(index) for index in np.flatnonzero(kept[1, :loss] > 0.5)),
        runs_again=tuple(int(count) for count in np.rint((runs[1:, :loss] > 0.5).sum(axis=0))),
        latency_ms=_number(solution["runtime_expected"], "runtime_expected", float) * _MS_PER_UNIT,
        solve_seconds=_number(solution["solve_time"], "solve_time", float),
    )


def _text(node: Any, name: str) -> str:
    value = node[name] if isinstance(node, _Inert) else None
    if not isinstance(value, str):
        raise ScheduleFileError(f"{name} is {shown(value)}, which is no name")
    return value[:80]


def _number(value: Any, name: str, kind: Callable[[Any], Any]) -> Any:
    if isinstance(value, _Inert):
        value = _array(value).item() if isinstance(value.state, tuple) else None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 2**62:
        raise ScheduleFileError(f"{name} is {shown(value)}, which is no number")
    return kind(value)


__all__ = ["MonetSolution", "read_monet"]
