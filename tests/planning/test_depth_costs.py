"""A step of all layers from a trace of few is the traced step of all: operators, names, sizes and costs."""

import itertools
import json
from dataclasses import replace

import pytest
import torch
from thoroughness import often
from torch import nn

from monetlite.core.devices import find_device
from monetlite.core.options import PricingOptions, SolvingOptions
from monetlite.core.simulate import simulate
from monetlite.core.steps import plain_steps
from monetlite.models import build_model
from monetlite.models.equal_layers import EqualLayers, find_equal_layers, find_layers, shorten
from monetlite.planning import card_fit
from monetlite.planning.batch_costs import Unlike
from monetlite.planning.depth_costs import at_full_depth
from monetlite.planning.model_steps import ModelSteps
from monetlite.planning.pipeline import price
from monetlite.profiling import estimate
from monetlite.profiling.step_additions import with_additions
from monetlite.tracing import trace, trace_layouts
from monetlite.tracing.step_inputs import resident_bytes, split_inputs, tensors_in_order

NARROW = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
MODELS = {
    "qwen3+lora4": ({**NARROW, "num_hidden_layers": 6, "dtype": "bfloat16"}, 1),
    "gpt2": ({"vocab_size": 96, "n_embd": 32, "n_head": 4, "n_positions": 64, "n_layer": 5}, 1),
    "gemma2": ({**NARROW, "num_hidden_layers": 9, "sliding_window": 8}, 2),
}
PRICING = PricingOptions(device="rtx-4090")


@pytest.fixture(scope="module")
def traced(request, tmp_path_factory):
    """A model's equal layers, what it has in memory, and its steps of all layers and of few."""
    kind, folder = request.param, tmp_path_factory.mktemp("model")
    model_type = kind.partition("+")[0]
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, **MODELS[kind][0]}))
    built = build_model(f"hf:{folder}{kind[len(model_type) :]}", batch=2, sequence_length=32, meta=True)
    layers, inputs = find_equal_layers(built.model), built.example_inputs
    assert layers is not None
    resident = resident_bytes(built.model, tensors_in_order(built.model, *split_inputs(inputs)))
    whole = trace(built.model, inputs, device="rtx-4090")
    shorten(built.model, layers)
    (few,) = trace_layouts(built.model, inputs, ["as_traced"], device="rtx-4090", each_gradient=True)
    return layers, resident, whole, few


@pytest.mark.thorough
@pytest.mark.parametrize("traced", ["gpt2"], indirect=True)
def test_what_cublas_keeps_counts_where_only_all_layers_are_a_large_step(traced, monkeypatch):
    layers, resident, whole, few = traced
    whole = price(whole, PRICING)
    peak_bytes = simulate(whole, plain_steps(whole.graph)).peak_bytes
    monkeypatch.setattr(estimate, "LEAST_BESIDE_CUBLAS_BYTES", peak_bytes)
    assert price(few, PRICING).graph.resident.libraries == 0
    found = at_full_depth(price(few, PRICING), layers, resident)
    assert found.graph.resident.libraries == 2 * find_device("rtx-4090").cublas_workspace_bytes


@pytest.mark.parametrize("traced", often(MODELS, "gpt2"), indirect=True)
def test_a_step_of_few_layers_tells_that_of_all(traced, request):
    layers, resident, whole, few = traced
    assert layers.period == MODELS[request.node.callspec.params["traced"]][1]
    assert layers.depth < layers.count
    whole = price(whole, PRICING)
    found = at_full_depth(price(few, PRICING), layers, resident)
    assert found.graph.fingerprint == whole.graph.fingerprint
    assert found.graph.values == whole.graph.values
    assert found.graph.resident == whole.graph.resident
    assert found.costs == whole.costs
    for one, other in zip(found.graph.operators, whole.graph.operators, strict=True):
        assert (one.name, one.module, one.phase) == (other.name, other.module, other.phase)
        for mine, theirs in itertools.zip_longest(one.implementations, other.implementations):
            assert (mine.reads, mine.writes, mine.overwrites) == (theirs.reads, theirs.writes, theirs.overwrites)
    for more in ({"optimizer": "adamw"}, {"optimizer": "adamw8bit", "accumulate": True}):
        options = replace(PRICING, **more)
        bare = [replace(item, graph=replace(item.graph)) for item in (found, whole)]
        one, other = (with_additions(item, options) for item in bare)
        assert (
            simulate(one, plain_steps(one.graph)).memory_bytes
            == simulate(other, plain_steps(other.graph)).memory_bytes
        )


@pytest.mark.thorough
def test_the_longest_list_is_found_before_layers_are_left_out(tmp_path, monkeypatch):
    """A decoder of six layers is traced with four, fewer than the encoder's five."""
    sizes = {"d_model": 16, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": 64}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = {"model_type": "bart", **sizes, **heads, "encoder_layers": 5, "decoder_layers": 6}
    (tmp_path / "config.json").write_text(json.dumps(config))
    built = build_model(f"hf:{tmp_path}", batch=2, sequence_length=16, meta=True)
    assert (find_layers(built.model), find_equal_layers(built.model).depth) == ("model.decoder.layers", 4)
    paths = set()
    monkeypatch.setattr(card_fit, "_limits", lambda *_: {})  # which another trace would tell
    monkeypatch.setattr(card_fit, "layer_ways", lambda profile, path, *_: paths.add(path) or iter(()))

    def rebuild(batch, length):
        return build_model(f"hf:{tmp_path}", batch=batch or 2, sequence_length=length or 16, meta=True)

    solving = SolvingOptions(time_limit=0.1)
    model = ModelSteps(built=built, rebuild=rebuild, pricing=PRICING, solving=solving)
    card_fit.fit_card(model, card_fit.card_memory(find_device("rtx-4090")), solving)
    assert paths == {"model.decoder.layers", None}  # None where transformers would checkpoint the encoder, too


class Shortcut(nn.Module):
    """Every layer's output is read again at the end."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6))

    def forward(self, x):
        found = []
        for layer in self.layers:
            x = layer(x)
            found.append(x)
        return sum(found)


def test_layers_that_are_read_from_elsewhere_are_refused():
    model, inputs = Shortcut(), torch.randn(4, 8)
    layers = find_equal_layers(model)
    assert layers == EqualLayers(path="layers", count=6, period=1)
    shorten(model, layers)
    (few,) = trace_layouts(model, inputs, ["as_traced"], each_gradient=True)
    with pytest.raises(Unlike):
        at_full_depth(price(few, PRICING), layers, few.resident)


def test_layers_that_differ_are_not_equal():
    def model(widths):
        found = nn.Module()
        found.layers = nn.ModuleList(nn.Linear(8, width) for width in widths)
        return found

    assert find_equal_layers(model([8] * 9)).depth == 4
    assert find_equal_layers(model([3] + [8, 4] * 5)) == EqualLayers(path="layers", count=11, period=2)
    assert find_equal_layers(model([8] * 8 + [9])) is None
    assert find_equal_layers(model([8] * 4)) is None
    assert find_layers(model([8] * 4)) == "layers"
    assert find_layers(nn.Linear(2, 2)) is None
    frozen = model([8] * 9)
    frozen.layers[5].requires_grad_(False)
    assert find_equal_layers(frozen) is None
