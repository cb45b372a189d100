"""Solve and run several models at several budgets on this CPU, and check every promise that a schedule makes.

    python scripts/check_models.py [--model NAME ...] [--percent 70 50 40] [--time-limit 15] [--output FILE.md]

Each row is one schedule, solved from measured costs and run for a training step beside plain training from
the same seed: largest relative difference of any gradient or buffer, whether the generator is left the same,
measured peak against the budget and the prediction, and step time against plain training.
"""

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
from table_report import add_output, write_table
from torch import nn

import monetlite
from monetlite.core.errors import InfeasibleBudget
from monetlite.models import build_model


def vision(name: str, batch: int, size: int) -> Callable[[], tuple[nn.Module, Any]]:
    def build() -> tuple[nn.Module, Any]:
        built = build_model(name, batch=batch, input_size=(size, size))
        return built.model, built.example_inputs

    return build


def language(kind: str) -> Callable[[], tuple[nn.Module, Any]]:
    def build() -> tuple[nn.Module, Any]:
        import transformers

        vocabulary = 1000
        tokens = torch.randint(0, vocabulary, (8, 128))
        special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
        shape = {
            "hidden_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "vocab_size": vocabulary,
        }
        if kind == "gpt2":
            config = transformers.GPT2Config(n_layer=4, n_embd=256, n_head=4, vocab_size=vocabulary, **special)
            return transformers.GPT2LMHeadModel(config).train(), {"input_ids": tokens, "labels": tokens}
        if kind == "bert":
            config = transformers.BertConfig(**shape, intermediate_size=1024)
            model = transformers.BertForSequenceClassification(config).train()
            return model, {"input_ids": tokens, "labels": torch.randint(0, 2, (8,))}
        config = transformers.LlamaConfig(**shape, intermediate_size=512, num_key_value_heads=2, **special)
        return transformers.LlamaForCausalLM(config).train(), {"input_ids": tokens, "labels": tokens}

    return build


def vit() -> tuple[nn.Module, Any]:
    import transformers

    config = transformers.ViTConfig(
        hidden_size=192,
        num_hidden_layers=4,
        num_attention_heads=3,
        intermediate_size=768,
        image_size=64,
        patch_size=4,
    )
    model = transformers.ViTForImageClassification(config).train()
    return model, {"pixel_values": torch.randn(8, 3, 64, 64), "labels": torch.randint(0, 2, (8,))}


MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "resnet18": vision("resnet18", 16, 128),
    "resnet50": vision("resnet50", 8, 160),
    "mobilenet_v2": vision("mobilenet_v2", 16, 128),
    "densenet121": vision("densenet121", 8, 128),
    "unet": vision("unet", 1, 192),
    "gpt2": language("gpt2"),
    "bert": language("bert"),
    "llama": language("llama"),
    "vit": vit,
}


def check(name: str, percents: list[int], time_limit: float, repeats: int) -> Iterator[str]:
    """Rows for one model."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    profile = monetlite.profile(monetlite.trace(model, inputs))
    plain_bytes = 0
    for percent in [1000, *percents]:
        budget: str | int = f"{percent}%" if not plain_bytes else plain_bytes * percent // 100
        try:
            schedule = monetlite.solve(profile, budget, time_limit=time_limit)
        except InfeasibleBudget as error:
            reached = f"{error.reached_bytes / 2**20:.0f}" if error.reached_bytes else "?"
            proof = f"infeasible: proven below {error.proven_bytes / 2**20:.0f}, reached {reached} MiB"
            yield f"| {name} | {percent}% | {proof} | | | | | | |"
            continue
        report = monetlite.verify(model, schedule, inputs, repeats=repeats)
        plain_bytes = plain_bytes or report.plain_peak_bytes
        label = "none" if percent == 1000 else f"{percent}%"
        yield (
            f"| {name} | {label} | {schedule.budget_bytes / 2**20:.0f} | {report.peak_bytes / 2**20:.1f} "
            f"| {report.peak_bytes / schedule.peak_bytes - 1:+.2%} "
            f"| {report.largest_difference:.0e}{'' if report.random_state else ' RNG'} "
            f"| {report.step_ms / report.plain_step_ms:.2f} | {1 + schedule.overhead:.2f} "
            f"| {schedule.gap:.1%} {'' if report.passed else 'FAIL'} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", choices=list(MODELS))
    parser.add_argument("--percent", type=int, nargs="+", default=[70, 50, 40])
    parser.add_argument("--time-limit", type=float, default=15.0)
    parser.add_argument("--repeats", type=int, default=5)
    add_output(parser)
    args = parser.parse_args()
    write_table(
        "Every promise of a schedule, checked",
        f"Budgets are percentages of plain training's measured peak; {args.time_limit:.0f} s to solve; step times are "
        f"medians of {args.repeats}, taken in turn.",
        "| model | budget | budget, MiB | measured peak, MiB | against prediction | difference | step, of plain "
        "| predicted | gap |",
        (row for name in args.model or MODELS for row in check(name, args.percent, args.time_limit, args.repeats)),
        args.output,
        left=2,
    )


if __name__ == "__main__":
    main()
