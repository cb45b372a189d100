"""The compiled search stays within its arrays: compiled code doesn't check, so it is run as Python, which does."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import random
import numpy
from random_graphs import random_profile
from monetlite.solving.annealing import Walker, Workspace
from monetlite.solving.genomes import keep_everything
from monetlite.solving.moves import build_moves
from monetlite.solving.problem import build_problem

numpy.seterr(all="ignore")
for seed in range(100, 106):
    profile = random_profile(random.Random(seed))
    problem = build_problem(profile)
    workspace = Workspace(problem, build_moves(problem), seed)
    walker = Walker(keep_everything(problem), (100.0, 0.1, 1.0, 12.0, 0.0), 2500)
    for _ in range(2):
        elite = walker.genome.copy()[None]
        workspace.advance(walker, problem.plain_peak_bytes * 6 // 10, 1.0, lambda: False, elite=elite)
        walker.at = 0
    groups = problem.tables.operators[:, 1] - problem.tables.operators[:, 0]
    for part in range(2):
        start = problem.value_count + part * problem.operator_count
        named = walker.genome[start : start + problem.operator_count]
        assert ((named >= 0) & (named < numpy.maximum(groups, 1))).all(), (seed, part)
print("within bounds")
"""


def test_moves_stay_within_the_arrays() -> None:
    folder = Path(__file__).parent
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1", "PYTHONPATH": f"{folder}:{folder.parent}"}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False
    )
    assert run.stdout == "within bounds\n", run.stderr[-2000:]
