"""The text of `monetlite fit`: one screen."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Console

from monetlite.core.units import format_bytes, format_ms
from monetlite.planning.card_fit import PLANNED, CardFit, CardMemory, FitSetting, SizeLimits
from monetlite.reporting.fit_lines import EXPANDABLE_SEGMENTS, every_layer
from monetlite.reporting.text_tables import facts_table, figures_table

_BAR = 40
"""Characters of the longest bar."""


def fit_facts(answer: CardFit, description: str, lines: Mapping[str, list[str]]) -> dict[str, Any]:
    """The figures for `--json`: bytes and milliseconds."""
    card, fastest = answer.card, answer.fastest
    return {
        "model": answer.plain.profile.graph.name,
        "description": description,
        "costs": str(answer.plain.profile.kind),
        "device": card.name,
        "card_bytes": card.total_bytes,
        "context_bytes": card.context_bytes,
        "gaps_bytes": card.gaps_bytes,
        "budget_bytes": card.budget_bytes,
        "batch": answer.batch,
        "sequence_length": answer.length,
        "fits_as_it_is": answer.fits(answer.plain),
        "memory": dict(answer.parts),
        "proven_bytes": answer.proven_bytes,
        "smallest_reached_bytes": answer.leanest.peak_bytes,
        "ways": [_way_facts(answer, way) for way in answer.ways],
        "largest": {kind: limits and asdict(limits) for kind, limits in answer.limits.items()},
        "fastest": None if fastest is None else way_name(fastest),
        "helpful": [{"setting": item.name, "peak_bytes": item.peak_bytes} for item in answer.helpful],
        "larger_card": None if answer.larger_card is None else answer.larger_card.name,
        "lines": dict(lines),
    }


def _way_facts(answer: CardFit, way: FitSetting) -> dict[str, Any]:
    return {
        "way": way_name(way),
        "every_n_layers": way.every or None,
        "tolerance": way.tolerance,
        "peak_bytes": way.peak_bytes,
        "reserved_bytes": None if answer.card.name == "cpu" else way.reserved_bytes,
        "least_reserved_bytes": None if answer.card.name == "cpu" else way.least_reserved_bytes,
        "expandable_segments": answer.needs_expandable(way),
        "latency_ms": way.latency_ms,
        "overhead": _overhead_of(answer, way),
        "fits": answer.fits(way),
    }


def _overhead_of(answer: CardFit, way: FitSetting) -> float:
    """Step time over plain training's, less one."""
    return way.latency_ms / answer.plain.latency_ms - 1 if answer.plain.latency_ms else 0.0


def way_name(way: FitSetting) -> str:
    if way.every:
        return f"checkpoint {every_layer(way.every)}"
    if way.tolerance is None:
        return "as it is"
    return f"monetlite, tolerance {way.tolerance:g}" if way.tolerance else "monetlite, same bits"


def print_fit(console: Console, answer: CardFit, description: str, lines: Mapping[str, list[str]]) -> None:
    """Print the answer, what takes the memory, the ways to train, and lines to paste."""
    console.print(_verdict(answer), style="bold")
    console.print(facts_table(_facts(answer, description)))
    _print_parts(console, answer)
    _print_ways(console, answer)
    if answer.fastest is None:
        if answer.proven_bytes > answer.card.budget_bytes:
            console.print(
                f"\nEvery schedule of this step needs at least {format_bytes(answer.proven_bytes)} (proven)."
            )
        console.print("\nTo make it fit:", style="bold")
        for line in _help(answer):
            console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
    for library, text in lines.items():
        console.print(f"\n# {library}", style="dim", markup=False)
        for line in text:
            console.print(line, markup=False, soft_wrap=True)


def _verdict(answer: CardFit) -> str:
    card, fastest = answer.card, answer.fastest
    where = f"the {card.title}" if card.name != "cpu" else "this machine's memory"
    if card.budget_bytes != card.left_bytes:
        where = format_bytes(card.budget_bytes)
    if fastest is answer.plain:
        return f"It fits {where} as it is."
    if fastest is None:
        return f"It does not fit {where}: {format_bytes(answer.leanest.peak_bytes)} is the least that was found."
    slower = _overhead_of(answer, fastest)
    how = "by checkpointing layers" if fastest.every else "with monetlite"
    if answer.fits(answer.plain):
        return f"It fits {where} as it is; {slower:+.1%} step time {how}."
    return f"It fits {where} {how}, {slower:+.1%} step time. As it is, it does not fit."


def _facts(answer: CardFit, description: str) -> Iterator[tuple[str, str]]:
    card, profile = answer.card, answer.plain.profile
    size = f"batch {answer.batch}" + (f" × {answer.length} tokens" if answer.length else "")
    counted = f"{profile.optimizer}" + (", accumulated gradients" if profile.accumulate else "")
    yield "model", description
    yield "step", f"{size}, {counted}"
    yield "budget", _budget_in_words(card)
    how = "measured here" if profile.kind == "measured" else "estimated, not measured"
    yield "figures", f"peaks of the step's tensors, traced; times {how}"


def _budget_in_words(card: CardMemory) -> str:
    if card.budget_bytes != card.left_bytes:
        return f"{format_bytes(card.budget_bytes)} as given; times are those of {card.title}"
    context = f" − {format_bytes(card.context_bytes)} CUDA context" if card.context_bytes else ""
    whose = "that torch reports" if card.context_bytes else "of memory"
    guesses = "both guesses" if card.context_bytes else "a guess"
    return (
        f"{format_bytes(card.left_bytes)} = {format_bytes(card.total_bytes)} {whose}{context} − "
        f"{format_bytes(card.gaps_bytes)} for gaps ({guesses})"
    )


def _print_parts(console: Console, answer: CardFit) -> None:
    peak = answer.plain.peak_bytes
    console.print(f"\nMemory as it is: {format_bytes(peak)} at its peak", style="bold")
    largest = max(answer.parts.values())
    for name, size in answer.parts.items():
        bar = "█" * round(_BAR * size / largest) or "▏" * (size > 0)
        console.print(f"  {name:<18}{format_bytes(size):>9}  {bar}", markup=False)
    over = peak - answer.card.budget_bytes
    rest = f"{format_bytes(over)} too much" if over > 0 else f"{format_bytes(-over)} to spare"
    console.print(f"  {'budget':<18}{format_bytes(answer.card.budget_bytes):>9}  {rest}", markup=False)


def _print_ways(console: Console, answer: CardFit) -> None:
    rows = [
        (
            way_name(way),
            "yes" if answer.fits(way) else "no",
            format_bytes(way.peak_bytes),
            format_ms(way.latency_ms),
            "" if way is answer.plain else f"{_overhead_of(answer, way):+.1%}",
        )
        for way in answer.ways
    ]
    console.print()
    columns = ("way to train", "fits", "peak", "step", "overhead")
    console.print(figures_table(columns, rows, left=("way to train", "fits")))
    if answer.fastest is not None and answer.needs_expandable(answer.fastest):
        reserved, least = answer.fastest.reserved_bytes, answer.fastest.least_reserved_bytes
        console.print(
            f"By default, torch's allocator would reserve {format_bytes(reserved)} for it. With "
            f"{EXPANDABLE_SEGMENTS}, {format_bytes(least)} will do."
        )
    if not answer.limits:
        return
    console.print()
    heads = ["largest that fits", "batch"]
    limits = [[kind, "not known" if of is None else _number(of.batch)] for kind, of in answer.limits.items()]
    if answer.length is not None:
        heads = [heads[0], f"batch × {answer.length} tokens", f"tokens × batch {answer.batch}"]
        limits = [[*row, _length(of)] for row, of in zip(limits, answer.limits.values(), strict=True)]
    console.print(figures_table(heads, limits, left=("largest that fits",)))


def _number(size: int | None) -> str:
    return "not known" if size is None else f"about {size:,}" if size else "none"


def _length(limits: SizeLimits | None) -> str:
    if limits is None or not limits.length or not limits.bounded:
        return _number(None if limits is None else limits.length)
    return f"{limits.length:,}, the model's limit"


def _help(answer: CardFit) -> Iterator[str]:
    for item in answer.helpful:
        fits = ": fits" if item.peak_bytes <= answer.card.budget_bytes else ""
        yield f"{item.name}: about {format_bytes(item.peak_bytes)}{fits}"
    limits = answer.limits.get(PLANNED)
    if limits and limits.batch:
        yield f"--batch {limits.batch}: fits"
    if limits and limits.length:
        yield f"--sequence-length {limits.length}: fits"
    if answer.larger_card is not None:
        yield f"a card with {format_bytes(answer.larger_card.total_bytes)} (--gpu {answer.larger_card.name}): fits"
    else:
        yield "no known card holds it: shard it over several (FSDP)"
