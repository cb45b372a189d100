"""A person's own `file.py:function` and `module:function`, and what they are told when it doesn't work."""

import os
import sys
import textwrap

import pytest
import torch

from monetlite.core.errors import ModelError
from monetlite.models import build_model

HEADER = "import torch\nfrom torch import nn\n"


@pytest.fixture
def write(tmp_path):
    def write_file(body, name="net.py"):
        path = tmp_path / name
        path.write_text(HEADER + textwrap.dedent(body))
        return path

    return write_file


def fails(spec, *words, **options):
    with pytest.raises(ModelError) as failure:
        build_model(str(spec), **options)
    for word in words:
        assert word in str(failure.value)


def test_module_with_inputs(write):
    path = write("def build(batch=4):\n    return nn.Linear(3, 2), torch.randn(batch, 3)")
    built = build_model(f"{path}:build", batch=7)
    assert built.batch == 7
    assert isinstance(built.example_inputs, tuple)
    assert built.model(*built.example_inputs).shape == (7, 2)
    assert "Linear: 8 parameters; input 7×3 float32" in built.description


def test_inputs_may_be_what_a_tokenizer_returns(write):
    path = write(
        """
        from collections import UserDict

        def build():
            return nn.Linear(3, 2), UserDict(input=torch.randn(4, 3))
        """
    )
    built = build_model(f"{path}:build")
    assert isinstance(built.example_inputs, dict)
    assert built.model(**built.example_inputs).shape == (4, 2)


def test_keyword_inputs_and_every_option(write):
    path = write(
        """
        class Net(nn.Linear):
            def forward(self, tokens, scale):
                return super().forward(tokens) * scale

        def build(*, batch, input_size, sequence_length):
            assert input_size == (8, 9)
            return Net(3, 2), {"tokens": torch.randn(batch, sequence_length, 3), "scale": 2.0}
        """
    )
    built = build_model(
        f"{path}:build", batch=2, input_size=(8, 9), sequence_length=5, dtype=torch.float64, meta=True
    )
    assert set(built.example_inputs) == {"tokens", "scale"}
    assert built.model(**built.example_inputs).shape == (2, 5, 2)
    assert built.example_inputs["tokens"].dtype == torch.float64
    assert built.example_inputs["tokens"].is_meta


def test_module_alone_takes_images_of_the_given_size(write):
    path = write("def build():\n    return nn.Conv2d(3, 2, 1)")
    built = build_model(f"{path}:build", batch=2, input_size=(5, 6))
    assert built.model(*built.example_inputs).shape == (2, 2, 5, 6)
    fails(f"{path}:build", "returned a module without example inputs", "return (module, example_inputs)")


def test_a_class_is_a_builder_too(write):
    path = write("class Net(nn.Conv2d):\n    def __init__(self):\n        super().__init__(3, 2, 1)")
    assert build_model(f"{path}:Net", batch=1, input_size=(4, 4)).batch == 1


def test_files_import_their_neighbours_and_packages_resolve(write, tmp_path, monkeypatch):
    write("WIDTH = 3", name="neighbour_of_net.py")
    path = write(
        """
        import neighbour_of_net as other

        def build():
            return nn.Linear(other.WIDTH, 1), torch.randn(2, other.WIDTH)
        """
    )
    before = list(sys.path)
    assert build_model(f"{path}:build").batch == 2
    assert sys.path == before
    monkeypatch.chdir(tmp_path)
    assert build_model("net:build").batch == 2


def test_a_folder_whose_name_is_not_utf_8(write, tmp_path):
    folder = tmp_path / os.fsdecode(b"mod\xe8les")
    folder.mkdir()
    path = write("def build():\n    return nn.Linear(3, 2), torch.randn(4, 3)", folder / "net.py")
    assert build_model(f"{path}:build").batch == 4


def test_missing_things(write, tmp_path):
    path = write("def build_net():\n    return nn.Linear(1, 1)")
    fails(f"{tmp_path}/other.py:build", f"there is no file {tmp_path}/other.py")
    fails("no_such_package.models:build", "there is no module 'no_such_package'")
    fails(f"{path}:buildnet", "has no 'buildnet'", "did you mean build_net?")
    fails(f"{path}:nn", "is a module", "make it a function")
    fails(f"{path}:", "after the colon comes the name of a function")


def test_their_exceptions_are_shown_with_the_line(write):
    path = write("def build():\n    return nn.Linear(1, -1)\n\ndef deep():\n    return build()")
    fails(f"{path}:deep", "deep failed: ", "net.py, line 4, in build")
    broken = write("build = 1 / 0", name="broken.py")
    fails(f"{broken}:build", "failed to import: ZeroDivisionError: division by zero (broken.py, line 3")
    unreadable = write("def build(:\n    pass", name="unreadable.py")
    fails(f"{unreadable}:build", "SyntaxError", "line 3")
    needy = write("import not_installed_anywhere as build", name="needy.py")
    fails(f"{needy}:build", "No module named 'not_installed_anywhere'")


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("None", "returned None"),
        ("nn.Linear", "returned the class Linear"),
        ("(1, 2)", "returned a tuple of int, int"),
        ("(nn.Linear(1, 1), 3)", "example inputs of type int"),
        ("(nn.Linear(1, 1), ())", "no tensor with a batch dimension"),
    ],
)
def test_wrong_returns(write, returned, said):
    path = write(f"def build():\n    return {returned}")
    fails(f"{path}:build", said, "return")


def test_a_module_in_place_of_a_function(write):
    path = write("model = nn.Linear(1, 1)")
    fails(f"{path}:model", "model is a module (Linear); name a function that returns it")


def test_lazy_modules_have_no_size_yet(write):
    path = write("def build():\n    return nn.LazyLinear(2), torch.randn(4, 3)")
    fails(f"{path}:build", "has lazy parameters", "call the model once")


def test_options_that_the_function_does_not_take(write):
    path = write("def build():\n    return nn.Linear(3, 2), torch.randn(4, 3)")
    fails(f"{path}:build", "takes no argument 'batch'", "can't be set to 8", batch=8)
    fails(f"{path}:build", "takes no argument 'sequence_length'", sequence_length=8)
    needs = write("def build(batch, width):\n    return None", name="needs.py")
    fails(f"{needs}:build", "needs batch, width", "give them defaults")
    wants = write("def build(batch):\n    return None", name="wants.py")
    fails(f"{wants}:build", "needs batch", "give batch")
