"""`monetlite compare` where a measured peak is more than was asked for: solving again, for less."""

from monetlite.checking.comparison import contest
from monetlite.checking.comparison.bench import Entrant
from monetlite.checking.comparison.peer_runs import Peer, PeerRun
from monetlite.core.errors import InfeasibleBudget
from monetlite.core.options import SolvingOptions


def test_a_run_over_its_budget_is_shown_where_nothing_takes_less(monkeypatch):
    """Compiled steps may take more than schedules promise; solving for less then has an end."""
    solved = []

    class Within:
        peak_bytes = 90
        reserved_bytes = None

    class Measured:
        @staticmethod
        def enter(contender):
            return Entrant(run=PeerRun(peer=contender.peer, setting=contender.setting, peak_bytes=120))

    def solve(peer, profiles, budget_bytes, options, starts, *, compiled):
        solved.append(budget_bytes)
        if len(solved) == 2:
            raise InfeasibleBudget("too small", budget_bytes=budget_bytes, proven_bytes=0, reached_bytes=None)
        return Within

    monkeypatch.setattr(contest, "solve_as", solve)
    entrant = contest.Contest(
        bench=Measured,
        profiles=[],
        options=SolvingOptions(),
        budgets_bytes=[100],
        repeats=1,
        say=lambda _: None,
        finished=lambda *_: None,
        shown=[Entrant(run=PeerRun(peer=Peer.PLAIN), first_ms=1.0)],
    ).solve_and_enter(Peer.MONETLITE, 100, compiled=True)
    assert solved == [100, 70]
    assert entrant.run.peak_bytes == 120
    assert entrant.schedule is Within
    assert not entrant.refused
