"""Who is fastest within a budget: which settings of a peer count, and whether monetlite is faster."""

from collections.abc import Iterable, Mapping, Sequence

from monetlite.checking.comparison.data import Duel, Peer, Run, Standing


def fastest_within(runs: Sequence[Run], budgets_bytes: Iterable[int]) -> list[Run]:
    """Of one peer's runs, the fastest within each budget; the one with the smallest peak if none fits any."""
    ran = [run for run in runs if not run.failure]
    found = [run for budget_bytes in budgets_bytes if (run := _fastest(ran, budget_bytes)) is not None]
    return found or [min(ran, key=_peak_bytes)] if ran else []


def standings(budgets: Mapping[str, int], runs: Sequence[Run]) -> tuple[Standing, ...]:
    """The verdict at each budget, from the largest to the smallest."""
    return tuple(
        _standing(budget, budget_bytes, runs)
        for budget, budget_bytes in sorted(budgets.items(), key=lambda item: -item[1])
    )


def duels(runs: Sequence[Run]) -> tuple[Duel, ...]:
    """Every run of a peer beside monetlite's fastest at an equal or smaller measured peak."""
    ours = [run for run in runs if run.peer is Peer.MONETLITE and run.times_ms]
    theirs = [run for run in runs if run.peer not in (Peer.PLAIN, Peer.MONETLITE) and run.times_ms]
    return tuple(Duel(peer=run, ours=_fastest(ours, _peak_bytes(run))) for run in theirs)


def _standing(budget: str, budget_bytes: int, runs: Sequence[Run]) -> Standing:
    fought = {duel.peer: duel for duel in duels(runs)}
    fitting: list[Duel] = []
    too_large: list[Run] = []
    for peer in Peer:
        theirs = [run for run in fought if run.peer is peer]
        best = _fastest(theirs, budget_bytes)
        if best is not None:
            fitting.append(fought[best])
        elif theirs:
            too_large.append(min(theirs, key=_peak_bytes))
    return Standing(
        budget=budget,
        budget_bytes=budget_bytes,
        ours=_fastest((run for run in runs if run.peer is Peer.MONETLITE and run.times_ms), budget_bytes),
        duels=tuple(fitting),
        too_large=tuple(too_large),
    )


def _fastest(runs: Iterable[Run], budget_bytes: int) -> Run | None:
    return min((run for run in runs if run.within(budget_bytes)), key=lambda run: run.step_ms, default=None)


def _peak_bytes(run: Run) -> int:
    return run.peak_bytes or 0


__all__ = ["duels", "fastest_within", "standings"]
