"""Rules of the house that a reader relies on: a name means one thing, and a docstring says it plainly."""

import ast
import functools
from collections import defaultdict
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "monetlite"
FILES = sorted(PACKAGE.rglob("*.py"))
RIDDLES = ("What ", "Whether ", "How ", "Where ", "That ")


def repeated(names):
    """Return the names that stand in more than one place, with the places."""
    places = defaultdict(set)
    for name, place in names:
        places[name].add(place)
    return {name: sorted(of) for name, of in places.items() if len(of) > 1}


@functools.cache
def described():
    """What has a docstring, or is a string that stands alone: its file, kind, name, line and words."""
    found = []
    for path in FILES:
        place = str(path.relative_to(PACKAGE))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                name, line = getattr(node, "name", ""), getattr(node, "lineno", 1)
                found.append((place, type(node), name, line, ast.get_docstring(node) or ""))
            elif isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str):
                found.append((place, ast.Expr, "", node.lineno, node.value.value))
    return found


def test_no_two_files_share_a_name():
    paths = [path for path in FILES if path.name not in ("__init__.py", "__main__.py")]
    assert repeated((path.name, str(path.relative_to(PACKAGE))) for path in paths) == {}


def test_no_two_classes_share_a_name():
    assert repeated((name.strip("_"), path) for path, kind, name, _, _ in described() if kind is ast.ClassDef) == {}


def test_every_folder_is_a_package():
    folders = {path.parent for path in FILES}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


@pytest.mark.parametrize("kind", [ast.Module, ast.ClassDef, ast.FunctionDef])
def test_docstrings_begin_with_a_noun_or_a_verb(kind):
    riddles = [
        f"{path}: {text.splitlines()[0]}"
        for path, of, _, _, text in described()
        if of is kind and text.startswith(RIDDLES)
    ]
    assert riddles == []


def test_notes_on_names_begin_with_a_noun_or_a_verb():
    """A string that stands alone after an assignment says what the name is."""
    riddles = [
        f"{path}:{line}: {text}"
        for path, of, _, line, text in described()
        if of is ast.Expr and text.startswith(RIDDLES)
    ]
    assert riddles == []
