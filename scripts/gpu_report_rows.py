"""Rows of a report: what was measured, kept in one file as it is measured, and shown as a page."""

import json
from pathlib import Path
from typing import Any

from monetlite.core.files.atomic import write_atomically
from monetlite.core.units import format_bytes

FILE = "rows.jsonl"
MAX_ATTEMPTS = 2
"""Times that a row is begun: one that ended the process as often is a failure."""
Row = dict[str, Any]
Key = tuple[str, str, str, str]
"""Part, model, way and setting."""


class Rows:
    """The rows in a folder, one for each key. Each change is written at once, and atomically."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        folder.mkdir(parents=True, exist_ok=True)
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        self._rows: dict[Key, Row] = {key_of(row): row for row in map(json.loads, lines)}

    def __iter__(self) -> Any:
        return iter(self._rows.values())

    def done(self, key: Key) -> bool:
        """Tell whether a row is there. One that ended the process too often is there, as a failure."""
        row = self._rows.get(key)
        if row is not None and row.get("begun", 0) >= MAX_ATTEMPTS:
            self.add(key, failure=f"ended the process, {MAX_ATTEMPTS} times", lost=True)
        return row is not None and "begun" not in self._rows[key]

    def lost(self, key: Key) -> bool:
        """Tell whether a row ended the process too often."""
        return self.done(key) and "lost" in self._rows[key]

    def begin(self, key: Key) -> None:
        """Note that a row is being measured."""
        self.add(key, begun=self._rows.get(key, {}).get("begun", 0) + 1)

    def add(self, key: Key, **facts: Any) -> None:
        self._rows[key] = dict(zip(("part", "model", "way", "setting"), key, strict=True)) | facts
        self._write()

    def _write(self) -> None:
        write_atomically(self.path, "".join(f"{json.dumps(row)}\n" for row in self._rows.values()))


def key_of(row: Row) -> Key:
    return row["part"], row["model"], row["way"], row["setting"]


def failed_checks(rows: Any) -> list[str]:
    """The checks that failed, in words."""
    return [
        f"{row['model']}, {row['way']} {row['setting']}: {check['what']} {check['value']}, at most {check['most']}"
        for row in rows
        for check in row.get("checks", [])
        if not check["passed"]
    ]


def page(rows: Rows, environment: dict[str, str]) -> str:
    """The report for people."""
    where = ", ".join(f"{name} {value}" for name, value in environment.items())
    lines = [
        "# On one GPU",
        "",
        f"{where}. Written by `scripts/gpu_report.py`; each way takes its steps in turn with plain PyTorch, "
        "medians. Peaks and reserved memory as torch's allocator counts them; *releases*: how often in a "
        "step it gave memory back to the GPU. *Off* is measured over predicted, less one; *gradients*: their largest "
        "relative difference from plain PyTorch's, whose own row has that of two of its steps.",
    ]
    found = [row for row in rows if "begun" not in row]
    for model in dict.fromkeys(row["model"] for row in found):
        of_model = [row for row in found if row["model"] == model]
        inputs = next((f", {row['inputs']}" for row in of_model if row.get("inputs")), "")
        lines += [
            *("", f"## {model or 'the GPU'}{inputs}", ""),
            "| way | peak | reserved | releases | step, ms | tokens/s | overhead | MONeT's | peak off | time off | "
            "gradients |",
            f"| --- |{' ---: |' * 10}",
            *map(_line, of_model),
        ]
    if timed := [row for row in found if row.get("kernels")]:
        lines += [
            *(
                "",
                "## Kernels",
                "",
                "Milliseconds of a step in which the GPU runs something, and in which it waits.",
                "",
            ),
            "| model | way | setting | kernels | busy | idle | longest wait |",
            "| --- | --- | --- | ---: | ---: | ---: | --- |",
            *map(_kernels_line, timed),
        ]
    if failures := failed_checks(found):
        lines += ["", "## Failed checks", "", *(f"- {item}" for item in failures)]
    return "\n".join(lines) + "\n"


def _kernels_line(row: Row) -> str:
    longest = [f"{ms:.2f} ms before {after[:60]}" for ms, _, after in row["gaps"][:1]]
    counted = f"{row['kernels']:.0f}", f"{row['kernels_ms']:.1f}", f"{row['idle_ms']:.1f}"
    return f"| {' | '.join((row['model'], row['way'], row['setting'], *counted, *longest))} |"


def _line(row: Row) -> str:
    way = f"{row['way']}{': ' if row['setting'] else ''}{row['setting']}"
    if row.get("failure") or row.get("peak_bytes") is None:
        return f"| {way} | {row.get('failure') or row.get('note', '')} |{' |' * 9}"
    step_ms, predicted_ms = row["step_ms"], row.get("predicted_ms")

    def shown(value: Any, form: str) -> str:
        return "" if value is None else format(value, form)

    difference = row["gradient_difference"]
    cells = [
        way,
        format_bytes(row["peak_bytes"]),
        "" if row["reserved_bytes"] is None else format_bytes(row["reserved_bytes"]),
        shown(row["releases"], ".0f"),
        shown(step_ms, ".1f"),
        shown(row.get("tokens_per_second"), ",.0f"),
        shown(row["overhead"], "+.1%"),
        f"{row['published']:+.2f}%" if row.get("published") is not None else "",
        f"{row['peak_bytes'] / row['predicted_peak_bytes'] - 1:+.1%}" if predicted_ms else "",
        f"{step_ms / predicted_ms - 1:+.1%}" if predicted_ms and step_ms else "",
        "; ".join(row["faults"]) or ("" if difference is None else f"{difference:.0e}{row['gradients_of']}"),
    ]
    return f"| {' | '.join(cells)} |"
