"""`path/to/file.py:build` and `package.module:build`: a person's own model.

The function is called with those of `batch` (an int), `input_size` (height, width) and `sequence_length` (an
int) that its signature takes and the person gave. It returns a module, or a module and its example inputs.
Their code runs with their rights, as a script of theirs would.
"""

import ast
import contextlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
import zlib
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from monetlite.core.errors import ModelError
from monetlite.core.spelling import close_matches
from monetlite.models.built_model import DEFAULT_BATCH, BuildOptions, BuiltModel, finish


def build(spec: str, options: BuildOptions) -> BuiltModel:
    """Import the file or module, call the function and check what it returns.

    Raises:
        ModelError: no such file, module or attribute; their code raised; it returned something else than a
            module or (module, example inputs); or an option that the function does not take.
    """
    import torch

    place, _, attribute = spec.rpartition(":")
    is_file = place.endswith(".py")
    folder = Path(place).expanduser().resolve().parent if is_file else Path.cwd()
    # What it prints is not the command's output.
    with _importable(folder), contextlib.redirect_stdout(sys.stderr):
        module = _load_file(place) if is_file else _load_module(spec, place)
        function = _function(spec, module, attribute)
        if isinstance(function, torch.nn.Module):
            raise ModelError(
                f"{spec}: {attribute} is a module ({type(function).__name__}); name a function that returns it"
            )
        arguments = _arguments(spec, function, options)
        try:
            with options.device():
                result = function(**arguments)
        except (Exception, SystemExit) as error:
            raise ModelError(f"{spec} failed: {_last_line(error, module)}; fix it and try again") from error
    wanted = "return a torch.nn.Module, or a tuple (module, example_inputs)"
    if isinstance(result, torch.nn.Module):
        model, inputs = result, None
    elif isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], torch.nn.Module):
        model, inputs = result
    else:
        raise ModelError(f"{spec} returned {_describe(result)}; {wanted}")
    if inputs is None:
        if options.input_size is None:
            raise ModelError(
                f"{spec} returned a module without example inputs; return (module, example_inputs), or give "
                "an input size for a model that takes images (N, 3, H, W)"
            )
        inputs = (options.image(spec, 3, DEFAULT_BATCH, options.input_size),)
    else:
        inputs = _checked_inputs(spec, inputs)
        for name, value in (("batch", options.batch), ("input_size", options.input_size)):
            if value is not None and name not in arguments:
                raise ModelError(
                    f"{spec} makes its own example inputs and takes no argument {name!r}, "
                    f"so it can't be set to {value}; add the argument to {attribute}, or leave the option out"
                )
    if options.sequence_length is not None and "sequence_length" not in arguments:
        raise ModelError(
            f"{spec} takes no argument 'sequence_length'; add it to {attribute}, or leave the option out"
        )
    return finish(spec, model, inputs, options, title=type(model).__name__, returns="what its forward returns")


def check_place(spec: str) -> None:
    """Check that there is such a file or package, and such a function in a file, without running any of it.

    Raises:
        ModelError: there is none.
    """
    place, _, attribute = spec.rpartition(":")
    if not attribute.isidentifier():
        raise ModelError(f"{spec}: after the colon comes the name of a function, e.g. {place}:build")
    if place.endswith(".py"):
        path = Path(place).expanduser().resolve()
        if not path.is_file():
            near = close_matches(path.name, _python_files(path.parent))
            raise ModelError(f"{spec}: there is no file {path}{near or '; check the path'}")
        bound = _bound_names(path)
        if bound is not None and attribute not in bound:
            raise _absent(spec, os.path.relpath(path), attribute, bound)
        return
    if os.path.isfile(place) or os.sep in place:
        raise ModelError(f"{spec}: {place} is not a Python file; write path/to/file.py:{attribute}")
    package = place.partition(".")[0]
    with _importable(Path.cwd()), contextlib.suppress(ValueError):  # a module without a specification is there
        if not package or importlib.util.find_spec(package) is None:
            raise _no_module(spec, package)


def _python_files(folder: Path) -> list[str]:
    try:
        return [name for name in os.listdir(folder) if name.endswith(".py")]
    except OSError:
        return []


_DYNAMIC = {"globals", "locals", "vars", "setattr", "exec", "eval", "__getattr__"}
"""Names by which code can define others that its text doesn't show."""


def _bound_names(path: Path) -> set[str] | None:
    """Names that a file defines somewhere; None if its text doesn't tell."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None
    bound: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.Name):
            bound.add(node.id)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
    return None if bound & {"*", *_DYNAMIC} else bound


def _absent(spec: str, where: str, attribute: str, known: Iterable[str]) -> ModelError:
    public = sorted(name for name in known if not name.startswith("_"))
    return ModelError(f"{spec}: {where} has no {attribute!r}{close_matches(attribute, public) or '; define it'}")


def _no_module(spec: str, name: str) -> ModelError:
    return ModelError(
        f"{spec}: there is no module {name!r} in {Path.cwd()} or among the installed packages; "
        "check the name, or give a file: path/to/file.py:build"
    )


@contextlib.contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Let their code import what lies beside it, as running it as a script would."""
    entry = str(folder)
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(entry)


def _load_file(place: str) -> ModuleType:
    path = Path(place).expanduser().resolve()
    # A name of its own per file: `model.py` must not shadow, or be taken for, an importable module `model`.
    name = f"_monetlite_model_{path.stem}_{zlib.crc32(os.fsencode(path)):08x}"
    loader = importlib.util.spec_from_file_location(name, path)
    assert loader is not None, "a .py file always has a spec"
    assert loader.loader is not None, "and a loader"
    module = importlib.util.module_from_spec(loader)
    sys.modules[name] = module
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # leave nothing in the person's folder
    try:
        loader.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ModelError(f"{path} failed to import: {_last_line(error, module)}; fix it and try again") from error
    finally:
        sys.dont_write_bytecode = writes
    return module


def _load_module(spec: str, place: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not (place == error.name or place.startswith(error.name + ".")):
            raise ModelError(
                f"{spec}: importing {place} failed: {_last_line(error)}; install what it misses"
            ) from error
        raise _no_module(spec, error.name) from error
    except (Exception, SystemExit) as error:
        raise ModelError(f"{spec}: importing {place} failed: {_last_line(error)}; fix it and try again") from error


def _function(spec: str, module: ModuleType, attribute: str) -> Callable[..., Any]:
    function = getattr(module, attribute, None)
    public = [name for name, item in vars(module).items() if callable(item)]
    where = os.path.relpath(module.__file__) if module.__file__ else module.__name__
    if function is None:
        raise _absent(spec, where, attribute, public)
    if not callable(function):
        raise ModelError(f"{spec}: {attribute!r} in {where} is {_describe(function)}; make it a function")
    return function  # type: ignore[no-any-return]  # callable() does not narrow Any


def _arguments(spec: str, function: Callable[..., Any], options: BuildOptions) -> dict[str, Any]:
    """The options given that the function takes, and a check that it needs nothing else."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some builtins have no signature
        return {}
    given = {
        "batch": options.batch,
        "input_size": options.input_size,
        "sequence_length": options.sequence_length,
    }
    anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    taken = {
        parameter.name
        for parameter in parameters
        if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    }
    arguments = {name: value for name, value in given.items() if value is not None and (anything or name in taken)}
    needed = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        and parameter.name not in arguments
    ]
    if needed:
        options_needed = [name for name in needed if name in given]
        advice = f"give {', '.join(options_needed)}" if options_needed == needed else "give them defaults"
        raise ModelError(f"{spec} needs {', '.join(needed)}, which was not given; {advice}")
    return arguments


def _checked_inputs(spec: str, inputs: Any) -> tuple[Any, ...] | dict[str, Any]:
    import torch

    if isinstance(inputs, torch.Tensor):
        return (inputs,)
    if isinstance(inputs, tuple | list):
        return tuple(inputs)
    if isinstance(inputs, (dict, UserDict)) and all(isinstance(name, str) for name in inputs):
        return dict(inputs)
    raise ModelError(
        f"{spec} returned example inputs of type {type(inputs).__name__}; return a tuple of positional "
        "arguments, or a dict of keyword arguments"
    )


def _describe(item: object) -> str:
    if item is None:
        return "None"
    if isinstance(item, tuple):
        return f"a tuple of {', '.join(type(entry).__name__ for entry in item) or 'nothing'}"
    if isinstance(item, type):
        return f"the class {item.__name__}"
    kind = type(item).__name__
    return f"{'an' if kind[0] in 'aeiouAEIOU' else 'a'} {kind}"


def _last_line(error: BaseException, module: ModuleType | None = None) -> str:
    """The traceback's last line, with where in their own file it passed last."""
    message = traceback.format_exception_only(error)[-1].strip()
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if module is not None and frame.filename == module.__file__]
    if isinstance(error, SyntaxError) or not frames:
        return f"{message} (line {error.lineno})" if isinstance(error, SyntaxError) else message
    frame = (own or frames)[-1]
    return f"{message} ({os.path.basename(frame.filename)}, line {frame.lineno}, in {frame.name})"
