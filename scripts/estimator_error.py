"""How far estimates for a P100 are from latencies measured on one.

    python scripts/estimator_error.py resnet50_184.json unet_11.json vgg16_176.json

An instance (`remat-instance/1`) that the MONeT authors measured says which operators ran, in order, and how
long each took, but not their shapes. So the same model is traced here, estimated, and compared with it:
family by family in total, and operator by operator where the n-th of a family is sure to be the same one,
which the bytes it writes tell. Of a convolution's algorithms the fastest counts, as cuDNN would choose it.

The measured operators differ from today's in places: bilinear upsampling, and the copies that gradients of
`add` and `cat` made, are under `other`, which only the step's total includes.
"""

import argparse
import statistics
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from instances import read_instance

from monetlite.core.costs import Profile
from monetlite.models import build_model
from monetlite.profiling.estimate import estimate_profile
from monetlite.tracing import trace

MODELS = {"resnet50_184": "resnet50", "unet_11": "unet", "vgg16_176": "vgg16"}

# (measured family, traced family) → the row of the table that both belong to.
ROWS = {
    "convolution": ("aten::_convolution", "convolution"),
    "convolution, weight gradient": ("aten::_convolution_param_grad", "convolution_backward_weight"),
    "convolution, input gradient": ("aten::_convolution_ip_grad", "convolution_backward_input"),
    "batch norm": ("aten::batch_norm", "batch_norm"),
    "batch norm, gradient": ("aten::batch_norm_ip_grad", "batch_norm_backward"),
    "relu": ("aten::relu_", "relu"),
    "relu, gradient": ("aten::relu__ip_grad", "relu_backward"),
    "max pool": ("aten::max_pool2d", "max_pool2d"),
    "max pool, gradient": ("aten::max_pool2d_ip_grad", "max_pool2d_backward"),
    "linear": ("aten::addmm", "addmm"),
    "linear, gradients": ("aten::addmm_ip_grad", "mm"),
}
ALSO = {"aten::addmm_param_grad": "linear, gradients"}
OTHER = "other"

LARGE_WORKSPACE_BYTES = 10**8
NEGLIGIBLE_MS = 0.05


@dataclass(frozen=True, kw_only=True)
class Run:
    """One operator of a step, as plain training runs it."""

    latency_ms: float
    workspace_bytes: int
    written_bytes: int

    def matches(self, other: "Run") -> bool:
        """Whether both write equally much, but for statistics and the like."""
        return abs(self.written_bytes - other.written_bytes) <= 0.01 * self.written_bytes


def runs_by_row(profile: Profile, *, measured: bool) -> dict[str, list[Run]]:
    """The operators of a step that write anything, grouped by row of the table."""
    side = 0 if measured else 1
    row_of = {names[side]: row for row, names in ROWS.items()} | (ALSO if measured else {})
    rows: dict[str, list[Run]] = defaultdict(list)
    for operator, costs in zip(profile.graph.operators, profile.costs, strict=True):
        written = sum(profile.graph.values[value].size_bytes for value in operator.writes)
        if operator.optional or not written:
            continue
        row = row_of.get(operator.family, OTHER)
        cost = min(costs, key=lambda item: item.latency_ms) if "convolution" in row else costs[0]
        rows[row].append(
            Run(latency_ms=cost.latency_ms, workspace_bytes=cost.workspace_bytes, written_bytes=written)
        )
    return rows


def pairs(measured: list[Run], estimated: list[Run]) -> list[tuple[Run, Run]]:
    """The n-th operators of a row with the n-th, where they surely are the same and take long enough."""
    if len(measured) != len(estimated):
        return []
    both = zip(measured, estimated, strict=True)
    return [(true, guess) for true, guess in both if true.matches(guess) and true.latency_ms > NEGLIGIBLE_MS]


def compare(path: Path) -> None:
    """Print the table of one instance."""
    built = build_model(MODELS[path.stem], meta=True)
    graph = trace(built.model, built.example_inputs)
    true = runs_by_row(read_instance(path), measured=True)
    guess = runs_by_row(estimate_profile(graph, "p100"), measured=False)
    print(f"\n### {path.stem}\n")
    print("| operators | count | measured ms | estimated ms | error | median error of one |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    matched: list[tuple[Run, Run]] = []
    for row in (*ROWS, OTHER):
        if row in true:
            same = pairs(true[row], guess[row]) if row != OTHER else []
            errors = [abs(one.latency_ms / other.latency_ms - 1) for other, one in same]
            median = f"{statistics.median(errors):.0%} of {len(errors)}" if errors else ""
            print(f"| {row} | {len(true[row])} | {_cells(true[row], guess[row])} | {median} |")
            matched += same if "convolution" in row else []
    everything = [[run for runs in rows.values() for run in runs] for rows in (true, guess)]
    print(f"| **step** | {len(everything[0])} | {_cells(*everything)} | |")
    print(f"\n{_workspaces(matched)}")


def _cells(true: list[Run], guess: list[Run]) -> str:
    true_ms, guess_ms = (sum(run.latency_ms for run in runs) for runs in (true, guess))
    return f"{true_ms:.1f} | {guess_ms:.1f} | {guess_ms / true_ms - 1:+.0%}"


def _workspaces(matched: list[tuple[Run, Run]]) -> str:
    """How many large workspaces agree, are too small or large, or belong to another algorithm."""
    sizes = [(true.workspace_bytes, guess.workspace_bytes) for true, guess in matched]
    large = [pair for pair in sizes if max(pair) >= LARGE_WORKSPACE_BYTES]
    both = [guess / true - 1 for true, guess in large if min(true, guess) >= LARGE_WORKSPACE_BYTES]
    text = f"Of {len(sizes)} convolutions, {len(large)} have a measured or estimated workspace of 100 MB or more"
    if not both:
        return f"{text}; none has both."
    close = sum(abs(error) <= 0.02 for error in both)
    only = len(large) - len(both)
    return (
        f"{text}; {len(both)} have both, of which {close} agree within 2% and all lie between "
        f"{min(both):+.0%} and {max(both):+.0%}; {only} have only one."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("instance", nargs="+", type=Path, help=f"one of {', '.join(MODELS)}, as .json")
    for path in parser.parse_args().instance:
        if path.stem not in MODELS:
            parser.error(f"{path.stem} is not one of {', '.join(MODELS)}")
        compare(path)


if __name__ == "__main__":
    main()
