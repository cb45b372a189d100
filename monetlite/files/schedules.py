"""Schedule files, version 1: what a schedule was solved for, what it promises, and what it chooses."""

from os import PathLike
from typing import Any

from monetlite.choices import DEFAULT, Choices, Run
from monetlite.errors import ScheduleFileError
from monetlite.files.atomic import write_atomically
from monetlite.files.safe_yaml import InLine, Record, dump_yaml, load_yaml
from monetlite.graph import AS_TRACED, CHANNELS_LAST, TensorSpec
from monetlite.schedule import Schedule, Status
from monetlite.units import format_bytes

FORMAT = "monetlite-schedule"
VERSION = 1


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
    record = Record(load_yaml(path), path)
    if record.text("format") != FORMAT:
        raise record.error("format", f"is {record.text('format')!r:.80}; a schedule file has {FORMAT!r}")
    if record.integer("version") != VERSION:
        raise record.error(
            "version",
            f"is {record.integer('version')}; this monetlite reads version {VERSION}. "
            "Update monetlite, or solve the schedule again",
        )
    layout = record.text("layout") if record.optional("layout") else AS_TRACED
    if layout not in (AS_TRACED, CHANNELS_LAST):
        raise record.error("layout", f"is {layout!r:.80}; it should be {AS_TRACED!r} or {CHANNELS_LAST!r}")
    costs, predicted, plain, solve = (record.record(name) for name in ("costs", "predicted", "plain", "solve"))
    try:
        status = Status(solve.text("status"))
    except ValueError:
        raise solve.error("status", f"is {solve.text('status')!r:.80}, which is not a status") from None
    environment, inputs, before, implementations = (
        costs.record("environment"),
        record.record("inputs"),
        record.record("before"),
        record.record("implementations"),
    )
    return Schedule(
        name=record.text("model"),
        fingerprint=record.text("fingerprint"),
        structure=record.text("structure"),
        operators=record.integer("operators"),
        inputs={name: _tensor_spec(inputs.record(name)) for name in inputs},
        choices=Choices(
            before={name: _runs(before, name) for name in before},
            implementations={name: implementations.text(name) for name in implementations},
            stored=record.texts("stored"),
        ),
        budget_bytes=record.integer("budget_bytes", least=1),
        peak_bytes=predicted.integer("peak_bytes"),
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
        tolerance=record.number("tolerance") if record.optional("tolerance") else 0.0,
        layout=layout,
        autocast=record.text("autocast") if record.optional("autocast") else "",
        smallest_proven_bytes=solve.integer("smallest_proven_bytes"),
        smallest_reached_bytes=(
            solve.integer("smallest_reached_bytes") if solve.optional("smallest_reached_bytes") else None
        ),
    )


def schedule_text(schedule: Schedule) -> str:
    """A schedule as the text of its file."""
    data: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "model": schedule.name,
        "fingerprint": schedule.fingerprint,
        "structure": schedule.structure,
        "operators": schedule.operators,
        "inputs": {
            name: {
                "shape": InLine(spec.shape),
                "stride": InLine(spec.stride),
                "dtype": spec.dtype,
                "requires_grad": spec.requires_grad,
            }
            for name, spec in schedule.inputs.items()
        },
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
        "predicted": {"peak_bytes": schedule.peak_bytes, "latency_ms": float(schedule.latency_ms)},
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
    }
    header = (
        f"{schedule.name} within {format_bytes(schedule.budget_bytes)}: peak {format_bytes(schedule.peak_bytes)}, "
        f"{schedule.overhead:+.1%} step time ({schedule.kind} for {schedule.device}).\n"
        "stored: kept from the forward to the backward pass. before: what is run again right before an operator.\n"
        "implementations: how operators run the first time, where that is not the default."
    )
    return dump_yaml(data, header)


def _tensor_spec(record: Record) -> TensorSpec:
    return TensorSpec(
        shape=record.integers("shape"),
        stride=record.integers("stride"),
        dtype=record.text("dtype"),
        requires_grad=record.flag("requires_grad"),
    )


def _runs(record: Record, name: str) -> tuple[Run, ...]:
    runs: list[Run] = []
    for item in record.items(name):
        if isinstance(item, str):
            runs.append((item, DEFAULT))
        elif isinstance(item, dict) and len(item) == 1:
            (operator, how), *_ = item.items()
            if not isinstance(operator, str) or not isinstance(how, str):
                raise record.error(name, f"should list operators; {item!r:.80} is not one")
            runs.append((operator, how))
        else:
            raise record.error(name, f"should list operators; {item!r:.80} is not one")
    return tuple(runs)


__all__ = ["FORMAT", "VERSION", "ScheduleFileError", "load_schedule", "save_schedule", "schedule_text"]
