"""The same model trained by monetlite and by what people use today, on the same machine, in one run."""

from monetlite.checking.comparison.peer_runs import Comparison, Duel, Peer, PeerRun, Standing
from monetlite.checking.comparison.runner import BUDGETS, PEERS, compare

__all__ = ["BUDGETS", "PEERS", "Comparison", "Duel", "Peer", "PeerRun", "Standing", "compare"]
