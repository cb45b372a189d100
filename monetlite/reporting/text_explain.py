"""The sentences of `monetlite show`, on a terminal and on a page, and their facts for `--json`."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import islice
from typing import Any

from rich.console import Console

from monetlite.core.choices import DEFAULT
from monetlite.core.graph import LAYOUTS_IN_WORDS
from monetlite.core.schedule import Status
from monetlite.core.step_analysis import Fate
from monetlite.core.units import format_bytes, format_ms
from monetlite.reporting.analysis import Analysis, budget_in_words
from monetlite.reporting.analysis_alternatives import Alternative, Around, LowestPeak, StoredByOne
from monetlite.reporting.analysis_overhead import Cause, OverheadShare, extra_ms_of, overhead_shares
from monetlite.reporting.analysis_tensors import (
    PeakStep,
    SparedRead,
    TensorHistory,
    TensorStay,
    largest_tensors,
    peak_step_of,
)
from monetlite.reporting.analysis_tiles import tiled_runs
from monetlite.reporting.explanation_writer import ExplanationWriter, TerminalWriter

HEAD_AND_LOSS = "linear_cross_entropy"
"""Family of the operator that is both."""
MAX_NAMES = 4
"""Names in a list within a sentence."""
MAX_ROWS = 8
"""Rows of one cause of overhead."""
ENOUGH_GROUPS = 4
"""Modules are told apart as deep as it takes to have so many."""


def explanation_facts(analysis: Analysis, around: Around) -> dict[str, Any]:
    """Everything that is printed and more, for `--json`: bytes and milliseconds."""
    schedule, scheduled, plain = analysis.schedule, analysis.scheduled, analysis.plain
    proven, reached = _smallest_of_file(analysis)
    return {
        "model": schedule.name,
        "costs": str(scheduled.profile.kind),
        "device": scheduled.profile.device,
        "budget_bytes": schedule.budget_bytes,
        "peak": asdict(peak_step_of(scheduled)),
        "plain_peak_bytes": plain.peak_bytes,
        "latency_ms": scheduled.latency_ms,
        "plain_latency_ms": plain.latency_ms,
        "tensors": [asdict(tensor) for tensor in largest_tensors(scheduled)],
        "tiles": [asdict(runs) for runs in tiled_runs(scheduled)],
        "overhead_ms": scheduled.latency_ms - plain.latency_ms,
        "overhead": [asdict(share) for share in overhead_shares(analysis)],
        "smallest_proven_bytes": proven,
        "smallest_reached_bytes": reached,
        "limit": around.limit and asdict(around.limit),
        "more_memory": around.more and asdict(around.more),
        "less_memory": around.less and asdict(around.less),
    }


def print_explanation(console: Console, analysis: Analysis, around: Around) -> None:
    """Print the causes of a schedule's peak and step time, and the schedules around it."""
    write_explanation(TerminalWriter(console), analysis, around)


def write_explanation(page: ExplanationWriter, analysis: Analysis, around: Around) -> None:
    """Write the causes of a schedule's peak and step time, and the schedules around it."""
    peak = peak_step_of(analysis.scheduled)
    _summary(page, analysis)
    _peak(page, peak)
    _tensors(page, largest_tensors(analysis.scheduled))
    _tiles(page, analysis)
    _overhead(page, analysis)
    _limit(page, analysis, peak, around.limit)
    if around.more is not None:
        page.heading("What 10% more memory would buy")
        _alternative(page, analysis, around.more)
    if around.less is not None:
        page.heading("What 10% less memory would cost")
        _alternative(page, analysis, around.less)


def _summary(page: ExplanationWriter, analysis: Analysis) -> None:
    schedule, scheduled, plain = analysis.schedule, analysis.scheduled, analysis.plain
    over_bytes = scheduled.peak_bytes - schedule.budget_bytes
    page.say(
        f"{schedule.name}: peak {format_bytes(scheduled.peak_bytes)} {'over' if over_bytes > 0 else 'within'} "
        f"{budget_in_words(schedule)}, step {format_ms(scheduled.latency_ms)}, {analysis.costs}."
    )
    if over_bytes > 0:
        page.say(
            f"The peak exceeds the budget by {format_bytes(over_bytes)}: the schedule's file was edited, or it was "
            "solved at other costs. Solve it again."
        )
    time_taken = f"{abs(analysis.overhead):.1%} {'more' if analysis.overhead > 0 else 'less'} time"
    if abs(analysis.overhead) < 0.0005:
        time_taken = "as much time"
    page.say(
        f"Plain training: peak {format_bytes(plain.peak_bytes)}, step {format_ms(plain.latency_ms)}. The schedule "
        f"takes {scheduled.peak_bytes / plain.peak_bytes:.0%} of the memory and {time_taken}."
    )
    extras = []
    if schedule.optimizer:
        extras.append(f"the state and step of {schedule.optimizer} are counted")
    if schedule.accumulate:
        extras.append("gradients of earlier batches are counted")
    if schedule.step_in_backward:
        extras.append("each gradient is counted until its parameter is updated")
    if schedule.autocast:
        extras.append(f"autocast to {schedule.autocast} is on")
    if layout := LAYOUTS_IN_WORDS[schedule.layout]:
        extras.append(f"the step has {layout}")
    if extras:
        page.say(f"In the schedule, {'; '.join(extras)}.")
    if analysis.as_solved:
        bound = format_ms(schedule.lower_bound_ms)
        page.say(f"No schedule within the budget takes less than {bound} (gap {schedule.gap:.1%}).")
    else:
        written = f"peak {format_bytes(schedule.peak_bytes)}, step {format_ms(schedule.latency_ms)}"
        page.say(f"Its file was written with other costs, and says: {written}.")


def _peak(page: ExplanationWriter, peak: PeakStep) -> None:
    page.heading("How the peak comes about")
    page.say(
        f"The peak of {format_bytes(peak.memory_bytes)} is at {_peak_operator(peak)}: "
        f"step {peak.step} of {peak.steps}, in the {_part(peak)}. Held there:"
    )
    _held(page, peak)
    page.say(
        f"{format_bytes(peak.own_bytes)} of it are the operator's own inputs, results and workspace. The largest "
        "tensors there:"
    )
    page.list_sizes((held.name, format_bytes(held.size_bytes), str(held.holding)) for held in peak.largest)


def _peak_operator(peak: PeakStep) -> str:
    how = "" if peak.implementation == DEFAULT else f" (run as {peak.implementation})"
    return f"{peak.operator}{how}{', run again' if peak.again else ''}"


def _part(peak: PeakStep) -> str:
    return "backward pass" if peak.backward else "forward pass"


def _held(page: ExplanationWriter, peak: PeakStep) -> None:
    page.list_sizes(
        (holding, format_bytes(size_bytes), f"{size_bytes / peak.memory_bytes:.1%}")
        for holding, size_bytes in peak.held_bytes.items()
        if size_bytes
    )


def _tensors(page: ExplanationWriter, tensors: Sequence[TensorHistory]) -> None:
    page.heading(f"The {len(tensors)} largest tensors of the forward pass")
    rows = []
    for tensor in tensors:
        written = "" if tensor.operator == tensor.name else f", written by {tensor.operator}"
        shape = "x".join(map(str, tensor.shape))
        size = format_bytes(tensor.size_bytes)
        rows.append((f"{tensor.name}: {size}, {shape} {tensor.dtype}{written}", story(tensor)))
    page.list_stories(rows)


def story(tensor: TensorHistory) -> str:
    """The history of a tensor, in sentences."""
    first = tensor.stays[0] if tensor.stays else None
    sentences = []
    if first is None:
        sentences.append("Never made.")
    elif first.before is not None:
        sentences.append("Not made in the forward pass.")
    elif tensor.fate is Fate.HELD:
        sentences.append(f"Held to the end of the step{_read_by(first)}.")
    elif tensor.fate in (Fate.STORED, Fate.STORED_THEN_RECOMPUTED):
        sentences.append(f"Kept from {first.writer} to {first.until}{_taken_over(first)}{_read_by(first)}.")
    elif first.readers:
        sentences.append(f"Dropped in the forward pass after {first.until}{_taken_over(first)}.")
    else:
        sentences.append("Dropped as soon as it is made.")
    if again := tensor.recomputations:
        sentences.append(_computed_again(again, made=first is not None and first.before is None))
    elif tensor.fate in (Fate.FREED, Fate.NEVER_MADE):
        sentences.append(_unneeded(tensor.spared))
    return " ".join(sentences)


def _taken_over(stay: TensorStay) -> str:
    return ", which writes its result over it" if stay.overwritten else ""


def _read_by(stay: TensorStay) -> str:
    return f"; read by {_listed(stay.readers)}" if stay.readers else ""


def _computed_again(stays: Sequence[TensorStay], made: bool) -> str:
    times = {1: "once", 2: "twice"}.get(len(stays), f"{len(stays)} times")
    each = sorted({format_ms(stay.latency_ms) for stay in stays})
    cost = (
        f"{each[0]}{' each time' if len(stays) > 1 else ''}" if len(each) == 1 else f"{each[0]} to {each[-1]} each"
    )
    before = _listed([stay.before for stay in stays if stay.before is not None])
    return f"Computed{' again' if made else ''} {times}, before {before}, for {cost}."


def _unneeded(spared: Sequence[SparedRead]) -> str:
    if not spared:
        return "Neither this backward pass nor plain training's needs it."
    ways = [
        f"{item.operator} {'is not run' if item.implementation is None else f'runs as {item.implementation}'}"
        for item in spared
    ]
    return f"Plain training's backward pass needs it, this one doesn't: {_listed(ways)}."


def _listed(names: Iterable[str]) -> str:
    """The first few names, and how many more."""
    distinct = list(dict.fromkeys(names))
    rest = len(distinct) - MAX_NAMES
    listed = ", ".join(distinct[:MAX_NAMES])
    return f"{listed} and {rest} more" if rest > 0 else listed


def _tiles(page: ExplanationWriter, analysis: Analysis) -> None:
    groups = tiled_runs(analysis.scheduled)
    if not groups:
        return
    page.heading("What runs in tiles of rows")
    for item in groups:
        what = "Head and loss" if item.family == HEAD_AND_LOSS else item.modules or "The model"
        part = "backward" if item.backward else "forward"
        whole, tiled = format_bytes(item.whole_bytes), format_bytes(item.tiled_bytes)
        page.say(
            f"{what}, {part}, in {item.tiles} tiles: {tiled} at a time in place of {whole}, for "
            f"{item.extra_ms / analysis.plain.latency_ms:+.1%} of plain training's step."
        )


def _overhead(page: ExplanationWriter, analysis: Analysis) -> None:
    page.heading("Where the step takes longer than plain training's, and where less")
    all_shares = overhead_shares(analysis)
    if not all_shares:
        page.say("Nowhere: every operator runs once and as it does there.")
        return
    scheduled_ms, plain_ms = analysis.scheduled.latency_ms, analysis.plain.latency_ms
    digits = max(2, 4 - math.floor(math.log10(max(plain_ms, 1e-9))))
    rows: list[tuple[str, str, str]] = []

    def add(label: str, shares: Sequence[OverheadShare]) -> None:
        runs = sum(share.runs for share in shares)
        rows.append((label, str(runs), f"{extra_ms_of(shares):+.{digits}f}"))

    for cause in Cause:
        if shares := [share for share in all_shares if share.cause is cause]:
            add(cause, shares)
            for label, group in _groups(shares):
                add(f"  {label}", group)
    rows.append(("in all", "", f"{scheduled_ms - plain_ms:+.{digits}f}"))
    page.list_figures(("", "runs", "ms"), rows)
    page.say(
        f"Indented rows are parts of the row above. The others sum to the {scheduled_ms:.{digits}f} ms of the "
        f"schedule less the {plain_ms:.{digits}f} ms of plain training, each row rounded."
    )


def _groups(shares: Sequence[OverheadShare]) -> list[tuple[str, list[OverheadShare]]]:
    """Shares of one cause, largest first: re-runs by module, others by family and implementation."""
    depth = _depth([share.module for share in shares])
    groups: defaultdict[str, list[OverheadShare]] = defaultdict(list)
    for share in shares:
        how = "" if share.implementation == DEFAULT else f" as {share.implementation}"
        label = f"{share.family.removeprefix('monetlite.')}{how}"
        if share.cause is Cause.RECOMPUTED:
            label = ".".join(share.module.split(".")[:depth]) or "(outside of submodules)"
        groups[label].append(share)
    order = sorted(groups.items(), key=lambda item: -abs(extra_ms_of(item[1])))
    if len(order) <= MAX_ROWS:
        return order
    rest = [share for _, group in order[MAX_ROWS - 1 :] for share in group]
    return [*order[: MAX_ROWS - 1], (f"{len(order) - MAX_ROWS + 1} others", rest)]


def _depth(modules: Iterable[str]) -> int:
    """Number of levels of module paths that tell enough groups apart; all of them, if none does."""
    paths = [module.split(".") for module in modules]
    deepest = max(map(len, paths))
    for depth in range(1, deepest):
        if len({tuple(path[:depth]) for path in paths}) >= ENOUGH_GROUPS:
            return depth
    return deepest


def _smallest_of_file(analysis: Analysis) -> tuple[int, int | None]:
    """The schedule's smallest budgets, proven and reached; nothing is known of them at costs of another device."""
    schedule = analysis.schedule
    return (schedule.smallest_proven_bytes, schedule.smallest_reached_bytes) if analysis.as_solved else (0, None)


def _limit(page: ExplanationWriter, analysis: Analysis, present: PeakStep, limit: LowestPeak | None) -> None:
    page.heading("What limits going lower")
    proven, reached = _smallest_of_file(analysis)
    if limit is not None:
        proven = max(proven, limit.proven_bytes)
    known = [reached, None if limit is None else limit.peak.memory_bytes]
    smallest = min([present.memory_bytes, *(item for item in known if item is not None)])
    least = f"Every schedule needs at least {format_bytes(proven)} (proven). " if proven else ""
    page.say(f"{least}The smallest peak known is {format_bytes(smallest)}.")
    if limit is None:
        return
    peak = limit.peak
    which = f"The leanest schedule found in {_seconds(limit.seconds)}"
    if peak.memory_bytes == present.memory_bytes:
        which = f"No leaner schedule was found in {_seconds(limit.seconds)}. This one"
    place = f"at {_peak_operator(peak)}, in the {_part(peak)}"
    own = f"{format_bytes(peak.own_bytes)} of that are the operator's own inputs, results and workspace"
    page.say(f"{which} peaks at {format_bytes(peak.memory_bytes)}, {place}. {own}:")
    _held(page, peak)


def _alternative(page: ExplanationWriter, analysis: Analysis, other: Alternative) -> None:
    schedule, present_ms = analysis.schedule, analysis.scheduled.latency_ms
    budget, seconds = budget_in_words(schedule, other.budget_bytes), _seconds(other.seconds)
    bound = f"No schedule there takes less than {format_ms(other.lower_bound_ms)}."
    if other.latency_ms is None or other.peak_bytes is None:
        proven = f"Nothing fits within {budget}: every schedule needs at least {format_bytes(other.needed_bytes)}."
        unknown = f"Nothing was found within {budget} in {seconds}, and nothing is proven: there may be a schedule."
        page.say(proven if other.status is Status.INFEASIBLE else unknown)
        return
    if math.isclose(other.latency_ms, present_ms, rel_tol=1e-6):
        if other.budget_bytes < schedule.budget_bytes:
            page.say(f"Nothing: within {budget} a step takes {format_ms(other.latency_ms)} too.")
            return
        page.say(f"Within {budget}, nothing faster than {format_ms(present_ms)} was found in {seconds}. {bound}")
        return
    page.say(
        f"Within {budget}: step {format_ms(other.latency_ms)} in place of {format_ms(present_ms)} "
        f"({other.latency_ms / present_ms - 1:+.1%}), peak {format_bytes(other.peak_bytes)}, the best found in "
        f"{seconds}. {bound}"
    )
    needed_bytes = other.peak_bytes if other.reserved_bytes is None else other.reserved_bytes
    if other.latency_ms < present_ms and needed_bytes <= schedule.budget_bytes:
        page.say("It fits the present budget too: solve for that again, with more time.")
    changes = [
        ("It also stores", other.stored, "computed again at present"),
        ("It no longer stores", other.dropped, "computed again then"),
    ]
    for title, tensors, note in changes if other.budget_bytes > schedule.budget_bytes else reversed(changes):
        _kept(page, title, tensors, note)


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 0.95 else "less than a second"


def _kept(page: ExplanationWriter, title: str, tensors: Sequence[StoredByOne], note: str) -> None:
    if not tensors:
        return
    size = format_bytes(sum(item.size_bytes for item in tensors))
    more = f", the largest {MAX_NAMES} of them" if len(tensors) > MAX_NAMES else ""
    page.say(f"{title} {len(tensors)} tensor{'s' if len(tensors) > 1 else ''}, {size}{more}:")
    rows = ((item.name, format_bytes(item.size_bytes), note if item.recomputed else "") for item in tensors)
    page.list_sizes(islice(rows, MAX_NAMES))
