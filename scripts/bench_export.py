"""Exported plans side by side with checkpointing by hand, and `torch.compile` within a budget, into one dated file.

    python scripts/bench_export.py [--models gpt2 llama vit] [--layers 6] [--width 384] [--rounds 9] [--steps 20]
        [--parts plans trainer partitioner] [--output FILE.md]

Each model runs in a process of its own. `plans`: for the peak of every setting of transformers' checkpointing and of
policies made by hand, the exported plan within that peak: predicted and measured peaks, step times in turn as ratios
to plain training, gradients compared bit for bit. The plan's step runs where monetlite can't be imported, too.
`trainer`: steps of transformers' Trainer, with and without a plan. `partitioner`: peaks of `monetlite.compile_within`
and of torch's own budget, by the same partitioner run by PyTorch's kernels.
"""

import argparse
import copy
import datetime
import functools
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import monetlite
from monetlite.checking.comparison.bench import environment
from monetlite.checking.trainee import Trainee, default_loss, step_times_ms
from monetlite.core.errors import InfeasibleBudget
from monetlite.core.options import PricingOptions
from monetlite.exporting.checkpoint_search import CheckpointSearch, FoundPlan
from monetlite.exporting.eager_step import record_step
from monetlite.exporting.exported_plan import ExportedPlan, price_step
from monetlite.exporting.plan_file import Target, plan_text
from monetlite.fx.torch_internals.torch_aot import aot_settings
from monetlite.fx.torch_internals.torch_inductor import partitioning_backend
from monetlite.profiling.memory_records import peak_growth_bytes

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "benchmarks"
SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05)
ATTENTION = ("attention",)
PRODUCTS = (*ATTENTION, "mm", "bmm", "convolution")
ALONE = """
import sys
sys.modules["monetlite"] = None
sys.path[:0] = {paths!r}
import torch, plan
torch.set_num_threads({threads})
torch.manual_seed(0)
model, inputs, gradients = torch.load({file!r}, weights_only=False)
plan.apply(model)
model(**inputs).loss.backward()
same = [torch.equal(item.grad, gradients[name]) for name, item in model.named_parameters()]
print("the same" if all(same) else "other", "gradients")
"""


def built(name: str, layers: int, width: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """A small model of a shape, and inputs."""
    torch.manual_seed(0)
    heads = max(1, width // 64)
    shared = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    if name == "vit":
        config: Any = transformers.ViTConfig(
            **shared, intermediate_size=4 * width, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
        )
        images = {"pixel_values": torch.randn(8, 3, 224, 224), "labels": torch.randint(0, 2, (8,))}
        return transformers.ViTForImageClassification(config).train(), images
    tokens = torch.randint(0, 10_000, (4, 256))
    ends = {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
    if name == "gpt2":
        off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = transformers.GPT2Config(
            n_layer=layers, n_embd=width, n_head=heads, vocab_size=10_000, **ends, **off
        )
        model: Any = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            **shared, num_key_value_heads=max(1, heads // 2), intermediate_size=3 * width, vocab_size=10_000, **ends
        )
        model = transformers.LlamaForCausalLM(config)
    return model.train(), {"input_ids": tokens, "labels": tokens}


def selective(words: tuple[str, ...]) -> Callable[[], Any]:
    """Contexts that save the results of operators whose names have one of these words."""

    def policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = str(operator).split(".")[1]
        kept = any(word in name for word in words)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, policy)


def by_hand(model: Any, layers: int) -> Iterator[tuple[str, Any]]:
    """Copies of a model by transformers' own settings, and by policies made by hand."""
    settings: dict[str, tuple[dict[str, Any], int]] = {
        f"every_n_layers={every}": ({}, every) for every in range(1, layers + 1) if every < 4 or every == layers
    }
    settings["attention saved"] = {"context_fn": selective(ATTENTION)}, 1
    settings["products and attention saved"] = {"context_fn": selective(PRODUCTS)}, 1
    for name, (options, every) in settings.items():
        copied = copy.deepcopy(model)
        copied.activation_checkpointing_enable({"use_reentrant": False, **options}, every_n_layers=every)
        yield name, copied


def trainee(model: Any, inputs: dict[str, torch.Tensor]) -> Trainee:
    return Trainee(model, (), inputs, default_loss, "cpu")


def plan_file(search: CheckpointSearch, found: FoundPlan, name: str, budget_bytes: int) -> str:
    """The text of a plan's file, beside a schedule of the same budget that is not solved for here."""
    plain = search.plain
    exported = ExportedPlan(
        step=search.step,
        found=found,
        plain=plain,
        every=search.every,
        budget_bytes=budget_bytes,
    )
    schedule = monetlite.Schedule(
        name=name, fingerprint="", structure="", operators=0, inputs={}, choices=monetlite.core.choices.Choices(),
        budget_bytes=budget_bytes, peak_bytes=found.peak_bytes, latency_ms=found.latency_ms, lower_bound_ms=0.0,
        status=monetlite.core.schedule.Status.FEASIBLE, plain_peak_bytes=plain.peak_bytes,
        plain_latency_ms=plain.latency_ms, device="cpu", kind="measured", solver="", seconds=0.0,
    )  # fmt: skip
    return plan_text(exported, schedule, Target.TRANSFORMERS)


def applied(text: str, model: Any) -> Any:
    """A copy of a model with the plan of a file's text."""
    names: dict[str, Any] = {}
    exec(compile(text, "plan.py", "exec"), names)  # a file that has just been written here
    return names["apply"](copy.deepcopy(model))


def alone(text: str, model: Any, inputs: dict[str, torch.Tensor], gradients: dict[str, torch.Tensor]) -> str:
    """The outcome of a plan's step in a process where monetlite can't be imported."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "plan.py").write_text(text, encoding="utf-8")
        file = str(Path(folder, "step.pt"))
        torch.save((model, inputs, gradients), file)
        code = ALONE.format(paths=[folder], file=file, threads=torch.get_num_threads())
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        return done.stdout.strip().splitlines()[-1] if done.returncode == 0 else done.stderr[-500:]


def plans(name: str, args: argparse.Namespace) -> Iterator[str]:
    """The table of a model: each setting made by hand, and the plan within its peak."""
    model, inputs = built(name, args.layers, args.width)
    plain = trainee(copy.deepcopy(model), inputs)
    expected = plain.snapshot(0).gradients
    step = record_step(model, inputs, default_loss)
    search = CheckpointSearch(price_step(step, PricingOptions()))
    yield "| setting | its peak | its step | the plan's peak | predicted | its step | gradients |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | --- |"
    text = ""
    for setting, copied in by_hand(model, args.layers):
        hand = trainee(copied, inputs)
        hand.step()
        budget_bytes = hand.memory().peak_bytes
        found = search.solve(budget_bytes + budget_bytes // 10_000)  # as exact as a measured peak is
        text = plan_file(search, found, name, budget_bytes)
        ours = trainee(applied(text, model), inputs)
        same = all(torch.equal(item, expected[key]) for key, item in ours.snapshot(0).gradients.items())
        measured = ours.memory().peak_bytes
        base_ms, hand_ms, ours_ms = map(statistics.median, step_times_ms([plain, hand, ours], args.rounds))
        yield (
            f"| {setting} | {budget_bytes / 1e6:.2f} MB | ×{hand_ms / base_ms:.3f} | {measured / 1e6:.2f} MB "
            f"({measured / budget_bytes - 1:+.2%}) | {found.peak_bytes / measured - 1:+.3%} | "
            f"×{ours_ms / base_ms:.3f} | {'the same bits' if same else 'OTHER'} |"
        )
    memory = plain.memory().peak_bytes
    yield ""
    yield f"Plain training takes {memory / 1e6:.2f} MB; {search.plain.peak_bytes / memory - 1:+.3%} predicted. The"
    yield f"last plan, in a process where monetlite can't be imported: {alone(text, model, inputs, expected)}."


def trainer(name: str, args: argparse.Namespace) -> Iterator[str]:
    """Losses and peaks of steps that transformers' Trainer takes, with a plan and without."""
    model, inputs = built(name, args.layers, args.width)
    rows = [{key: item[at] for key, item in inputs.items()} for at in range(len(next(iter(inputs.values()))))]
    search = CheckpointSearch(price_step(record_step(model, inputs, default_loss), PricingOptions()))
    found = search.solve((search.smallest().peak_bytes + search.plain.peak_bytes) // 2)
    planned = applied(plan_file(search, found, name, found.peak_bytes), model)
    losses: list[list[float]] = []
    peaks: list[int] = []

    class Measured(transformers.Trainer):  # type: ignore[misc]  # transformers is read without types
        """Measures the memory of its last step."""

        def training_step(self, *given: Any, **named: Any) -> Any:
            if self.state.global_step < args.steps - 1:
                return super().training_step(*given, **named)
            made: list[Any] = []
            grown = peak_growth_bytes(lambda: made.append(super(Measured, self).training_step(*given, **named)))
            peaks.append(search.step.resident.total + grown)
            return made[0]

    for item in (copy.deepcopy(model), planned):
        with tempfile.TemporaryDirectory() as folder:
            options = transformers.TrainingArguments(
                folder, per_device_train_batch_size=len(rows), max_steps=args.steps, logging_steps=1, report_to=[],
                use_cpu=True, save_strategy="no", disable_tqdm=True,
            )  # fmt: skip
            run = Measured(item, options, train_dataset=rows * args.steps)
            run.remove_callback(transformers.PrinterCallback)
            run.train()
            losses.append([entry["loss"] for entry in run.state.log_history if "loss" in entry])
    yield (
        f"{len(losses[0])} steps of Trainer: {'the same losses' if losses[0] == losses[1] else 'OTHER losses'}. Its last "
        f"step takes {peaks[1] / 1e6:.2f} MB with the plan ({found.peak_bytes / peaks[1] - 1:+.3%} predicted), and "
        f"{peaks[0] / 1e6:.2f} MB without."
    )


def partitioner(name: str, args: argparse.Namespace) -> Iterator[str]:
    """Peaks of `torch.compile` within budgets: of monetlite's solver, and of torch's own."""
    model, inputs = built(name, args.layers, args.width)
    model.loss_type = "ForImageClassification" if name == "vit" else "ForCausalLM"
    own = trainee(torch.compile(copy.deepcopy(model), backend=partitioning_backend(), dynamic=False), inputs)
    own.step()
    most = own.memory().peak_bytes
    yield f"torch.compile's own choice takes {most / 1e6:.2f} MB."
    yield ""
    yield "| budget | asked of monetlite | its peak | torch's own at that share of activations |"
    yield "| ---: | ---: | ---: | ---: |"
    for share in SHARES:
        torch.compiler.reset()
        asked = int(share * most)
        try:
            ours = trainee(
                monetlite.compile_within(copy.deepcopy(model), asked, backend=partitioning_backend()), inputs
            )
            ours.step()
            peak = f"{ours.memory().peak_bytes / 1e6:.2f} MB"
        except BackendCompilerFailed as error:
            refusal = error.inner_exception
            if not isinstance(refusal, InfeasibleBudget) or refusal.reached_bytes is None:
                raise
            peak = f"refused: {refusal.reached_bytes / 1e6:.2f} MB is the least"
        torch.compiler.reset()

        def backend(graph: Any, tensors: Any, share: float = share) -> Any:
            with aot_settings(activation_memory_budget=share):
                return partitioning_backend()(graph, tensors)

        theirs = trainee(torch.compile(copy.deepcopy(model), backend=backend, dynamic=False), inputs)
        theirs.step()
        yield f"| {share:.0%} | {asked / 1e6:.2f} MB | {peak} | {theirs.memory().peak_bytes / 1e6:.2f} MB |"


PARTS = {"plans": plans, "trainer": trainer, "partitioner": partitioner}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=["gpt2", "llama", "vit"], default=["gpt2", "llama", "vit"])
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        for line in PARTS[args.one](args.models[0], args):
            print(line, flush=True)
        return 0
    target = args.output or FOLDER / f"export_cpu_{datetime.date.today()}.md"
    sizes = ["--layers", args.layers, "--width", args.width, "--rounds", args.rounds, "--steps", args.steps]
    lines = [
        f"# Plans in other people's tools, {datetime.date.today()}",
        "",
        f"Written by `scripts/bench_export.py`: {args.layers} layers, {args.width} wide; GPT-2 and Llama on 4×256 tokens, ",
        "ViT on 8 images. Step times are ratios to plain training's, as medians of steps taken in turn.",
        "",
        *(f"- {key}: {value}" for key, value in environment("cpu").items()),
    ]
    failed = 0
    for name in args.models:
        for part in args.parts:
            command = [sys.executable, __file__, "--one", part, "--models", name, *map(str, sizes)]
            print(f"$ {' '.join(command)}", flush=True)
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            failed += done.returncode != 0
            found = done.stdout.strip() if done.returncode == 0 else f"failed: {done.stderr[-500:]}"
            print(found, flush=True)
            lines += ["", f"## {name}: {part}", "", found]
            target.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
