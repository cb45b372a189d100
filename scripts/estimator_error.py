"""How far estimates for a P100 are from latencies measured on one.

    python scripts/estimator_error.py resnet50_184.json unet_11.json vgg16_176.json

An instance (`remat-instance/1`) that the MONeT authors measured says which operators ran, in order, and how
long each took, but not their shapes. So the same model is traced here, estimated, and compared with it: family
by family in total, and operator by operator where the n-th of a family is sure to be the same one, which the
bytes it writes tell. Of a convolution's algorithms the fastest counts, as cuDNN would choose it.

The measured operators differ from today's in places: bilinear upsampling, and the copies that gradients of
`add` and `cat` made, are under `other`, which only the step's total includes.
"""

import argparse
import statistics
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from monetlite.costs import Profile
from monetlite.instances import read_instance
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

# Latency in ms of an operator, and the bytes of the largest value that it writes.
Measured = tuple[float, int]


def operators_by_row(profile: Profile, measured: bool) -> dict[str, list[Measured]]:
    """The operators of a step, as plain training runs them, grouped by row of the table."""
    side = 0 if measured else 1
    row_of = {names[side]: row for row, names in ROWS.items()} | (ALSO if measured else {})
    rows: dict[str, list[Measured]] = defaultdict(list)
    for operator, costs in zip(profile.graph.operators, profile.costs, strict=True):
        if operator.optional or not costs:
            continue
        row = row_of.get(operator.family, OTHER)
        latency_ms = min(cost.latency_ms for cost in costs) if "convolution" in row else costs[0].latency_ms
        written = max((profile.graph.values[value].size_bytes for value in operator.writes), default=0)
        rows[row].append((latency_ms, written))
    return rows


def per_operator_errors(measured: Iterable[Measured], estimated: Iterable[Measured]) -> list[float]:
    """Relative errors of the n-th operators that write equally much and take long enough to matter."""
    return [
        abs(guess_ms / true_ms - 1)
        for (true_ms, true_bytes), (guess_ms, guess_bytes) in zip(measured, estimated, strict=False)
        if true_bytes == guess_bytes and true_ms > 0.05
    ]


def compare(path: Path) -> None:
    """Print the table of one instance."""
    measured = read_instance(path)
    built = build_model(MODELS[path.stem], meta=True)
    graph = trace(built.model, built.example_inputs)
    true, guess = operators_by_row(measured, True), operators_by_row(estimate_profile(graph, "p100"), False)
    print(f"\n### {path.stem}\n")
    print("| operators | count | measured ms | estimated ms | error | median error of one |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for row in (*ROWS, OTHER):
        if row in true:
            errors = per_operator_errors(true[row], guess[row]) if len(true[row]) == len(guess[row]) else []
            one = f"{statistics.median(errors):.0%} of {len(errors)}" if errors and row != OTHER else ""
            print(f"| {row} | {len(true[row])} | {_cells(true[row], guess[row])} | {one} |")
    everything = [[item for row in rows.values() for item in row] for rows in (true, guess)]
    print(f"| **step** | {len(everything[0])} | {_cells(*everything)} | |")


def _cells(true: list[Measured], guess: list[Measured]) -> str:
    true_ms, guess_ms = sum(item[0] for item in true), sum(item[0] for item in guess)
    return f"{true_ms:.1f} | {guess_ms:.1f} | {guess_ms / true_ms - 1:+.0%}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("instance", nargs="+", type=Path, help=f"one of {', '.join(MODELS)}, as .json")
    for path in parser.parse_args().instance:
        if path.stem not in MODELS:
            parser.error(f"{path.stem} is not one of {', '.join(MODELS)}")
        compare(path)


if __name__ == "__main__":
    main()
