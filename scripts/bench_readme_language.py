"""The language model of the README: its picture, and its table beside what people use today.

    python scripts/bench_readme_language.py [--repeats 9] [--time-limit 20] [--device cpu] [--peers ...]
        [--only picture|table] [--output FOLDER]

Writes docs/images/gpt2_6GB.png (GPT-2, estimated for an RTX 4090), and the table and figures
of `scripts/bench_compare.py --model gpt2_words` in docs/benchmarks; prints the rows for the README from them. The
table takes about an hour on two quiet cores.
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
MODEL = "gpt2_words"
PICTURED = ["--model", "hf:gpt2", "--batch", "8", "--sequence-length", "1024", "--device", "rtx-4090"]
BUDGET = ["--budget", "6GB", "--tolerance", "1e-5", "--optimizer", "adamw"]
PEERS = "checkpoint,selective,tiled_loss,auto_sac,inductor"
BUDGETS = "65%,50%,40%"


def run(*command: str) -> None:
    print(f"$ {' '.join(command)}", flush=True)
    subprocess.run(command, cwd=ROOT, check=True)


def make_picture(target: Path, time_limit: str) -> None:
    """A training step of GPT-2 within 6 GB, as a timeline."""
    with tempfile.TemporaryDirectory() as folder:
        schedule = str(Path(folder, "gpt2_6GB.yaml"))
        monetlite = (sys.executable, "-m", "monetlite")
        run(*monetlite, "solve", *PICTURED, *BUDGET, "--time-limit", time_limit, "--output", schedule)
        run(*monetlite, "show", schedule, "--output", str(target), "--force")


def rows(figures: dict[str, Any]) -> list[str]:
    """Rows for the README: monetlite within each budget, and each run of a peer beside monetlite at its peak."""
    runs = figures["runs"]

    def cell(at: int | None) -> str:
        if at is None:
            return "no schedule"
        return f"×{runs[at]['ratio']:.2f}, {runs[at]['peak_bytes'] / 1e6:.0f} MB"

    found = [f"| plain training | ×1.00, {runs[0]['peak_bytes'] / 1e6:.0f} MB | |"]
    found += [f"| monetlite within {item['budget']} | | {cell(item['monetlite'])} |" for item in figures["budgets"]]
    for duel in figures["duels"]:
        faults = "; ".join(runs[duel["run"]]["faults"])
        title = runs[duel["run"]]["title"] + (f" ({faults})" if faults else "")
        found.append(f"| {title} | {cell(duel['run'])} | {cell(duel['monetlite'])} |")
    found += [f"| {item['title']} | {item['failure']} | |" for item in runs if item["failure"]]
    return ["| | step, peak | monetlite at that peak |", "| --- | ---: | ---: |", *found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", default="9")
    parser.add_argument(
        "--time-limit", default="20", help="seconds of each solve; three times as many for the picture"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--peers", default=PEERS)
    parser.add_argument("--budgets", default=BUDGETS)
    parser.add_argument("--only", choices=["picture", "table"])
    parser.add_argument("--output", type=Path, default=ROOT / "docs")
    args = parser.parse_args()
    (args.output / "images").mkdir(parents=True, exist_ok=True)
    (args.output / "benchmarks").mkdir(exist_ok=True)
    if args.only != "table":
        make_picture(args.output / "images" / "gpt2_6GB.png", str(3 * float(args.time_limit)))
    if args.only != "picture":
        stem = (args.output / "benchmarks" / f"language_{args.device}_{datetime.date.today()}").resolve()
        options = ["--model", MODEL, "--peers", args.peers, "--budgets", args.budgets, "--device", args.device]
        options += ["--repeats", args.repeats, "--time-limit", args.time_limit, "--pictures", "--output", str(stem)]
        run(sys.executable, "scripts/bench_compare.py", *options)
        known = json.loads(stem.with_name(f"{stem.name}.json").read_text())
        print("\n".join(rows(known[MODEL]["figures"])))


if __name__ == "__main__":
    main()
