"""Compiled schedules beside torch.compile, at each of the peaks that its activation memory budgets give.

    python scripts/bench_regions.py [--models gpt2 bert ...] [--shares 1 0.7 0.5 0.3 0.1] [--rounds 9]
        [--time-limit 20] [--output STEM]

Each model runs in a process of its own. Plain training, torch.compile at every share, and for each of its measured
peaks a schedule solved with `compile=True` within that peak; and one without a limit. Steps are taken in turn, and
ratios are of medians. Writes docs/benchmarks/regions_cpu_DATE.md and .json after each model.
"""

import argparse
import datetime
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "benchmarks"
LAYERS, WIDTH, HEADS, WORDS = 6, 384, 6, 10_000
SHARES = (1.0, 0.7, 0.5, 0.3, 0.1)
UNLIMITED = "1000%"


class _ChannelsNorm(nn.Module):
    """Layer norm over the channels of images."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels, eps=1e-6)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.norm(images.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return result


class _ConvNeXtBlock(nn.Module):
    """Block of ConvNeXt (Liu et al., CVPR 2022), with its layer scale."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.first, self.second = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)
        self.scale = nn.Parameter(1e-6 * torch.ones(channels))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        inner = self.norm(self.depthwise(images).permute(0, 2, 3, 1))
        inner = self.second(nn.functional.gelu(self.first(inner))) * self.scale
        made: torch.Tensor = images + inner.permute(0, 3, 1, 2)
        return made


def convnext() -> nn.Module:
    """ConvNeXt in the shape of timm's `convnext_atto`."""
    channels, depths = (40, 80, 160, 320), (2, 2, 6, 2)
    layers: list[nn.Module] = [nn.Conv2d(3, channels[0], 4, 4), _ChannelsNorm(channels[0])]
    for stage, depth in enumerate(depths):
        if stage:
            layers += [_ChannelsNorm(channels[stage - 1]), nn.Conv2d(channels[stage - 1], channels[stage], 2, 2)]
        layers += [_ConvNeXtBlock(channels[stage]) for _ in range(depth)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(channels[-1]), nn.Linear(channels[-1], 1000)]
    return nn.Sequential(*layers, *head)


def _language(kind: str) -> tuple[nn.Module, dict[str, Any]]:
    import transformers

    shared = {
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "vocab_size": WORDS,
    }
    tokens = torch.randint(0, WORDS, (4, 256))
    if kind == "gpt2":
        config: Any = transformers.GPT2Config(
            n_layer=LAYERS, n_embd=WIDTH, n_head=HEADS, vocab_size=WORDS, bos_token_id=0, eos_token_id=0
        )
        model: nn.Module = transformers.GPT2LMHeadModel(config)
    elif kind == "bert":
        config = transformers.BertConfig(**shared, intermediate_size=4 * WIDTH)
        model = transformers.BertForMaskedLM(config)
    else:
        config = transformers.LlamaConfig(**shared, intermediate_size=3 * WIDTH)
        model = transformers.LlamaForCausalLM(config)
    return model, {"input_ids": tokens, "labels": tokens}


def _vit() -> tuple[nn.Module, dict[str, Any]]:
    import transformers

    config = transformers.ViTConfig(
        image_size=160,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH,
        num_labels=1000,
    )
    labels = torch.randint(0, 1000, (8,))
    return transformers.ViTForImageClassification(config), {
        "pixel_values": torch.randn(8, 3, 160, 160),
        "labels": labels,
    }


def _convolutional(kind: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    from monetlite.models.convnets import MobileNetV2, ResNet, UNet

    if kind == "unet":
        return UNet(), (torch.randn(2, 3, 192, 192),)
    model = ResNet((3, 4, 6, 3)) if kind == "resnet50" else MobileNetV2()
    return model, (torch.randn(16, 3, 160, 160),)


def _tiny() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A case to try this script on."""
    layers = [
        nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128), nn.LayerNorm(128)) for _ in range(3)
    ]
    return nn.Sequential(*layers), (torch.randn(256, 128),)


MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "gpt2": lambda: _language("gpt2"),
    "bert": lambda: _language("bert"),
    "vit": _vit,
    "llama": lambda: _language("llama"),
    "convnext": lambda: (convnext(), (torch.randn(8, 3, 160, 160),)),
    "resnet50": lambda: _convolutional("resnet50"),
    "mobilenet_v2": lambda: _convolutional("mobilenet_v2"),
    "unet": lambda: _convolutional("unet"),
    "tiny": _tiny,
}


def measure(name: str, shares: list[float], rounds: int, time_limit: float) -> dict[str, Any]:
    """One model's figures."""
    from monetlite.checking.comparison.bench import Bench, Contender, environment
    from monetlite.checking.comparison.peer_runs import Peer
    from monetlite.checking.comparison.peers import inductor
    from monetlite.checking.comparison.scheduled_peers import scheduled
    from monetlite.checking.trainee import default_loss
    from monetlite.core.errors import InfeasibleBudget
    from monetlite.core.options import split_options
    from monetlite.planning.layouts import layouts_to_try, solve_layouts
    from monetlite.planning.pipeline import price
    from monetlite.tracing import split_inputs, trace_layouts

    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    model.train()
    pricing, solving = split_options({"compile": True, "time_limit": time_limit})
    began = time.perf_counter()
    graphs = trace_layouts(model, inputs, layouts_to_try(None, solving.tolerance, compile=True))
    profiles = [price(graph, pricing, solving) for graph in graphs]
    prepared_s = time.perf_counter() - began
    bench = Bench(model, *split_inputs(inputs), default_loss, "cpu")
    entrants = [bench.enter(Contender(peer=Peer.PLAIN))]
    rows: list[dict[str, Any]] = [{"kind": "plain"}]
    for contender in inductor(bench.plain, shares):
        print(f"{name}: {contender.label}", flush=True)
        entrants.append(bench.enter(contender))
        rows.append({"kind": "torch.compile", "share": contender.setting})
    peaks = {row["share"]: item.run.peak_bytes for row, item in zip(rows[1:], entrants[1:], strict=True)}
    for share, peak_bytes in [*peaks.items(), ("no limit", None)]:
        if share != "no limit" and peak_bytes is None:
            continue
        print(f"{name}: solving within {peak_bytes or UNLIMITED}", flush=True)
        try:
            schedule = solve_layouts(profiles, peak_bytes or UNLIMITED, solving)
        except InfeasibleBudget as error:
            rows.append({"kind": "monetlite", "share": share, "failure": str(error).partition("\n")[0]})
            entrants.append(entrants[0])
            continue
        contender = scheduled(Peer.MONETLITE, schedule, schedule.budget_bytes, compiled=True)
        began = time.perf_counter()
        entrants.append(bench.enter(contender))
        rows.append(
            {
                "kind": "monetlite",
                "share": share,
                "layout": schedule.layout,
                "budget_bytes": schedule.budget_bytes,
                "predicted_bytes": schedule.peak_bytes,
                "predicted_ratio": schedule.latency_ms / schedule.plain_latency_ms,
                "first_step_s": time.perf_counter() - began,
            }
        )
    runs = bench.time(entrants, rounds)
    plain_ms = runs[0].step_ms
    for row, run in zip(rows, runs, strict=True):
        if "failure" in row:
            continue
        if run.failure:
            row["failure"] = run.failure
            continue
        ordered = sorted(item / plain_ms for item in run.times_ms)
        row |= {
            "peak_bytes": run.peak_bytes,
            "ratio": statistics.median(ordered),
            "spread": [ordered[0], ordered[-1]],
            "gradient_difference": run.gradient_difference,
        }
    return {"rows": rows, "prepared_s": prepared_s, "environment": environment("cpu")}


def pairs(rows: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """torch.compile at each share, with the schedule for its peak; without those that failed."""
    ours = {row["share"]: row for row in rows if row["kind"] == "monetlite" and "ratio" in row}
    theirs = [row for row in rows if row["kind"] == "torch.compile" and "ratio" in row]
    return [(row, ours[row["share"]]) for row in theirs if row["share"] in ours]


def write(stem: Path, known: dict[str, Any], rounds: int) -> None:
    """The figures of all models, and their tables."""
    environment = next(iter(known.values()))["environment"]
    lines = [
        f"# Compiled schedules beside torch.compile, {datetime.date.today()}",
        "",
        "Written by `scripts/bench_regions.py`. "
        + ", ".join(f"{name} {what}" for name, what in environment.items()),
        "",
        f"Step times over plain training's, medians of {rounds} rounds in turn.",
    ]
    quotients: list[float] = []
    for name, found in known.items():
        lines += ["", f"## {name}", ""]
        lines += [f"Traced, compiled and measured in {found['prepared_s']:.0f} s. Plain training's peak: "]
        lines[-1] += f"{found['rows'][0]['peak_bytes'] / 1e6:.0f} MB."
        lines += ["", "| | torch.compile | its peak | monetlite | its peak | predicted | | layout |"]
        lines += ["| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |"]
        for theirs, ours in pairs(found["rows"]):
            quotients.append(ours["ratio"] / theirs["ratio"])
            lines.append(
                f"| {theirs['share']} | ×{theirs['ratio']:.3f} | {theirs['peak_bytes'] / 1e6:.1f} MB | "
                f"×{ours['ratio']:.3f} | {ours['peak_bytes'] / 1e6:.1f} MB | ×{ours['predicted_ratio']:.3f}, "
                f"{ours['predicted_bytes'] / 1e6:.1f} MB | {quotients[-1]:.3f} | {ours['layout']} |"
            )
        for row in found["rows"]:
            if row.get("share") == "no limit" and "ratio" in row:
                lines.append(
                    f"| no limit | | | ×{row['ratio']:.3f} | {row['peak_bytes'] / 1e6:.1f} MB | "
                    f"×{row['predicted_ratio']:.3f}, {row['predicted_bytes'] / 1e6:.1f} MB | | {row['layout']} |"
                )
        lines += ["", *(f"- {row['share']}: {row['failure']}" for row in found["rows"] if "failure" in row)]
    if quotients:
        mean = math.exp(statistics.mean(map(math.log, quotients)))
        lines += ["", f"Geometric mean of monetlite's step time over torch.compile's at its peaks: {mean:.3f}."]
    stem.with_name(f"{stem.name}.md").write_text("\n".join(lines) + "\n")
    stem.with_name(f"{stem.name}.json").write_text(json.dumps(known, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--models", nargs="+", choices=list(MODELS), default=[name for name in MODELS if name != "tiny"]
    )
    parser.add_argument("--shares", nargs="+", type=float, default=list(SHARES))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--time-limit", type=float, default=20.0)
    parser.add_argument("--output", type=Path, help="without an ending; by default in docs/benchmarks")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        found = measure(args.models[0], args.shares, args.rounds, args.time_limit)
        args.one.write_text(json.dumps(found))
        return 0
    stem = (args.output or FOLDER / f"regions_cpu_{datetime.date.today()}").resolve()
    known: dict[str, Any] = {}
    for name in args.models:
        with tempfile.TemporaryDirectory() as folder:
            figures = Path(folder, "figures.json")
            command = [sys.executable, __file__, "--models", name, "--one", str(figures)]
            command += ["--shares", *map(str, args.shares), "--rounds", str(args.rounds)]
            command += ["--time-limit", str(args.time_limit)]
            if subprocess.run(command, check=False).returncode == 0:
                known[name] = json.loads(figures.read_text())
                write(stem, known, args.rounds)
    return 0 if len(known) == len(args.models) else 1


if __name__ == "__main__":
    sys.exit(main())
