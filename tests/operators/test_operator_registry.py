"""What families register is reached, can be resolved, and keeps the rules of a graph."""

import os
from typing import get_type_hints

import pytest
import small_models
import torch
from contents import plain
from harness import Captured, Seen
from test_batch_norm import Norm
from test_cross_entropy import CrossEntropy, targets
from torch import nn

import monetlite
from monetlite.operators import resolve
from monetlite.operators.implementations import FUNCTIONS, name_of

IMAGES = (8, 16, 6, 6)
LAYERS = (
    nn.Conv2d(16, 64, 3, padding=1),
    nn.Conv2d(16, 8, 1),
    nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), Norm(32, torch.ones(32), torch.zeros(32)), nn.ReLU()),
    nn.Sequential(nn.Softmax(-1), nn.Dropout(0.2), nn.Hardtanh(), nn.GELU(), nn.SiLU()),
    nn.Sequential(nn.LayerNorm([16, 6, 6]), nn.MaxPool2d(2)),
)
ELSEWHERE = {
    "monetlite.batch_norm_by_cudnn_again": "of captures on CUDA; tests/runtime/test_batch_norm_by_cudnn.py",
    "monetlite.batch_norm_in_float32_again": "of images in 16 bits; tests/runtime/test_exactness.py",
    "monetlite.batch_norm_in_float32_again_": "the same",
    "monetlite.changed": "of other libraries' operators; tests/runtime/test_custom_kernels.py",
    "monetlite.changed_": "the same",
    "monetlite.linear_cross_entropy": "in a layout of its own; tests/operators/test_tiled_loss.py",
    "monetlite.multiply_scaled": "the same",
    "monetlite.multiply_scaled_": "the same",
    "monetlite.kept_elements": "of steps with regions; tests/runtime/test_regions.py",
    "monetlite.batch_norm_statistics": "the same",
    "monetlite.normalized": "the same",
    "monetlite.row_chain": "in a layout of its own; tests/operators/test_row_chain.py",
    "monetlite.dropout": "what is traced, for probabilities that native_dropout rounds in another way",
    **{
        target: "needs cuDNN"
        for target, item in FUNCTIONS.items()
        if item.run.__module__.startswith("monetlite.operators.cudnn")
    },
}
"""Functions that no implementation runs on a CPU."""
OF_REGIONS = ("monetlite.region.", "monetlite.compiled_region")
"""Names of functions that are made when a step is traced; tests/runtime/test_regions.py."""


@pytest.fixture(scope="module")
def seen():
    """Everything that was compared on a few layers."""
    found = Seen()
    cases = [(plain(IMAGES), layer, ()) for layer in LAYERS]
    cases.append((plain(IMAGES, dtype=torch.bfloat16), Norm(16, torch.ones(16), torch.zeros(16)), ()))
    target, count = targets((6, 9), 1)
    cases.append((plain((6, 9)), CrossEntropy(torch.float32, count, "mean", True, True, 0.0), (target,)))
    for case, layer, rest in cases:
        one = case.check(layer, *rest)
        found.compared |= one.compared
        found.functions |= one.functions
    return found


def test_every_registered_function_is_called_by_an_implementation(seen):
    regions = {target for target in FUNCTIONS if target.startswith(OF_REGIONS)}
    uncalled = FUNCTIONS.keys() - seen.functions - regions
    assert uncalled == set(ELSEWHERE), "call it by one of LAYERS, or say in ELSEWHERE where it is tested"


@pytest.mark.parametrize("target", sorted(FUNCTIONS))
def test_a_registered_function_is_found_by_its_name_and_says_what_it_returns(target):
    run = FUNCTIONS[target].run
    assert resolve(target) is run
    assert name_of(run) == target
    assert "return" in get_type_hints(run)
    assert run.__doc__


@pytest.mark.parametrize(
    "target",
    ["aten.nothing.default", "aten.relu", "os.system.default", "relu", "aten.relu.no", "", "monetlite.nothing"],
)
def test_unknown_functions(target):
    with pytest.raises(KeyError):
        resolve(target)


MODELS = {
    "cnn": lambda: (small_models.SmallCNN(), (torch.randn(4, 3, 16, 16),)),
    "elementwise": lambda: (small_models.Elementwise(), (torch.randn(4, 16),)),
    "loss": lambda: (small_models.WithLoss(), (torch.randn(5, 6), torch.tensor([0, 3, 1, 2, 2]))),
}


@pytest.mark.parametrize("which", MODELS)
def test_every_implementation_in_a_whole_model_keeps_its_promises(which):
    model, inputs = MODELS[which]()
    found = Captured(model, *inputs).check(lambda spec: torch.randn(spec.shape))
    assert found.compared


@pytest.mark.parametrize("kind", ["gpt2", *(["vit", "bert"] if "MONETLITE_THOROUGH" in os.environ else [])])
def test_the_implementations_of_a_transformer_keep_the_rules_of_a_graph(kind):
    model, inputs = small_models.tiny_transformer(kind, layers=1)
    assert_rules(monetlite.trace(model, inputs))


def test_the_implementations_of_images_keep_the_rules_of_a_graph():
    graph = monetlite.trace(small_models.SmallCNN(), torch.randn(4, 3, 16, 16))
    assert_rules(graph)
    on_cpu, on_gpu = ({item.name for item in _all(graph.available(device))} for device in ("cpu", "cuda"))
    assert on_cpu - on_gpu >= {"channels_last"}
    assert on_gpu >= {"from_mask", "from_output", "from_offsets", "transposed", "chunks2"}


def _all(graph):
    return (item for operator in graph.operators for item in operator.implementations)


def assert_rules(graph):
    """Names are told apart, what is held is not overwritten, and every call says what it reads and writes."""
    offered = 0
    for operator in graph.operators:
        names = [item.name for item in operator.implementations]
        assert len(set(names)) == len(names), operator.name
        assert names[0] == "default"
        for item in operator.implementations:
            about = f"{operator.name}: {item.name}"
            assert item.writes == operator.writes, about
            assert set(item.overwrites) <= set(item.reads), about
            assert not any(graph.values[value].held for value in item.overwrites), about
            assert item.tolerance >= 0, about
            assert not (operator.derived and item.tolerance), f"{about}: others rely on it"
            for call in filter(None, (item.call, item.again)):
                assert callable(resolve(call.target)), about
                reads = {ref.value for ref in call.tensors() if ref.value is not None}
                assert reads - set(operator.writes) <= set(item.reads), about
            if item.guard is not None:
                assert item.tolerance, f"{about} has a guard, and nothing to guard"
                assert all(ref.value is None for ref in item.guard.tensors()), about
        offered += len(names) - 1
    assert offered > 10
