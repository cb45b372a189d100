"""Names of operators are those of `named_modules()`, also where a library holds the model in a way of its own."""

import peft
import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional

import monetlite


class Nested(nn.Module):
    """A layer in containers, one that a plain list holds too, and a weight of its own."""

    def __init__(self):
        super().__init__()
        block = nn.ModuleDict({"norm-1": nn.LayerNorm(8), "mlp": nn.Sequential(nn.Linear(8, 8), nn.GELU())})
        self.blocks = nn.ModuleList([block])
        self.order = [nn.Linear(8, 8)]
        self.head = self.order[0]
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        for block in self.blocks:
            x = x + block["mlp"](block["norm-1"](x))
        return functional.linear(self.order[0](x), self.weight).sum()


class Passing(nn.Module):
    """A wrapper that passes on what it lacks, as wrappers do that people write."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *args):
        return self.inner(*args)


@pytest.mark.parametrize(
    ("wrap", "before"),
    [(lambda model: model, ""), (Passing, "inner."), (nn.DataParallel, "module."), (torch.compile, "")],
)
def test_operators_are_called_after_modules_however_these_are_reached(wrap, before):
    graph = monetlite.trace(wrap(Nested().train()), torch.randn(4, 8))
    named = {operator.name for operator in graph.operators}
    layers = ("blocks.0.norm-1", "blocks.0.mlp.0", "blocks.0.mlp.1", "head")
    assert named >= {f"{before}{layer}" for layer in layers}
    own = {f"{before}{name}".rstrip(".") for name, _ in Nested().named_modules()} | {""}
    assert {operator.module for operator in graph.operators} <= own


@pytest.mark.thorough
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
