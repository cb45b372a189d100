"""Lower bounds that hold for every legal schedule: on its latency within a budget, and on its peak."""

import math

from monetlite.costs import Profile
from monetlite.solving.options import Outline


def trivial_bound_ms(profile: Profile) -> float:
    """Every main operator once, each with its fastest implementation: in ms."""
    outline = Outline.of(profile)
    return math.fsum(outline.main_least_ms)


def smallest_budget_bound(profile: Profile) -> int:
    """A number of bytes below which no budget is feasible."""
    return profile.graph.resident.total
