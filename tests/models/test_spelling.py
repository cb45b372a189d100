"""Misspelt models are refused before torch, or a model's library, is imported."""

import json
import subprocess
import sys

import pytest
from test_model_names import fails

from monetlite.models import library_names

SPELLINGS = {
    "resnt50": "did you mean resnet50",
    "gpt2": "did you mean hf:gpt2?",
    "hf:gptt2": "did you mean hf:gpt2",
    "hf:openai/gtp2": "did you mean hf:",
    "hf:nowhere/at/all": "there is no file or folder",
    "timm:resnt50": "did you mean timm:resnet50?",
    "torchvision:vit_b_61": "did you mean torchvision:vit_b_16?",
    "not_there.py:build": "there is no file",
    "net.py:bild": "did you mean build?",
    "nett.py:build": "did you mean net.py?",
    "net.py": "write net.py:build",
    "data.bin": "not a Python file",
    "data.bin:build": "not a Python file",
    ".": "is a folder",
    "no_package_of_this_name:build": "there is no module",
    ":build": "there is no module",
}
PASSING = (
    "ResNet-50",
    "hf:gpt2",
    "hf:llama-1b",
    "hf:cached/model",
    "timm:resnet50.tag",
    "net.py:build",
    "star.py:what",
    "json:x",
    "own:x",
    "own.module:x",
)
REGISTERED = (
    "@register_model()\n@handle_legacy_interface(\n    weights=1,\n)\ndef {}(*, weights=None):\n    pass\n\n\n"
)
PROGRAM = """
import json, sys
from monetlite.core.errors import ModelError
from monetlite.models import check_spelling

said = {}
for name in json.loads(sys.argv[1]):
    try:
        said[name] = check_spelling(name)
    except ModelError as error:
        said[name] = str(error)
imported = [name for name in ("torch", "transformers", "timm", "torchvision") if name in sys.modules]
print(json.dumps([said, imported]))
"""


def test_names_are_checked_without_imports(tmp_path):
    """Libraries are folders here whose import would fail."""
    for library in ("timm", "torchvision"):
        (tmp_path / library / "models").mkdir(parents=True)
        (tmp_path / library / "__init__.py").write_text("raise RuntimeError('imported')")
        names = ["resnet50", "vit_b_16", *(f"net{number}" for number in range(30))]
        (tmp_path / library / "models" / "nets.py").write_text("".join(map(REGISTERED.format, names)))
    (tmp_path / "net.py").write_text("import torch\n\ndef build():\n    pass\n")
    (tmp_path / "star.py").write_text("from torch import *\n")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "__init__.py").write_text("import torch")
    (tmp_path / "data.bin").write_bytes(b"\0")
    (tmp_path / "hub" / "models--cached--model").mkdir(parents=True)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([*SPELLINGS, *PASSING, " HF:gpt2 "])],
        cwd=tmp_path,
        env={"PYTHONPATH": ":".join([str(tmp_path), *sys.path]), "HF_HUB_CACHE": str(tmp_path / "hub")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said, imported = json.loads(done.stdout)
    assert imported == []
    for name, hint in SPELLINGS.items():
        assert hint in said[name], said[name]
    assert [said[name] for name in PASSING] == list(PASSING)
    assert said[" HF:gpt2 "] == "hf:gpt2"


def test_transformers_source_lists_what_it_has():
    auto = pytest.importorskip("transformers.models.auto.configuration_auto")
    folder = library_names.source_folder("hf")
    listed = library_names._names("hf", folder)
    assert set(auto.CONFIG_MAPPING_NAMES) <= listed


def test_a_library_that_is_laid_out_otherwise_is_asked_itself(tmp_path, monkeypatch):
    (tmp_path / "timm" / "models").mkdir(parents=True)
    (tmp_path / "timm" / "__init__.py").write_text(
        "def is_model(name): return False\ndef list_models(): return ['a']"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert library_names.names_in_source("timm") is None
    fails("timm:b", "timm has no model 'b'")
    monkeypatch.delitem(sys.modules, "timm")
