"""What people use today beside monetlite: the same model on the same machine, in one run."""

from monetlite.checking.comparison.data import Comparison, Duel, Peer, Run, Standing
from monetlite.checking.comparison.runner import BUDGETS, PEERS, compare

__all__ = ["BUDGETS", "PEERS", "Comparison", "Duel", "Peer", "Run", "Standing", "compare"]
