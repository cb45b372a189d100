"""No private symbol of torch stands outside of `monetlite.fx.torch_internals`."""

import ast
from pathlib import Path

import pytest

import monetlite

PACKAGE = Path(monetlite.__file__).parent
INTERNALS = PACKAGE / "fx" / "torch_internals"
OTHERS = {
    "os._exit",  # Python's
    "pickle._Unpickler",  # Python's
    "owner._forward",  # monetlite's own, as the next
    "instance._forward",
    "run.cost._replace",  # of a named tuple
}
"""Attributes with a leading underscore that are not torch's."""
OPERATORS = ("torch.ops.", "aten.", "_aten.")
"""Names of operators are data that graphs and schedule files hold, not Python symbols: `aten._softmax`."""
NAMES = {
    "_boxed_call",
    "_buffers",
    "_cdata",
    "_dispatch_cache",
    "_modules",
    "_non_persistent_buffers_set",
    "_op",
    "_orig_mod",
    "_overloadname",
    "_parameters",
    "_schema",
    "CompiledFunctionBackward",
    "compile_subgraph_reason",
    "partitioner_tag",
    "user_visible_output_idxs",
}
"""Names of torch's that may stand in a string, for `getattr` or `__dict__`."""
WITHOUT_UNDERSCORE = {"py_kernels", "decomposition_table", "experimental_event_tree", "peek_interpreter_stack"}


def _private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _found(tree: ast.Module) -> list[tuple[int, str]]:
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                names = [item.name for item in node.names]
            case ast.ImportFrom() if node.module and not node.level:
                names = [f"{node.module}.{item.name}" for item in node.names]
            case ast.Attribute():
                owner = ast.unparse(node.value)
                text = f"{owner}.{node.attr}"
                known = owner in ("self", "cls") or text in OTHERS or text.startswith(OPERATORS)
                if node.attr in WITHOUT_UNDERSCORE or (_private(node.attr) and not known):
                    found.append((node.lineno, text))
                continue
            case ast.Constant(value=str()) if node.value in NAMES or node.value.startswith("torch._"):
                found.append((node.lineno, repr(node.value)))
                continue
            case _:
                continue
        for name in names:
            if name.startswith("torch") and any(map(_private, name.split("."))):
                found.append((node.lineno, name))
    return found


def test_private_symbols_stand_in_one_package() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {text}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if INTERNALS not in path.parents
        for line, text in _found(ast.parse(path.read_text()))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "code",
    [
        "import torch._dynamo",
        "from torch._inductor import config",
        "from torch.utils import _pytree as pytree",
        "import torch\nx = torch._C._functorch.peek_interpreter_stack()",
        "schema = target._schema",
        "call.__dict__['_boxed_call'] = True",
        "key = tensor.untyped_storage()._cdata",
        "operator.py_kernels.pop(key)",
        "name = type(node).__name__ == 'CompiledFunctionBackward'",
        "getattr(model, '_orig_mod', model)",
    ],
)
def test_the_search_finds(code: str) -> None:
    assert _found(ast.parse(code))


def test_operators_and_our_own_attributes_are_not_found() -> None:
    code = "torch.ops.aten._softmax.default(x)\nself._kept = 1\nclass A:\n    def _b(self): ...\n__all__ = []"
    assert not _found(ast.parse(code))
