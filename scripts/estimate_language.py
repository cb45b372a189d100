"""Language models that are fine-tuned on one GPU: the smallest budget, and the fastest schedule, estimated.

    python scripts/estimate_language.py [--device rtx-4090] [--budget 24GB] [--models llama-1b llama-8b-lora]
        [--time-limit 60] [--output FILE.md]

A Llama-3.2-1B-shaped model, all of it trained at 4 x 2048 tokens, and a Llama-3.1-8B-shaped one with LoRA on every
linear layer at 1 x 8192; both in bfloat16 with AdamW. Each as it is, with head and loss in tiles, and with chains of rows
in tiles besides; with and without the optimizer's step in the backward pass. Steps are traced on a CPU without memory for
weights.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import peft
import torch
import transformers
from table_report import add_output, write_table
from torch import nn

import monetlite
from monetlite.core.errors import InfeasibleBudget
from monetlite.core.graph import AS_TRACED, TILED_LOSS, TILED_ROWS, OperatorGraph
from monetlite.core.options import SolvingOptions
from monetlite.core.simulate import simulate
from monetlite.core.steps import plain_steps
from monetlite.core.units import parse_budget
from monetlite.planning.layouts import solve_layouts
from monetlite.solving.smallest import smallest_budget
from monetlite.tracing import trace_layouts

TOLERANCE = 1e-5
_SHARED = {"vocab_size": 128_256, "num_key_value_heads": 8, "max_position_embeddings": 131_072}
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def llama_1b() -> tuple[nn.Module, tuple[int, int]]:
    """Llama 3.2 1B, and its batch and length."""
    config = transformers.LlamaConfig(
        **_SHARED,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        head_dim=64,
        tie_word_embeddings=True,
    )
    return transformers.LlamaForCausalLM(config), (4, 2048)


def llama_8b_lora() -> tuple[nn.Module, tuple[int, int]]:
    """Llama 3.1 8B with LoRA of rank 16 on every linear layer, and its batch and length."""
    config = transformers.LlamaConfig(
        **_SHARED, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32
    )
    lora = peft.LoraConfig(r=16, lora_alpha=32, target_modules=LINEARS, lora_dropout=0.0)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    return peft.get_peft_model(model, lora, autocast_adapter_dtype=False), (1, 8192)


TILED = {AS_TRACED: "nothing", TILED_LOSS: "loss", TILED_ROWS: "loss, rows"}
"""What runs in tiles, by layout."""
MODELS = {"llama-1b": llama_1b, "llama-8b-lora": llama_8b_lora}


def traced(name: str, device: str) -> list[OperatorGraph]:
    """A model's step in each layout."""
    with torch.device("meta"):
        model, shape = MODELS[name]()
        model = model.to(torch.bfloat16).train()
        ids = torch.zeros(shape, dtype=torch.int64)
    return trace_layouts(model, {"input_ids": ids, "labels": ids}, list(TILED), device=device)


def rows_of(name: str, args: argparse.Namespace) -> Iterator[str]:
    """The rows of the table for a model."""
    graphs = traced(name, args.device)
    options = SolvingOptions(tolerance=TOLERANCE, time_limit=args.time_limit)
    for in_backward in (False, True):
        priced: list[Any] = [
            options.allowed(monetlite.profile(graph, args.device, optimizer="adamw", step_in_backward=in_backward))
            for graph in graphs
        ]
        plain = simulate(priced[0], plain_steps(priced[0].graph))
        for own in priced:
            least = smallest_budget(own, seconds=args.time_limit, starts=[plain_steps(own.graph)])
            try:
                layout = own.graph.layout
                schedule = solve_layouts(priced, args.budget, options, layout=layout)
                seconds = schedule.latency_ms / 1e3
                tokens = sum(item.shape[0] * item.shape[1] for item in list(own.graph.inputs.values())[:1])
                found = f"{seconds:.2f} s | {schedule.overhead:+.1%} | {tokens / seconds:.0f} | {schedule.gap:.1%}"
            except InfeasibleBudget:
                found = "nothing fits | | | "
            reached = least.smallest_reached_bytes or 0
            yield (
                f"| {name} | {TILED[own.graph.layout]} | {'yes' if in_backward else 'no'} | "
                f"{plain.peak_bytes / 1e9:.2f} GB | {reached / 1e9:.2f} GB | "
                f"{least.smallest_proven_bytes / 1e9:.2f} GB | {found} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="rtx-4090")
    parser.add_argument("--budget", default="24GB")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--time-limit", type=float, default=60)
    add_output(parser)
    args = parser.parse_args()
    parse_budget(args.budget, plain_peak_bytes=2**40)
    write_table(
        f"Fine-tunes of language models, estimated for {args.device}",
        f"Estimated, not measured. bfloat16, AdamW with its state in bfloat16, tolerance {TOLERANCE:g}, "
        f"{args.time_limit:g} s for each schedule within {args.budget}. Plain training's peak is that of the step as "
        "it is traced; overheads are over it, as if it fitted.",
        "| model | in tiles | step in backward | plain training's peak | smallest peak found | "
        f"nothing fits below | step within {args.budget} | over plain | tokens/s | gap |",
        (row for name in args.models for row in rows_of(name, args)),
        args.output,
        left=3,
    )


if __name__ == "__main__":
    main()
