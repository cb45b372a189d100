"""Schedule files: what a schedule was solved for, what it promises, and what it chooses."""

import re
from os import PathLike
from typing import Any

from monetlite.core.choices import DEFAULT, Choices, Run
from monetlite.core.costs import ProfileKind
from monetlite.core.errors import ScheduleFileError
from monetlite.core.files.atomic import write_atomically
from monetlite.core.files.migrations import VERSION, migrate
from monetlite.core.files.parts import inputs_data, read_inputs, read_layout, read_source, source_data
from monetlite.core.files.safe_yaml import Record, dump_yaml, load_yaml, shown
from monetlite.core.schedule import Schedule, Status
from monetlite.core.units import format_bytes

AUTOCAST = ("bfloat16", "float16")
"""What a step may be cast to."""
FORMAT = "monetlite-schedule"
_DIGEST = re.compile("[0-9a-f]{4}")


def save_schedule(schedule: Schedule, path: str | PathLike[str]) -> None:
    """Write a schedule file, atomically.

    Raises:
        ScheduleFileError: the file can't be written; what was there before is unchanged.
    """
    write_atomically(path, schedule_text(schedule))


def load_schedule(path: str | PathLike[str]) -> Schedule:
    """Read a schedule file. Nothing in it is executed; what it names is checked against the model later.

    Raises:
        ScheduleFileError: the file is missing, truncated, malformed, or of another version; says where.
    """
    data = load_yaml(path)
    record = Record(data, path)
    if record.text("format") != FORMAT:
        raise record.error("format", f"is {record.text('format')!r:.80}; a schedule file has {FORMAT!r}")
    if not 1 <= record.integer("version") <= VERSION:
        raise record.error(
            "version",
            f"is {record.integer('version')}; this monetlite reads versions 1 to {VERSION}. "
            "Update monetlite, or solve the schedule again",
        )
    record = Record(migrate(data), path)
    layout = read_layout(record)
    costs, predicted, plain, solve = (record.record(name) for name in ("costs", "predicted", "plain", "solve"))
    if costs.text("kind") not in tuple(ProfileKind):
        raise costs.error("kind", f"is {costs.text('kind')!r:.80}; it should be one of {', '.join(ProfileKind)}")
    try:
        status = Status(solve.text("status"))
    except ValueError:
        raise solve.error("status", f"is {solve.text('status')!r:.80}, which is not a status") from None
    autocast = record.text("autocast") if record.optional("autocast") else ""
    if autocast not in ("", *AUTOCAST):
        raise record.error("autocast", f"is {autocast!r:.80}; it should be one of {', '.join(AUTOCAST)}")
    tolerance = record.number("tolerance") if record.optional("tolerance") else 0.0
    if not 0 <= tolerance < 1:
        raise record.error("tolerance", f"is {tolerance:g}, which is not a fraction")
    environment, before, implementations = (
        costs.record("environment"),
        record.record("before"),
        record.record("implementations"),
    )
    return Schedule(
        name=record.text("model"),
        fingerprint=record.text("fingerprint"),
        structure=record.text("structure"),
        operators=record.integer("operators"),
        inputs=read_inputs(record.record("inputs")),
        choices=Choices(
            before={name: _runs(before, name) for name in before},
            implementations={name: implementations.text(name) for name in implementations},
            stored=record.texts("stored"),
        ),
        budget_bytes=record.integer("budget_bytes", least=1),
        peak_bytes=predicted.integer("peak_bytes"),
        reserved_bytes=predicted.integer("reserved_bytes") if predicted.optional("reserved_bytes") else None,
        latency_ms=predicted.number("latency_ms"),
        lower_bound_ms=solve.number("lower_bound_ms"),
        status=status,
        plain_peak_bytes=plain.integer("peak_bytes"),
        plain_latency_ms=plain.number("latency_ms"),
        device=costs.text("device"),
        kind=costs.text("kind"),
        solver=solve.text("solver"),
        seconds=solve.number("seconds"),
        environment={name: environment.text(name) for name in environment},
        optimizer=record.text("optimizer") if record.optional("optimizer") else None,
        accumulate=record.flag("accumulate") if record.optional("accumulate") else False,
        tolerance=tolerance,
        layout=layout,
        autocast=autocast,
        smallest_proven_bytes=solve.integer("smallest_proven_bytes"),
        smallest_reached_bytes=(
            solve.integer("smallest_reached_bytes") if solve.optional("smallest_reached_bytes") else None
        ),
        source=read_source(record.record("source")) if record.optional("source") else None,
        operator_digests=_digests(record) if record.optional("operator_digests") else (),
    )


def schedule_text(schedule: Schedule) -> str:
    """A schedule as the text of its file."""
    data: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "model": schedule.name,
        "source": source_data(schedule.source),
        "fingerprint": schedule.fingerprint,
        "structure": schedule.structure,
        "operators": schedule.operators,
        "inputs": inputs_data(schedule.inputs),
        "optimizer": schedule.optimizer,
        "accumulate": schedule.accumulate,
        "tolerance": float(schedule.tolerance),
        "layout": schedule.layout,
        "autocast": schedule.autocast or None,
        "costs": {
            "device": schedule.device,
            "kind": schedule.kind,
            "environment": {name: str(value) for name, value in schedule.environment.items()},
        },
        "budget_bytes": schedule.budget_bytes,
        "predicted": {
            "peak_bytes": schedule.peak_bytes,
            "latency_ms": float(schedule.latency_ms),
            **({} if schedule.reserved_bytes is None else {"reserved_bytes": schedule.reserved_bytes}),
        },
        "plain": {"peak_bytes": schedule.plain_peak_bytes, "latency_ms": float(schedule.plain_latency_ms)},
        "solve": {
            "status": str(schedule.status),
            "lower_bound_ms": float(schedule.lower_bound_ms),
            "gap": round(schedule.gap, 6),
            "solver": schedule.solver,
            "seconds": round(float(schedule.seconds), 1),
            "smallest_proven_bytes": schedule.smallest_proven_bytes,
            "smallest_reached_bytes": schedule.smallest_reached_bytes,
        },
        "stored": list(schedule.choices.stored),
        "before": {
            name: [operator if how == DEFAULT else {operator: how} for operator, how in runs]
            for name, runs in schedule.choices.before.items()
        },
        "implementations": dict(schedule.choices.implementations),
        "operator_digests": " ".join(schedule.operator_digests) or None,
    }
    header = (
        f"{schedule.name} within {format_bytes(schedule.budget_bytes)}: peak {format_bytes(schedule.peak_bytes)}, "
        f"{schedule.overhead:+.1%} step time ({schedule.kind} for {schedule.device}).\n"
        "stored: kept from the forward to the backward pass. before: what is run again right before an operator.\n"
        "implementations: how operators run the first time, where that is not the default."
    )
    return dump_yaml(data, header)


def _digests(record: Record) -> tuple[str, ...]:
    digests = tuple(record.text("operator_digests").split())
    for digest in digests:
        if _DIGEST.fullmatch(digest) is None:
            raise record.error(
                "operator_digests", f"should be groups of four hexadecimal digits; {digest!r:.80} is not one"
            )
    return digests


def _runs(record: Record, name: str) -> tuple[Run, ...]:
    runs: list[Run] = []
    for item in record.items(name):
        if isinstance(item, str):
            runs.append((item, DEFAULT))
        elif isinstance(item, dict) and len(item) == 1:
            (operator, how), *_ = item.items()
            if not isinstance(operator, str) or not isinstance(how, str):
                raise record.error(name, f"should list operators; {shown(item)} is not one")
            runs.append((operator, how))
        else:
            raise record.error(name, f"should list operators; {shown(item)} is not one")
    return tuple(runs)


__all__ = ["FORMAT", "VERSION", "ScheduleFileError", "load_schedule", "save_schedule", "schedule_text"]
