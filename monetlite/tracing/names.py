"""Names people recognise: operators are called after the module that runs them (`layer1.0.conv1`)."""

import operator
import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from monetlite.fx import storages
from monetlite.fx.torch_internals.torch_aot import is_backward
from monetlite.fx.torch_internals.torch_modules import HOLDERS, uncompiled
from monetlite.operators.implementations import target_of
from monetlite.operators.traits import family_of

_ROOT = re.compile(r"^L\['[^']*'\](?:\._orig_mod)?")
_NAME = re.compile(r"[^.\[\]'\"]+")
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_MODELS = os.path.join(_PACKAGE, "models", "")
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


class UniqueNames:
    """Names that differ, by numbers where they have to."""

    def __init__(self) -> None:
        self.taken: Counter[str] = Counter()

    def reserve(self, name: str) -> str:
        """A name that nothing else has."""
        self.taken[name] += 1
        return name if self.taken[name] == 1 else self.reserve(f"{name}#{self.taken[name]}")


class Namer(UniqueNames):
    """Gives every kernel of a joint graph a unique name.

    The main kernel of a leaf module, the one with the largest results, has the module's name, and its gradient
    `NAME.backward`. Other kernels add what they do: `layer1.0.add`, `layer1.0.add.backward`.
    """

    def __init__(self, model: nn.Module, kernels: Sequence[fx.Node]) -> None:
        super().__init__()
        self._model = uncompiled(model)
        self._named = {module: name for name, module in self._model.named_modules()}
        self._paths = frozenset(self._named.values())
        leaves = {name for module, name in self._named.items() if not any(True for _ in module.children())}
        self._forward: dict[tuple[str, int], str] = {}
        """Module of a forward kernel, by what it does and its autograd sequence number."""
        for node in kernels:
            if not is_backward(node) and node.meta.get("seq_nr") is not None:
                self._forward[family_of(target_of(node)), node.meta["seq_nr"]] = self.module(node)
        largest: dict[tuple[str, bool], tuple[int, fx.Node]] = {}
        for node in kernels:
            key = self.module(node), is_backward(node)
            if key[0] and key[0] in leaves:
                size = sum(storages.storage_bytes(item) for item in storages.results(node) if item is not None)
                if node.target is torch.ops.aten.clone.default:
                    size = 0  # a copy is never what a module is for
                if key not in largest or size > largest[key][0]:
                    largest[key] = (size, node)
        main = {node for _, node in largest.values()}
        self._names: dict[fx.Node, str] = {}
        for node in kernels:
            parts = (
                self.module(node),
                "" if node in main else _what(node),
                "backward" if is_backward(node) else "",
            )
            self._names[node] = ".".join(filter(None, parts))

    def name(self, node: fx.Node) -> str:
        return self._names[node]

    def unique(self, node: fx.Node, suffix: str = "") -> str:
        """The name of (a part of) a kernel, made unique by a number if it has to be."""
        return self.reserve(self._names[node] + suffix)

    def module(self, node: fx.Node) -> str:
        """Path of the innermost module that a node belongs to; empty for the model itself."""
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
        if not stack:
            # The gradient of an in-place operator carries no module, and a sequence number one before its own.
            key = _what(node), node.meta.get("seq_nr", -1) + 1
            return self._forward.get(key, "") if is_backward(node) else ""
        *_, (path, _) = stack.values()
        return self._registered([name for name in _NAME.findall(_ROOT.sub("", path)) if name not in HOLDERS])

    def _registered(self, parts: Sequence[str]) -> str:
        """The name that a submodule is registered under; a path by which it is reached may be another."""
        path = ".".join(parts)
        if path in self._paths:
            return path
        found: Any = self._model
        for part in parts:
            if isinstance(found, list | tuple) and part.isdigit() and int(part) < len(found):
                found = found[int(part)]
            elif isinstance(found, dict):
                found = found.get(part)
            else:
                found = getattr(found, part, None)
        return self._named.get(found, path) if isinstance(found, nn.Module) else path


def source_of(node: fx.Node) -> str:
    """File and line of the person's code that a node comes from; empty if there is none, as in an nn.Sequential."""
    trace = node.meta.get("stack_trace") or node.meta.get("fwd_stack_trace") or ""
    frames = [frame for frame in _FRAME.findall(str(trace)) if not is_own_file(frame[0])]
    return f"{frames[-1][0]}:{frames[-1][1]}" if frames else ""


def is_own_file(path: str) -> bool:
    """True for a file of monetlite's, which no line of the person's model is in; not for its built-in models."""
    return path.startswith(_PACKAGE) and not path.startswith(_MODELS)


def longest_loop(graph: fx.Graph) -> tuple[str, int]:
    """The line of the person's code that makes most calls in one module, and how many."""
    lines = Counter(
        (line, next(reversed(node.meta.get("nn_module_stack") or {"": None})))
        for node in graph.nodes
        if node.op.startswith("call_") and (line := source_of(node))
    )
    ((line, _), calls) = max(lines.items(), key=operator.itemgetter(1), default=(("", ""), 0))
    return line, calls


def _what(node: fx.Node) -> str:
    return family_of(target_of(node)).removesuffix("_backward")
