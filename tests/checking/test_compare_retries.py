"""`monetlite compare` where a measured peak is more than was asked for: solving again, for less."""

from monetlite.checking.comparison import Peer, PeerRun, runner
from monetlite.checking.comparison.bench import Entrant, Unsupported


def test_a_run_over_its_budget_is_shown_where_nothing_takes_less():
    """Compiled steps may take more than schedules promise; solving for less then has an end."""
    solved = []

    class Within:
        peak_bytes = 90
        reserved_bytes = None

    class Measured:
        @staticmethod
        def enter(contender):
            return Entrant(run=PeerRun(peer=contender.peer, setting=contender.setting, peak_bytes=120))

    class Planner:
        @staticmethod
        def solve(peer, budget_bytes, starts):
            solved.append(budget_bytes)
            if len(solved) == 2:
                raise Unsupported("no schedule within it")
            return Within

    contest = runner._Contest(bench=Measured, planner=Planner, budgets_bytes=[100], say=lambda _: None)
    item, schedule = contest._scheduled(Peer.MONETLITE, 100, compiled=True)
    assert solved == [100, 70]
    assert item.run.peak_bytes == 120
    assert schedule is Within
