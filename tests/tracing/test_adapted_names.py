"""Names of operators are those of `named_modules()`, also where a library holds the model in a way of its own."""

import peft
import torch
import transformers

import monetlite


def test_operators_of_an_adapted_model_are_called_after_its_modules():
    config = transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32, n_positions=16)
    lora = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    model = peft.get_peft_model(transformers.GPT2LMHeadModel(config), lora).train()
    tokens = torch.randint(0, 32, (2, 8))
    graph = monetlite.trace(model, {"input_ids": tokens, "labels": tokens})
    modules = dict(model.named_modules())
    named = {operator.name for operator in graph.operators}
    layers = [name for name, module in modules.items() if isinstance(module, torch.nn.Linear | torch.nn.LayerNorm)]
    assert len(layers) > 4
    assert named >= {layer for layer in layers if "lm_head" not in layer}
    assert not [name for name in named if "_modules" in name or "__dict__" in name]
