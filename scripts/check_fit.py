"""Ask `monetlite fit` about many trainings, and check the answers.

    python scripts/check_fit.py [--only NAME ...] [--solve-seconds 60] [--output FILE.md]

Each question is asked by the command line, in a process of its own. `solve` is asked about the same step and budget:
it should predict the same peak for plain training, and say no where `fit` says no. Small models are trained here, on
the CPU, as they are, with the layers checkpointed that `fit` names, and by monetlite within the peak that `fit` found.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from table_report import add_output, write_table

import monetlite
from monetlite.checking.trainee import Trainee, default_loss
from monetlite.models import build_model

MONETLITE = [sys.executable, "-c", "from monetlite.cli import run; run()"]
QUESTIONS = {
    "llama-1b, full": "hf:meta-llama/Llama-3.2-1B --full --gpu rtx-4090 --sequence-length 4096 --optimizer adamw8bit",
    "llama-3b, lora": "hf:meta-llama/Llama-3.2-3B --lora 16 --gpu rtx-3090 --sequence-length 8192",
    "llama-8b, lora": "hf:meta-llama/Llama-3.1-8B --lora 16 --gpu a100-40gb --sequence-length 8192 --batch 2",
    "llama-70b, lora": "hf:meta-llama/Llama-3.1-70B --lora 16 --gpu h100 --sequence-length 4096",
    "llama-70b, full": "hf:meta-llama/Llama-3.1-70B --full --gpu h100 --sequence-length 2048",
    "llama-2-13b, lora": "hf:meta-llama/Llama-2-13b-hf --lora 8 --gpu a100-40gb --sequence-length 4096",
    "mistral-7b, lora": "hf:mistralai/Mistral-7B-v0.3 --lora 16 --gpu rtx-4090 --sequence-length 4096",
    "gemma-2-2b, full": "hf:google/gemma-2-2b --full --gpu a100-80gb --sequence-length 8192",
    "gemma-2-9b, lora": "hf:google/gemma-2-9b --lora 16 --gpu a100-40gb --sequence-length 4096",
    "gemma-3-1b, full": "hf:google/gemma-3-1b-pt --full --gpu rtx-4090 --sequence-length 4096",
    "phi-3-mini, lora": "hf:microsoft/Phi-3-mini-4k-instruct --lora 16 --gpu rtx-4090 --sequence-length 4096",
    "qwen3-8b, lora": "hf:Qwen/Qwen3-8B --lora 16 --gpu rtx-4090 --sequence-length 8192 --optimizer adamw8bit",
    "gpt2-xl, full": "hf:openai-community/gpt2-xl --full --gpu rtx-3090 --batch 4 --sequence-length 1024",
    "vit-large, full": "hf:google/vit-large-patch16-224 --full --gpu rtx-3060 --batch 64",
    "bert-large, full": "hf:google-bert/bert-large-uncased --full --gpu rtx-3060 --batch 32 --sequence-length 512",
}
SMALL = {
    "distilgpt2": ("hf:distilbert/distilgpt2", 8, 256),
    "gpt2": ("hf:openai-community/gpt2", 8, 256),
    "bert-base": ("hf:google-bert/bert-base-uncased", 16, 256),
    "distilbert": ("hf:distilbert/distilbert-base-uncased", 16, 256),
    "vit-base": ("hf:google/vit-base-patch16-224", 16, None),
    "gpt2, sizes": ("hf:openai-community/gpt2", 4, 512),
}


def asked(words: list[str], allowed: tuple[int, ...] = (0, 3)) -> tuple[dict[str, Any], float]:
    """The facts that a command prints, and the seconds that it took."""
    began = time.monotonic()
    done = subprocess.run([*MONETLITE, *words, "--json"], capture_output=True, text=True, check=False)
    seconds = time.monotonic() - began
    if done.returncode not in allowed:
        raise SystemExit(f"{' '.join(words)}\n{done.stderr}")
    return json.loads(done.stdout or "{}"), seconds


def question_row(name: str, solve_seconds: float) -> str:
    words = QUESTIONS[name].split()
    facts, seconds = asked(["fit", *words])
    plain, *others = facts["ways"]
    fastest = next((way for way in facts["ways"] if way["way"] == facts["fastest"]), None)
    layers = next((way for way in others if way["every_n_layers"]), None)
    cells = [
        name,
        f"{facts['device']}, {facts['budget_bytes'] / 1e9:.1f} GB",
        f"{seconds:.0f}",
        f"{plain['peak_bytes'] / 1e9:.1f} GB",
        "" if layers is None else f"{layers['peak_bytes'] / 1e9:.1f} GB, {layers['overhead']:+.1%}",
        "none" if fastest is None else f"{fastest['way']}, {fastest['overhead']:+.1%}",
        f"{facts['proven_bytes'] / 1e9:.1f} GB",
    ]
    return f"| {' | '.join([*cells, *solved(words, facts, solve_seconds)])} |"


def solved(words: list[str], facts: dict[str, Any], seconds: float) -> list[str]:
    """Cells of what `solve` says: plain training's peak beside fit's, and its overhead."""
    if not seconds:
        return ["", ""]
    spec, options = words[0], words[1:]
    if "--lora" in options:
        at = options.index("--lora")
        spec, options = f"{spec}+lora{options[at + 1]}", options[:at] + options[at + 2 :]
    options = ["--device" if item == "--gpu" else item for item in options if item != "--full"]
    options += [] if "--batch" in options else ["--batch", "1"]
    options += [] if "--optimizer" in options else ["--optimizer", "adamw"]
    with tempfile.TemporaryDirectory() as folder:
        schedule, _ = asked(
            ["solve", "--model", spec, *options, "--budget", f"{facts['budget_bytes']}B", "--tolerance", "1e-5",
             "--time-limit", str(seconds), "--output", str(Path(folder) / "schedule.yaml")]
        )  # fmt: skip
    if "plain_peak_bytes" not in schedule:
        return ["", "nothing fits"]
    off = facts["ways"][0]["peak_bytes"] / schedule["plain_peak_bytes"] - 1
    return [f"{off:+.2%}", f"{schedule['overhead']:+.1%}"]


def small_row(name: str) -> str:
    """A model that trains here: predicted peaks over the measured ones."""
    spec, batch, length = SMALL[name]
    sizes = ["--batch", str(batch)] + ([] if length is None else ["--sequence-length", str(length)])
    words = ["fit", spec, *sizes, "--gpu", "cpu", "--optimizer", "adamw"]
    roomy = asked([*words, "--budget", "1TB", "--tolerance", "0"])[0]
    plain = roomy["ways"][0]
    budget_bytes = (roomy["smallest_reached_bytes"] + plain["peak_bytes"]) // 2
    facts, seconds = asked([*words, "--budget", f"{budget_bytes}B", "--tolerance", "0"])
    found = {"as it is": plain} | {way["way"]: way for way in facts["ways"]}
    cells = [name, f"{seconds:.0f}"]
    cells.append(f"{plain['peak_bytes'] / measured(spec, batch, length) - 1:+.2%}")
    layers = next((way for way in found.values() if way["every_n_layers"]), None)
    if layers is None:
        cells.append("")
    else:
        peak_bytes = measured(spec, batch, length, every=layers["every_n_layers"])
        cells.append(f"{layers['peak_bytes'] / peak_bytes - 1:+.2%}")
    ours = next((way for way in found.values() if way["tolerance"] is not None), None)
    if ours is None:
        cells.append("")
    else:
        peak_bytes = measured(spec, batch, length, budget_bytes=ours["peak_bytes"])
        cells.append(f"{ours['peak_bytes'] / peak_bytes - 1:+.2%}")
    return f"| {' | '.join(cells)} |"


def measured(spec: str, batch: int, length: int | None, *, every: int = 0, budget_bytes: int = 0) -> int:
    """The peak of training here, as it is, with layers checkpointed, or within a budget."""
    built = build_model(spec, batch=batch, sequence_length=length)
    model: Any = built.model.train()
    inputs = built.example_inputs
    if every:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False}, **({"every_n_layers": every} if every > 1 else {}))
    if budget_bytes:
        model = monetlite.MONeTWrapper(model, budget=budget_bytes, optimizer="adamw", wait=True, time_limit=20)
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (tuple(inputs), {})
    trainee = Trainee(model, args, kwargs, default_loss, "cpu", optimizer="adamw")
    trainee.run()
    return trainee.memory().peak_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*QUESTIONS, *SMALL], help="these alone")
    parser.add_argument("--solve-seconds", type=float, default=60.0, help="for `solve`; 0 leaves it out")
    add_output(parser)
    options = parser.parse_args()
    wanted = options.only or [*QUESTIONS, *SMALL]

    def questions() -> Iterator[str]:
        for name in QUESTIONS:
            if name in wanted:
                yield question_row(name, options.solve_seconds)

    def small() -> Iterator[str]:
        for name in SMALL:
            if name in wanted:
                yield small_row(name)

    if not set(wanted).isdisjoint(QUESTIONS):
        write_table(
            "Answers of fit",
            f"Peaks and overheads are estimates for the card. `solve` had {options.solve_seconds:g} s.",
            "| question | card, budget | seconds | as it is | checkpointing | fastest that fits | needed by any "
            "| plain, beside solve's | solve |",
            questions(),
            options.output,
            left=2,
        )
    if not set(wanted).isdisjoint(SMALL):
        output = options.output and options.output.with_stem(f"{options.output.stem}_measured")
        write_table(
            "Answers of fit beside measured peaks",
            "Predicted peaks over measured ones, optimizer included, on the CPU. monetlite trains within the peak "
            "that fit found.",
            "| model | seconds | as it is | checkpointing | monetlite |",
            small(),
            output,
        )


if __name__ == "__main__":
    main()
