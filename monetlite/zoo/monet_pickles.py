"""Pickles of MONeT's solver, read as data: nothing in a file runs.

A pickle is a program. This reader runs the part that builds data: every class that the file names becomes an empty
stand-in, and whatever else it names is refused.
"""

import io
import math
import pickle
from collections.abc import Callable
from os import PathLike
from typing import Any, ClassVar

import numpy as np

from monetlite.core.errors import ScheduleFileError
from monetlite.core.files.plain_data import read_bounded, shown

MAX_FILE_BYTES = 256 * 2**20
MAX_CELLS = 2**22
"""Entries of lists in place of an array."""
_PACKAGES = ("monet", "models", "checkmate", "gist", "torch", "torchvision", "numpy", "__main__")
"""Packages whose classes a solution may name. None of them is imported."""
_REFUSED_OPCODES = (
    pickle.PERSID,
    pickle.BINPERSID,
    pickle.EXT1,
    pickle.EXT2,
    pickle.EXT4,
    pickle.BYTEARRAY8,
    pickle.NEXT_BUFFER,
    pickle.READONLY_BUFFER,
    pickle.FROZENSET,
)
"""Opcodes that look something up outside of the file, make room for as much as they say, or make sets of sets."""
_TUPLE_OPCODES = (pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3)


class StandIn:
    """An object of a class that was not looked up: what the file says of it, and nothing else."""

    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> "StandIn":
        made = super().__new__(cls)
        made.args, made.state = args, None
        return made

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
            state = (state[0] or {}) | state[1] if isinstance(state[0] or {}, dict) else state[1]
        self.state = state

    def __getitem__(self, name: str) -> Any:
        if not isinstance(self.state, dict) or name not in self.state:
            raise ScheduleFileError(f"{type(self).__name__} has no {name!r}, which a MONeT solution has")
        return self.state[name]

    def get(self, name: str, otherwise: Any = None) -> Any:
        """One attribute; a default where it is missing or None."""
        found = self.state.get(name) if isinstance(self.state, dict) else None
        return otherwise if found is None else found


def load_pickle(path: str | PathLike[str]) -> Any:
    """Read a pickle as data: stand-ins, dictionaries, lists, sets, texts, numbers.

    Raises:
        ScheduleFileError: the file can't be read, is too large, is damaged, or names anything but classes of MONeT
            and plain data.
    """
    raw = read_bounded(path, MAX_FILE_BYTES, "MONeT solution")
    try:
        return _Reader(raw).load()
    except ScheduleFileError as error:
        raise ScheduleFileError(f"{path}: {error}") from None
    except Exception as error:  # a damaged pickle fails in any way at all
        reason = f"{type(error).__name__}: {error}" if raw[:1] == pickle.PROTO else "it is not a pickle"
        raise ScheduleFileError(
            f"{path} is not a MONeT solution, or is cut short: those are pickles such as "
            f"solution_vgg16_176_inplace_conv_multiway_newnode_7.00.pkl ({reason:.200})"
        ) from error


def as_array(value: Any) -> np.ndarray[Any, np.dtype[Any]]:
    """Make an array of numbers from a pickled array, or from lists of numbers in its place.

    Raises:
        ScheduleFileError: it is neither, or its size is not what it says.
    """
    if isinstance(value, list):
        return _listed(value)
    state = value.state if isinstance(value, StandIn) else None
    if not isinstance(state, tuple) or len(state) != 5:
        raise ScheduleFileError(f"{shown(type(value).__name__)} stands where an array of numbers should")
    _, shape, dtype, by_columns, raw = state
    few = isinstance(shape, tuple) and len(shape) <= 4
    if not few or not all(isinstance(size, int) and 0 <= size < 2**31 for size in shape):
        raise ScheduleFileError(f"an array has the shape {shown(shape)}")
    if isinstance(raw, list) and len(raw) == math.prod(shape) and all(map(_is_number, raw)):
        return np.array([float(item) for item in raw]).reshape(shape, order="F" if by_columns else "C")
    return _numbers(dtype, raw, shape, "F" if by_columns else "C")


def as_number(value: Any, name: str) -> float:
    """Make a finite number from a plain one or from an array with one entry."""
    if isinstance(value, StandIn) and isinstance(value.state, tuple) and value.state[1:2] in (((),), ((1,),)):
        value = as_array(value).item()
    if not _is_number(value):
        raise ScheduleFileError(f"{name} is {shown(value)}, which is no number")
    return float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) < 2**62


def _listed(items: list[Any]) -> np.ndarray[Any, np.dtype[Any]]:
    """An array from lists in lists. All of one level are equally long."""
    shape: list[int] = []
    level: list[Any] = [items]
    while level and all(isinstance(item, list) for item in level):
        if any(len(item) != len(level[0]) for item in level):
            raise ScheduleFileError("lists of different lengths stand where an array of numbers should")
        shape.append(len(level[0]))
        if len(shape) > 3 or math.prod(shape) > MAX_CELLS:
            raise ScheduleFileError(f"lists of the shape {tuple(shape)} stand where an array of numbers should")
        level = [cell for item in level for cell in item]
    return np.array([as_number(cell, "an entry of a list") for cell in level]).reshape(shape)


def _numbers(dtype: Any, raw: Any, shape: tuple[int, ...], order: Any = "C") -> np.ndarray[Any, np.dtype[Any]]:
    code = dtype.args[0] if isinstance(dtype, StandIn) and dtype.args else None
    if isinstance(code, bytes):
        code = code.decode("latin1")
    if code not in ("f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "b1"):
        raise ScheduleFileError(f"an array is of {shown(code)}, which is no type of numbers")
    endian = dtype.state[1] if isinstance(dtype.state, tuple) and len(dtype.state) > 1 else "<"
    raw = raw.encode("latin1") if isinstance(raw, str) else raw
    if not isinstance(raw, bytes) or len(raw) != math.prod(shape) * np.dtype(code).itemsize:
        raise ScheduleFileError(f"an array of shape {shown(shape)} has not as many bytes")
    kind = np.dtype(code).newbyteorder(">" if endian in (">", b">") else "<")
    return np.frombuffer(raw, dtype=kind).reshape(shape, order=order)


class _Items(dict[Any, Any]):
    """A dictionary whose default does not matter here."""

    def __init__(self, *_: Any) -> None:
        super().__init__()


class _Unhashable(tuple[Any, ...]):
    """A tuple that is no key and no member of a set. Tuples in tuples, each there often, take forever to hash."""

    __hash__ = None  # type: ignore[assignment]  # how Python says that a class has none


def _build(reader: Any) -> None:
    """Give an object its state: only a stand-in or a dictionary has one."""
    if not isinstance(reader.stack[-2], (StandIn, _Items)):
        raise ScheduleFileError(f"gives attributes to {shown(reader.stack[-2])}; nothing was run")
    reader.load_build()


def _with_unhashable(run: Callable[[Any], None]) -> Callable[[Any], None]:
    def load(reader: Any) -> None:
        run(reader)
        reader.stack[-1] = _Unhashable(reader.stack[-1])

    return load


class _Reader(pickle._Unpickler):
    """Builds data. Every name in the file stands for one of a few builders, or for a stand-in."""

    dispatch: ClassVar[dict[int, Any]] = {
        code: _with_unhashable(run) if bytes([code]) in _TUPLE_OPCODES else run
        for code, run in pickle._Unpickler.dispatch.items()
        if bytes([code]) not in _REFUSED_OPCODES
    } | {pickle.BUILD[0]: _build}

    def __init__(self, raw: bytes) -> None:
        super().__init__(io.BytesIO(raw), encoding="latin1")
        self._classes: dict[tuple[str, str], Any] = {}
        array = type("ndarray", (StandIn,), {})
        self._builders: dict[tuple[str, str], Any] = {
            ("collections", "defaultdict"): type("defaultdict", (_Items,), {}),
            ("collections", "OrderedDict"): type("OrderedDict", (_Items,), {}),
            ("torch", "Size"): lambda items=(): _Unhashable(items),
            ("_codecs", "encode"): lambda text, _="latin1": text.encode("latin1"),
            ("copyreg", "_reconstructor"): self._reconstructed,
            ("numpy", "ndarray"): array,
        }
        for module in ("builtins", "__builtin__"):
            self._builders |= {
                (module, "set"): lambda items=(): list(items),
                (module, "frozenset"): lambda items=(): list(items),
                (module, "list"): lambda *_: [],
                (module, "dict"): lambda *_: {},
                (module, "int"): lambda *_: 0,
                (module, "object"): type("object", (StandIn,), {}),
                (module, "getattr"): self._nested,
            }
        for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            self._builders |= {
                (module, "_reconstruct"): lambda *_: array(),
                (module, "scalar"): lambda dtype, raw: _numbers(dtype, raw, (1,)).item(),
            }

    def find_class(self, module: str, name: str) -> Any:
        """A builder or a stand-in for a name in the file: plain data, or a class of MONeT's."""
        if module == "copy_reg":
            module = "copyreg"
        if (module, name) in self._builders:
            return self._builders[module, name]
        if module.partition(".")[0] not in _PACKAGES or not _is_class_name(name):
            raise ScheduleFileError(f"names {module:.60}.{name:.60}, which no MONeT solution does; nothing was run")
        return self._stand_in(module, name)

    def _stand_in(self, module: str, name: str) -> Any:
        if (module, name) not in self._classes:
            self._classes[module, name] = type(name, (StandIn,), {"__module__": module})
        return self._classes[module, name]

    def _nested(self, outer: Any = None, name: Any = None, *rest: Any) -> Any:
        """A class inside of a class, which protocols before 4 reach by `getattr`."""
        inert = isinstance(outer, type) and issubclass(outer, StandIn)
        if not inert or rest or not isinstance(name, str) or "." in name or not _is_class_name(name):
            raise ScheduleFileError(
                f"names builtins.getattr of {shown(type(outer).__name__)} and {shown(name)}, which is no nested "
                "class of MONeT's; nothing was run"
            )
        return self._stand_in(outer.__module__, f"{outer.__name__}.{name}")

    def _reconstructed(self, kind: Any, *_: Any) -> Any:
        """An object made without its class's `__init__`, as protocols before 2 do."""
        if not isinstance(kind, type) or not issubclass(kind, (StandIn, _Items)):
            raise ScheduleFileError(f"names copyreg._reconstructor of {shown(kind)}; nothing was run")
        return kind()


def _is_class_name(name: str) -> bool:
    """A name of Python's, or several with dots: none that is special to Python."""
    return len(name) < 200 and all(
        part.isidentifier() and not (part.startswith("__") and part.endswith("__")) for part in name.split(".")
    )
