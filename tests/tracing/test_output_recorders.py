"""Hooks by which transformers models record what their layers give, where the model is captured in pieces."""

import copy
import re
import warnings
from typing import Any

import pytest
import torch
from small_models import tiny_transformer
from torch import nn

import monetlite

LAYERS = 4


class Branches(nn.Module):
    """A layer with a branch on its input, which ends a piece."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x * 2 if x.sum() > 1e9 else x)


def llama(layers: int = LAYERS) -> tuple[Any, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model: Any
    model, inputs = tiny_transformer("llama", layers)
    model.model.layers[0].mlp = Branches(model.model.layers[0].mlp)
    return model, inputs


def trained(model: nn.Module, inputs: dict[str, torch.Tensor], recorded: bool) -> list[torch.Tensor]:
    model.zero_grad()
    output = model(**inputs, output_hidden_states=recorded)
    states = output.get("hidden_states") or ()
    assert len(states) == (LAYERS + 1) * recorded
    output["loss"].backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return [item.detach() for item in (output["loss"], *states, *gradients) if item is not None]


@pytest.mark.thorough
@pytest.mark.parametrize("recorded", [False, True])
def test_recording_ends_no_piece(recorded: bool):
    model, inputs = llama()
    trained(model, inputs, True)  # which puts the hooks on
    expected = trained(copy.deepcopy(model), inputs, recorded)
    planned = monetlite.within(model, budget="200%", device="rtx-4090", time_limit=0.1, wait=True)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(4):
            for ours, plain in zip(trained(planned, inputs, recorded), expected, strict=True):
                torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-7)
    (text,) = (str(item.message) for item in told if "can't be captured whole" in str(item.message))
    pieces = re.search(r"trains in (\d+) pieces", text)
    assert pieces is not None
    assert int(pieces[1]) < 2 * LAYERS, "each layer ends pieces"
    assert "output_capturing" not in text


@pytest.mark.thorough
def test_a_model_around_a_planned_layer_records_what_is_in_it():
    model, inputs = llama(layers=2)
    model.set_attn_implementation("eager")
    expected = copy.deepcopy(model)(**inputs, output_attentions=True).attentions
    monetlite.within(model.model.layers[0], budget="200%", device="rtx-4090", time_limit=0.1, wait=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            output = model(**inputs, output_attentions=True)
            output.loss.backward()
            assert len(output.attentions) == 2
            for ours, plain in zip(output.attentions, expected, strict=True):
                torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-7)
