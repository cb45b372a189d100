"""Language models with their loss, side by side: plain training, a loss tiled by hand, and monetlite.

    python scripts/bench_language.py [--models gpt2 llama qwen3 gemma2 t5] [--budget 65%] [--rounds 9]
        [--time-limit 20] [--tolerance 1e-5] [--smallest] [--output FILE.md]
    python scripts/bench_language.py --models long --batch 1 --length 8192 --budget 50%

Peaks and step times are measured in one run, in turn; ratios are of medians. The loss tiled by hand is what trainers
offer: head and cross-entropy some rows at a time, with their gradients made in the forward pass. `--smallest` also
looks for the smallest budget with and without tiles. `long` has two layers and few words, so that what one layer
makes on the way is most of a long sequence's memory.
"""

import argparse
import copy
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from table_report import add_output, write_table
from torch import nn

import monetlite
from monetlite.checking.trainee import Trainee, default_loss, step_times_ms
from monetlite.core.errors import InfeasibleBudget
from monetlite.core.units import parse_budget

ROWS = 128
"""Rows of a tile of the loss tiled by hand."""
BY_HAND = "a loss tiled by hand"
WIDTH, HEADS, LAYERS = 384, 6, 6
LONG_WORDS = 1000


class LongLayer(nn.Module):
    """A layer as Llama has it, with causal attention that takes no mask."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.query, self.key, self.value, self.result = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.before(x)
        query, key, value = (
            layer(hidden).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.result(mixed.transpose(1, 2).flatten(2))
        hidden = self.after(x)
        made: torch.Tensor = x + self.down(nn.functional.silu(self.gate(hidden)) * self.up(hidden))
        return made


class LongSequences(nn.Module):
    """Two layers, and a head of few words."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Embedding(LONG_WORDS, WIDTH)
        self.layers = nn.Sequential(LongLayer(), LongLayer(), nn.RMSNorm(WIDTH))
        self.head = nn.Linear(WIDTH, LONG_WORDS, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.layers(self.body(input_ids)))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.roll(-1, 1).flatten())}


def models() -> dict[str, Callable[[], nn.Module]]:
    """Small models of each shape."""
    shared = {
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "intermediate_size": 3 * WIDTH,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    grouped = {**shared, "num_key_value_heads": 2, "head_dim": WIDTH // HEADS}
    return {
        "gpt2": lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_layer=LAYERS, n_embd=WIDTH, n_head=HEADS)
        ),
        "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**grouped, vocab_size=32000)),
        "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**grouped, vocab_size=50000)),
        "gemma2": lambda: transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**grouped, vocab_size=50000)),
        "long": LongSequences,
        "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**shared)),
        "t5": lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                d_model=WIDTH, d_ff=3 * WIDTH, num_layers=LAYERS // 2, num_heads=HEADS, decoder_start_token_id=0
            )
        ),
    }


class TiledLoss(torch.autograd.Function):
    """Mean cross-entropy of `hidden @ weight.T`, some rows at a time, with its gradients made on the way."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        count = (labels != -100).sum()
        loss = torch.zeros(())
        of_hidden, of_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        for start in range(0, len(hidden), ROWS):
            some = slice(start, start + ROWS)
            rows = hidden[some].detach()
            logits = (rows @ weight.T).requires_grad_()
            with torch.enable_grad():
                part = nn.functional.cross_entropy(logits, labels[some], reduction="sum") / count
            (slope,) = torch.autograd.grad(part, logits)
            loss += part.detach()
            of_hidden[some] = slope @ weight
            of_weight.addmm_(slope.T, rows)
        ctx.save_for_backward(of_hidden, of_weight)
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        of_hidden, of_weight = ctx.saved_tensors
        return of_hidden.mul_(gradient), of_weight.mul_(gradient), None


class TiledByHand(nn.Module):
    """A causal model with its loss tiled by hand."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.model.base_model(input_ids=input_ids, use_cache=False)[0]
        targets = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].reshape(-1)
        flat = hidden.reshape(-1, hidden.shape[-1])
        return {"loss": TiledLoss.apply(flat, self.model.lm_head.weight, targets)}  # type: ignore[no-untyped-call]


def rows_of(name: str, model: nn.Module, args: argparse.Namespace) -> Iterator[str]:
    """The rows of the table for a model."""
    generator = torch.Generator().manual_seed(args.seed)
    words = LONG_WORDS if name == "long" else 30000
    ids = torch.randint(3, words, (args.batch, args.length), generator=generator)
    inputs = {"input_ids": ids, "labels": ids}
    plain = Trainee(copy.deepcopy(model), (), inputs, default_loss, "cpu")
    plain_bytes = plain.memory().peak_bytes
    budget_bytes = parse_budget(args.budget, plain_peak_bytes=plain_bytes)
    options = {"tolerance": args.tolerance, "time_limit": args.time_limit}
    schedule = monetlite.optimize(model, inputs, budget_bytes, **options)
    contenders = {
        "plain training": plain,
        f"monetlite, {args.budget}": Trainee(
            monetlite.MONeTWrapper(copy.deepcopy(model), schedule), (), inputs, default_loss, "cpu"
        ),
    }
    if name in ("gpt2", "llama", "qwen3"):
        by_hand = Trainee(TiledByHand(copy.deepcopy(model)), (), inputs, default_loss, "cpu")
        contenders[BY_HAND] = by_hand
        at_hands = monetlite.optimize(model, inputs, by_hand.memory().peak_bytes, **options)
        contenders["monetlite, at its peak"] = Trainee(
            monetlite.MONeTWrapper(copy.deepcopy(model), at_hands), (), inputs, default_loss, "cpu"
        )
    peaks = {title: item.memory().peak_bytes for title, item in contenders.items()}
    times = step_times_ms(list(contenders.values()), args.rounds)
    medians = dict(zip(contenders, map(statistics.median, times), strict=True))
    spread = dict(zip(contenders, (max(each) / min(each) for each in times), strict=True))
    expected = plain.snapshot(args.seed)
    for title, item in contenders.items():
        taken = item.snapshot(args.seed)
        gradients = {
            key.removeprefix("model.") if title == BY_HAND else key: of for key, of in taken.gradients.items()
        }
        names = gradients.keys() & expected.gradients.keys()
        apart = max((relative(gradients[key], expected.gradients[key]) for key in names), default=float("nan"))
        predicted = {f"monetlite, {args.budget}": schedule, "monetlite, at its peak": None}.get(title)
        off = "" if predicted is None else f"{predicted.peak_bytes / peaks[title] - 1:+.1%}"
        yield (
            f"| {name} | {title} | {peaks[title] / 1e6:.0f} MB | {peaks[title] / plain_bytes:.2f} | "
            f"{medians[title]:.0f} ms | {medians[title] / medians['plain training']:.3f} | "
            f"{spread[title]:.2f} | {off} | {apart:.0e} |"
        )
    if args.smallest:
        least = {tolerance: smallest(model, inputs, tolerance) for tolerance in (0.0, args.tolerance)}
        text = ", ".join(f"{size / 1e6:.0f} MB at tolerance {tolerance:g}" for tolerance, size in least.items())
        yield f"| {name} | smallest peak found | {text} | | | | | | |"


def relative(taken: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, as a fraction of the largest expected number."""
    largest = expected.abs().max().item()
    return (taken - expected).abs().max().item() / largest if largest else 0.0


def smallest(model: nn.Module, inputs: Any, tolerance: float) -> int:
    """The smallest peak that the search finds."""
    try:
        schedule = monetlite.optimize(model, inputs, 1, tolerance=tolerance, time_limit=10)
    except InfeasibleBudget as error:
        return error.reached_bytes or error.proven_bytes
    return schedule.peak_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made = models()
    parser.add_argument("--models", nargs="+", choices=made, default=["gpt2"])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--budget", default="65%")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--time-limit", type=float, default=20)
    parser.add_argument("--tolerance", type=float, default=1e-5)
    parser.add_argument("--smallest", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    add_output(parser)
    args = parser.parse_args()

    def rows() -> Iterator[str]:
        for name in args.models:
            torch.manual_seed(args.seed)
            yield from rows_of(name, made[name]().train(), args)

    write_table(
        "Language models with their loss",
        f"{args.batch} x {args.length} tokens, {args.rounds} rounds in turn, tolerance {args.tolerance:g}.",
        "| model | training | peak | of plain | step | of plain | slowest / fastest | predicted | gradients apart |",
        rows(),
        args.output,
        left=2,
    )


if __name__ == "__main__":
    main()
