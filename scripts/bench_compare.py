"""`monetlite compare` on five models, each in a process of its own, into one dated file of tables and one of figures.

    python scripts/bench_compare.py [--model resnet50 ...] [--repeats 9] [--time-limit 20] [--device cpu]

Writes docs/benchmarks/compare_DEVICE_DATE.md and .json, and with --pictures one picture for each model beside them.
With all models and peers it takes about two hours on two cores, most of it for Inductor to compile. Files are written
after each model; models that they already have from another call are kept, or replaced where they are run again.
"""

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "benchmarks"

MODELS: dict[str, list[str]] = {
    "resnet50": ["--model", "resnet50", "--batch", "16", "--input-size", "160"],
    "mobilenet_v2": ["--model", "mobilenet_v2", "--batch", "16", "--input-size", "160"],
    "unet": ["--model", "unet", "--batch", "2", "--input-size", "192"],
    "gpt2": ["--model", "scripts/bench_compare.py:gpt2"],
    "gpt2_words": ["--model", "scripts/bench_compare.py:gpt2_words", "--tolerance", "1e-5"],
}
"""What each is compared with: options of `monetlite compare`."""


def _gpt2(vocabulary: int) -> tuple[Any, dict[str, Any]]:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=6, n_embd=384, n_head=6, vocab_size=vocabulary, bos_token_id=0, eos_token_id=0, use_cache=False
    )
    tokens = torch.randint(0, vocabulary, (4, 256))
    return GPT2LMHeadModel(config).train(), {"input_ids": tokens, "labels": tokens}


def gpt2() -> tuple[Any, dict[str, Any]]:
    """GPT-2 with 6 layers, 384 wide, on 4 sequences of 256 tokens; the model that scripts/bench_step.py has."""
    return _gpt2(10_000)


def gpt2_words() -> tuple[Any, dict[str, Any]]:
    """The same with all words of GPT-2, whose logits then take most of the memory."""
    return _gpt2(50_257)


def compare(model: str, options: list[str], picture: Path | None) -> tuple[str, dict[str, Any]] | None:
    """One model's table in Markdown and its figures, from a process of its own; None if that failed."""
    with tempfile.TemporaryDirectory() as folder:
        table, figures = Path(folder, "table.md"), Path(folder, "figures.json")
        outputs = [table, figures, *([picture] if picture else [])]
        command = [sys.executable, "-m", "monetlite", "compare", "--force", *MODELS[model], *options]
        for output in outputs:
            command += ["--output", str(output)]
        print(f"$ {' '.join(command)}", flush=True)
        if subprocess.run(command, cwd=ROOT, check=False).returncode != 0:
            return None
        return table.read_text(), json.loads(figures.read_text())


def write(stem: Path, known: dict[str, Any]) -> None:
    """The figures of all models, and their tables."""
    sections = []
    for name, found in known.items():
        section = found["table"].replace("# ", "## ", 1)
        sections.append(f"{section}\n![{name}]({found['picture']})\n" if found["picture"] else section)
    title = f"# Ways to train within less memory, side by side, {datetime.date.today()}"
    origin = "Written by `scripts/bench_compare.py`; each model in a process of its own, one after the other."
    stem.with_name(f"{stem.name}.md").write_text("\n\n".join([title, origin, *sections]))
    stem.with_name(f"{stem.name}.json").write_text(json.dumps(known, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", choices=list(MODELS), help="by default all of them")
    parser.add_argument("--budgets", default="70%,50%,40%")
    parser.add_argument("--peers", default="all")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--time-limit", type=float, default=20.0)
    parser.add_argument("--pictures", action="store_true", help="also one picture for each model")
    parser.add_argument("--output", type=Path, help="without an ending; by default in docs/benchmarks")
    args = parser.parse_args()
    stem = (args.output or FOLDER / f"compare_{args.device}_{datetime.date.today()}").resolve()
    options = ["--budgets", args.budgets, "--peers", args.peers, "--device", args.device]
    options += ["--repeats", str(args.repeats), "--time-limit", str(args.time_limit)]
    known: dict[str, Any] = {}
    if stem.with_name(f"{stem.name}.json").exists():
        known = json.loads(stem.with_name(f"{stem.name}.json").read_text())
    failed = []
    for model in args.model or MODELS:
        picture = stem.with_name(f"{stem.name}_{model}.png") if args.pictures else None
        done = compare(model, options, picture)
        if done is None:
            failed.append(model)
            continue
        known[model] = {"table": done[0], "picture": picture.name if picture else None, "figures": done[1]}
        write(stem, {name: known[name] for name in MODELS if name in known})
    for model in failed:
        print(f"{model} failed and is left out", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
