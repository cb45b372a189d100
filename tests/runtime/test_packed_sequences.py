"""transformers' masks for packed sequences: where plain training makes none, no step makes any."""

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import monetlite

IDS = torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(0))
PACKED = torch.cat([torch.arange(5), torch.arange(7)]).expand(2, -1)


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=50,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


def trained(model: torch.nn.Module, inputs: dict[str, object]) -> list[torch.Tensor]:
    output = model(**inputs)
    output["loss"].backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return [output["loss"].detach(), *(gradient for gradient in gradients if gradient is not None)]


def attention_inputs(inputs: dict[str, object]) -> set[int]:
    """The numbers of tensors that attention reads in a trace."""
    graph = monetlite.trace(llama(), inputs)
    found = [item for item in graph.operators if "attention" in item.family and item.phase == "forward"]
    assert found
    return {len(item.implementations[0].reads) for item in found}


@pytest.mark.parametrize("use_cache", [None, False])
@pytest.mark.parametrize("positions", [None, torch.arange(12).expand(2, -1), PACKED])
def test_gradients_are_plain_training_s(use_cache: bool | None, positions: torch.Tensor | None):
    """Packed sequences attend to each other in plain training, unless the cache is switched off."""
    inputs: dict[str, object] = {"input_ids": IDS, "labels": IDS}
    inputs |= {} if use_cache is None else {"use_cache": use_cache}
    inputs |= {} if positions is None else {"position_ids": positions}
    model = llama()
    expected = trained(copy.deepcopy(model), inputs)
    wrapper = monetlite.MONeTWrapper(model, budget="90%", time_limit=0.5, wait=True)
    for ours, plain in zip(trained(wrapper, inputs), expected, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-7)


def test_a_mask_is_made_only_where_plain_training_may_make_one():
    plainly = {"input_ids": IDS, "labels": IDS}
    without = attention_inputs(plainly)
    assert attention_inputs(plainly | {"use_cache": False}) == without
    assert attention_inputs(plainly | {"position_ids": PACKED}) == without
    assert attention_inputs(plainly | {"position_ids": PACKED, "use_cache": False}) != without
