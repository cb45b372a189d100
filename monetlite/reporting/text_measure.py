"""The text of `monetlite measure`, by batch and by operator, and the files that it writes."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape

from monetlite.checking.measurements import (
    BatchRun,
    Line,
    Measurements,
    Mode,
    Place,
    fit,
    largest_batch,
    tells_enough,
)
from monetlite.core.costs import Profile, cost_source
from monetlite.core.files.plain_data import json_text
from monetlite.core.simulate import simulate
from monetlite.core.step_analysis import StepAnalysis
from monetlite.core.steps import plain_steps
from monetlite.core.units import format_bytes, format_ms
from monetlite.reporting.text_solve import format_rate
from monetlite.reporting.text_tables import csv_table, facts_table, figures_table, markdown_table

MAX_FAMILIES = 10
_TOLD = "name family phase optional derived rerunnable source"
_SIZES = ("peak_bytes", "resident_bytes", "reserved_bytes", "in_use_bytes")


def measurement_facts(found: Measurements) -> dict[str, Any]:
    """Everything measured, for `--json`: bytes, milliseconds, samples per second."""
    return {
        "model": found.model,
        "description": found.description,
        "place": asdict(found.place),
        "optimizer": found.optimizer,
        "autocast": found.autocast,
        "labels_left_out": found.labels_left_out,
        "loading": None
        if found.loading is None
        else {**asdict(found.loading), "median_ms": statistics.median(found.loading.times_ms)},
        "runs": [_run_facts(run) for run in found.runs],
        "lines": {str(mode): _line_facts(found, mode) for mode in found.modes},
    }


def _run_facts(run: BatchRun) -> dict[str, Any]:
    return {
        "mode": str(run.mode),
        "batch": run.batch,
        "outcome": "out of memory" if run.out_of_memory else "ran" if run.tried else "not tried",
        **{name: run.memory and getattr(run.memory, name) for name in _SIZES},
        "median_ms": run.median_ms if run.times_ms else None,
        "fastest_ms": min(run.times_ms, default=None),
        "slowest_ms": max(run.times_ms, default=None),
        "samples_per_s": run.samples_per_s if run.times_ms else None,
        "times_ms": list(run.times_ms),
    }


def _line_facts(found: Measurements, mode: Mode) -> dict[str, Any] | None:
    line, available = fit(found.of(mode)), found.place.available_bytes
    if line is None:
        return None
    largest = None if available is None else largest_batch(line, found.of(mode), available)
    return {**asdict(line), "largest_batch": largest}


def as_text(found: Measurements, suffix: str) -> str:
    """The measurements as a file's text: `.json`, `.csv` (a row for each run) or `.md`."""
    if suffix == ".json":
        return json_text(measurement_facts(found), indent=2) + "\n"
    if suffix == ".csv":
        rows = [{key: item for key, item in _run_facts(run).items() if key != "times_ms"} for run in found.runs]
        return csv_table(rows)
    return _markdown(found)


def print_measurements(console: Console, found: Measurements) -> None:
    """Print the device, loading, and a table for each mode with conclusions on larger batches."""
    console.print(escape(found.description or "nothing could be loaded"))
    console.print(facts_table(_about(found)))
    for mode in found.modes:
        rows = (_cells(run, found.place) for run in found.of(mode))
        table = figures_table(_columns(found.place), rows, title=_title(found, mode))
        console.print()
        console.print(table)
        for sentence in _conclusions(found, mode):
            console.print(sentence)
    console.print()
    console.print(_legend(found.place), style="dim")


def _markdown(found: Measurements) -> str:
    lines = [f"# {found.model}", "", found.description, ""]
    lines += [f"- {name}: {text}" for name, text in _about(found)]
    for mode in found.modes:
        rows = (_cells(run, found.place) for run in found.of(mode))
        lines += ["", f"## {_title(found, mode)}", "", *markdown_table(_columns(found.place), rows)]
        lines += ["", *_conclusions(found, mode)]
    return "\n".join([*lines, "", _legend(found.place), ""])


def _about(found: Measurements) -> list[tuple[str, str]]:
    """The device, and the time and memory of loading the model."""
    place, environment = found.place, dict(found.place.environment)
    name = environment.pop("device", place.device)
    rows = [("device", ", ".join([name, *(f"{key} {value}" for key, value in environment.items())]))]
    if place.total_bytes is not None and place.available_bytes is not None:
        text = f"{format_bytes(place.available_bytes)} of {format_bytes(place.total_bytes)} available"
        if place.device == "cuda":
            context = "not known (nvidia-smi does not say)"
            if place.context_bytes is not None:
                context = format_bytes(place.context_bytes)
            text += f" once CUDA is started; its context: {context}"
        rows.append(("memory", text))
    if (loading := found.loading) is None:
        return [*rows, ("loading", "out of memory")]
    text = format_ms(statistics.median(loading.times_ms))
    if len(loading.times_ms) > 1:
        text += f" ({_spread(loading.times_ms)})"
    rows.append(("loading", f"{text}, random weights"))
    text = f"{format_bytes(loading.parameter_bytes)} parameters, {format_bytes(loading.buffer_bytes)} buffers"
    if loading.growth is not None:
        grew, highest = format_bytes(loading.growth.kept_bytes), format_bytes(loading.growth.peak_bytes)
        who = "tensors took"
        if place.process_bytes is not None:
            who = f"the process, {format_bytes(place.process_bytes)} before, grew by"
        text += f"; with {format_bytes(loading.input_bytes)} of inputs {who} {grew}"
        if highest != grew and loading.growth.peak_bytes > loading.growth.kept_bytes:
            text += f", by up to {highest} on the way"
    rows.append(("weights", text))
    return rows


def _title(found: Measurements, mode: Mode) -> str:
    cast = f", autocast to {found.autocast}" if found.autocast else ""
    if mode is Mode.INFERENCE:
        labels = ", without labels" if found.labels_left_out else ""
        return f"inference: evaluation mode, no gradients{labels}{cast}"
    step = f", step of {found.optimizer}" if found.optimizer else ", no optimizer"
    return f"training: forward, loss, backward{step}{cast}"


def _columns(place: Place) -> tuple[str, ...]:
    memory = ("peak", "reserved", "in use") if place.device == "cuda" else ("peak", "process")
    return ("batch", *memory, "time", "spread", "samples/s")


def _cells(run: BatchRun, place: Place) -> tuple[str, ...]:
    columns = len(_columns(place))
    if run.memory is None:
        why = "out of memory" if run.tried else "not tried"
        return (str(run.batch), why, *("" for _ in range(columns - 2)))
    sizes = [run.memory.peak_bytes, run.memory.in_use_bytes]
    if place.device == "cuda":
        sizes.insert(1, run.memory.reserved_bytes)
    return (
        str(run.batch),
        *("not known" if size is None else format_bytes(size) for size in sizes),
        format_ms(run.median_ms),
        _spread(run.times_ms),
        format_rate(run.samples_per_s),
    )


def _spread(times_ms: Sequence[float]) -> str:
    return f"{format_ms(min(times_ms))} to {format_ms(max(times_ms))}"


def _conclusions(found: Measurements, mode: Mode) -> list[str]:
    """Conclusions from the memory of the batches that ran on larger ones."""
    runs = found.of(mode)
    ran = [run.batch for run in runs if run.memory is not None]
    beyond = next((run.batch for run in runs if run.out_of_memory), None)
    sentences = []
    if beyond is not None:
        sentences.append(f"Out of memory at batch {beyond}.")
    line, available = fit(runs), found.place.available_bytes
    if line is None:
        return sentences
    sentences.append(_slope(line, len(ran)))
    largest = None if available is None else largest_batch(line, runs, available)
    if not tells_enough(line):
        sentences.append("That is too small a share of the peak to predict from: measure larger batches.")
    elif largest is not None and available is not None and largest + 1 != beyond:
        batch = _about_number(largest)
        sentences.append(f"At that rate the {format_bytes(available)} available hold a batch of at most {batch}.")
    return sentences


def _slope(line: Line, count: int) -> str:
    fewer, more = line.batches
    # The steep end of a bent curve meets the axis below zero: the fixed share is then unknown.
    beside = f" beside {format_bytes(line.fixed_bytes)}" if line.fixed_bytes > 0 else ""
    sentence = f"Each sample takes {format_bytes(line.bytes_per_sample)}{beside} (from batches {fewer} and {more}"
    if count > 2:
        sentence += f"; smaller ones are within {max(line.deviation, 0.001):.1%} of that line"
    return sentence + ")."


def _about_number(batch: int) -> str:
    """A predicted batch, rounded down to two digits: the rest is not known."""
    unit = 10 ** max(0, len(str(batch)) - 2)
    return str(batch) if unit == 1 else f"about {batch // unit * unit}"


def _legend(place: Place) -> str:
    peak = "peak: the most that tensors take at once, weights, inputs and optimizer state included"
    if place.device == "cuda":
        return (
            f"{peak}. reserved: what torch took from the GPU for them, and has to fit. in use: what the GPU "
            "reports afterwards, the CUDA context and other programs included. time: the median"
        )
    return (
        f"{peak}, as torch allocates them. process: this process at its highest, with Python, libraries and what "
        "they take without torch. time: the median"
    )


def profile_facts(profile: Profile) -> dict[str, Any]:
    """A profile as data: every implementation of every operator, in bytes and milliseconds."""
    graph = profile.graph
    plain = simulate(profile, plain_steps(graph))
    return {
        "model": graph.name,
        "fingerprint": graph.fingerprint,
        "costs": str(profile.kind),
        "device": profile.device,
        "environment": dict(profile.environment),
        "plain_peak_bytes": plain.peak_bytes,
        "plain_latency_ms": plain.latency_ms,
        "operators": [
            {
                **{name: getattr(operator, name) for name in _TOLD.split()},
                "writes_bytes": sum(graph.values[value].size_bytes for value in operator.writes),
                "implementations": [
                    {
                        "name": item.name,
                        "tolerance": item.tolerance,
                        "latency_ms": cost.latency_ms,
                        "workspace_bytes": cost.workspace_bytes,
                        "reads": [graph.values[value].name for value in item.reads],
                        "overwrites": [graph.values[value].name for value in item.overwrites],
                    }
                    for item, cost in zip(operator.implementations, costs, strict=True)
                ],
            }
            for operator, costs in zip(graph.operators, profile.costs, strict=True)
        ],
    }


def print_profile(console: Console, profile: Profile, top: int) -> None:
    """Print the step's totals, its operator families, and its most expensive operators."""
    graph = profile.graph
    plain = StepAnalysis(profile=profile, timeline=simulate(profile, plain_steps(graph)))
    console.print(
        f"{len(graph.traced)} operators, costs {cost_source(profile)}; plain training: step "
        f"{format_ms(plain.latency_ms)}, peak {format_bytes(plain.peak_bytes)} at {plain.peak_operator}"
    )
    default = [
        (operator, costs[0])
        for operator, costs in zip(graph.operators, profile.costs, strict=True)
        if not operator.derived
    ]
    totals: defaultdict[str, float] = defaultdict(float)
    for operator, cost in default:
        totals[operator.family] += cost.latency_ms
    counts = Counter(operator.family for operator in graph.operators)
    families = [
        (
            family,
            str(counts[family]),
            format_ms(latency_ms),
            f"{latency_ms / plain.latency_ms if plain.latency_ms else 0.0:.1%}",
        )
        for family, latency_ms in sorted(totals.items(), key=lambda item: -item[1])[:MAX_FAMILIES]
    ]
    heads = ("family", "operators", "latency", "share")
    console.print(figures_table(heads, families, left=("family",), title="by family"))
    operators = [
        (
            operator.name,
            format_ms(cost.latency_ms),
            format_bytes(cost.workspace_bytes),
            format_bytes(sum(graph.values[value].size_bytes for value in operator.writes)),
            str(len(operator.implementations)),
        )
        for operator, cost in sorted(default, key=lambda item: -item[1].latency_ms)[:top]
    ]
    columns = ("operator", "latency", "workspace", "writes", "ways")
    console.print(figures_table(columns, operators, left=("operator",), title="most expensive operators"))
