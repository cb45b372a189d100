"""Small models that between them have what real ones have, and one training step of any of them."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree


class SmallCNN(nn.Module):
    """Convolution, batch norm, ReLU in three spellings, max pooling, dropout, a residual, a linear head."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.pool = nn.MaxPool2d(2)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, channels, 3, padding=1, stride=2)
        self.relu = nn.ReLU(inplace=True)
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(channels, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(self.relu(self.bn1(self.stem(x))))
        x = F.relu(x + self.bn2(self.conv2(x)))
        x = self.dropout(torch.relu(self.conv3(x)))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class TinyCNN(nn.Module):
    """The least that keeps statistics and draws: a convolution, batch norm, ReLU, dropout, a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.dropout, self.head = nn.Dropout(0.3), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.dropout(torch.relu(self.bn1(self.stem(x)))).mean((2, 3)))


class Elementwise(nn.Module):
    """Activation functions and arithmetic whose operands die, so that in-place variants are legal."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        functions = (F.gelu, F.silu, torch.sigmoid, torch.tanh, F.relu6, F.leaky_relu, F.elu, torch.exp)
        for layer, function in zip(self.layers, functions, strict=True):
            y = function(layer(x) * 0.5)
            x = (x + y * x) / 2 - y.abs().sqrt() * 0.1
        return x


class Reads(nn.Module):
    """A branch on a tensor's value, for which it can't be captured whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).relu()
        return self.last(h) if h.mean().item() < 1e9 else h


class TwoInputsTwoOutputs(nn.Module):
    """Several inputs, one of them of integers; several outputs, nested; tied weights; a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.mix = nn.Linear(8, 8)
        self.out = nn.Linear(8, 11, bias=False)
        self.out.weight = self.embed.weight
        self.register_buffer("scale", torch.full((8,), 0.5))

    def forward(self, tokens: torch.Tensor, extra: torch.Tensor) -> dict[str, Any]:
        x = torch.tanh(self.mix(self.embed(tokens)) * self.scale + extra[:, None])
        return {"logits": self.out(x), "parts": (x, x.mean(1))}


class WithLoss(nn.Module):
    """A model that returns its loss beside its logits, as transformers' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 12), nn.Linear(12, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.second(F.gelu(self.first(x)))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def tiny_transformer(kind: str, layers: int = 2) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """GPT-2, BERT, Llama or ViT with a few narrow layers (dropout where the family has it), and inputs."""
    import transformers

    tokens = torch.randint(0, 90, (2, 12))
    text = {"input_ids": tokens, "labels": tokens.clone()}
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=90, n_positions=16, n_embd=16, n_layer=layers, n_head=2, bos_token_id=1, eos_token_id=2
        )
        return transformers.GPT2LMHeadModel(config).train(), text
    if kind == "bert":
        config = transformers.BertConfig(
            vocab_size=90,
            hidden_size=16,
            num_hidden_layers=layers,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=16,
        )
        return transformers.BertForMaskedLM(config).train(), text
    if kind == "llama":
        config = transformers.LlamaConfig(
            vocab_size=90,
            hidden_size=16,
            num_hidden_layers=layers,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=16,
        )
        return transformers.LlamaForCausalLM(config).train(), text
    config = transformers.ViTConfig(
        image_size=16,
        patch_size=4,
        hidden_size=16,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=32,
        hidden_dropout_prob=0.1,
        num_labels=5,
    )
    images = {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([1, 4])}
    return transformers.ViTForImageClassification(config).train(), images


@dataclass
class After:
    """What a training step leaves behind."""

    outputs: list[torch.Tensor]
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]
    random_state: torch.Tensor


def scalar(output: Any) -> torch.Tensor:
    """A model's own loss, or a weighted sum of squares of every output (no two outputs weigh the same)."""
    if isinstance(output, dict) and "loss" in output:
        return output["loss"]
    tensors = [item for item in pytree.tree_leaves(output) if isinstance(item, torch.Tensor) and item.requires_grad]
    return sum((number + 1) * item.float().square().mean() for number, item in enumerate(tensors))


def fresh(inputs: Any) -> Any:
    """The same inputs as new leaves."""
    return pytree.tree_map_only(
        torch.Tensor, lambda item: item.detach().clone().requires_grad_(item.requires_grad), inputs
    )


def call(model: nn.Module, inputs: Any) -> Any:
    return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def step(model: nn.Module, inputs: Any, seed: int = 3) -> After:
    """One step of training from a seed, on inputs of its own."""
    inputs = fresh(inputs)
    for parameter in model.parameters():
        parameter.grad = None
    torch.manual_seed(seed)
    output = call(model, inputs)
    scalar(output).backward()
    leaves = [item for item in pytree.tree_leaves(inputs) if isinstance(item, torch.Tensor)]
    named = [*model.named_parameters(), *((f"input{number}", item) for number, item in enumerate(leaves))]
    return After(
        outputs=[item.detach() for item in pytree.tree_leaves(output) if isinstance(item, torch.Tensor)],
        gradients={name: None if item.grad is None else item.grad.clone() for name, item in named},
        buffers={name: item.clone() for name, item in model.named_buffers()},
        random_state=torch.get_rng_state(),
    )


def twin(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def assert_same(found: After, expected: After, within: float = 0.0) -> None:
    """Bit for bit the same step, or with gradients and outputs within a share of the largest of each."""
    assert torch.equal(found.random_state, expected.random_state), "the generator is left in another state"
    assert found.gradients.keys() == expected.gradients.keys()
    assert len(found.outputs) == len(expected.outputs)
    compared = [(f"output {i}", *pair) for i, pair in enumerate(zip(found.outputs, expected.outputs, strict=True))]
    compared += [(name, found.gradients[name], gradient) for name, gradient in expected.gradients.items()]
    for name, ours, theirs in compared:
        assert (ours is None) == (theirs is None), name
        if theirs is not None:
            _assert_close(name, ours, theirs, within)
    assert found.buffers.keys() == expected.buffers.keys()
    for name, buffer in expected.buffers.items():
        _assert_close(name, found.buffers[name], buffer, 0.0)


def _assert_close(name: str, ours: torch.Tensor, theirs: torch.Tensor, within: float) -> None:
    assert ours.dtype == theirs.dtype, name
    assert ours.shape == theirs.shape, name
    if within == 0.0:
        assert torch.equal(ours, theirs), f"{name}: differs by {(ours.double() - theirs.double()).abs().max()}"
    elif theirs.numel():
        largest = theirs.double().abs().max()
        assert (ours.double() - theirs.double()).abs().max() <= within * largest, name
