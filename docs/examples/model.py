"""A small language model, with batches for it. The examples share it."""

from collections.abc import Iterator

import torch
import transformers


def build() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=64, n_head=2, vocab_size=500, n_positions=64, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config).train()


def batches(steps: int = 8) -> Iterator[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        tokens = torch.randint(0, 500, (8, 64), generator=generator)
        yield {"input_ids": tokens, "labels": tokens}
