"""The compiled search stays within its arrays: compiled code doesn't check, so it is run as Python, which does."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import random
import numpy
from random_graphs import random_profile
from monetlite.solving.annealing.compiled import AnnealingCost
from monetlite.solving.annealing.flat_problem import keep_everything
from monetlite.solving.annealing.flat_problem import flatten
from monetlite.solving.annealing.runs import AnnealingRun, Workspace
from monetlite.solving.problem import Problem

numpy.seterr(all="ignore")
for seed in range(100, {end}):
    profile = random_profile(random.Random(seed))
    flat = flatten(Problem.of(profile))
    workspace = Workspace(flat, seed)
    budget_bytes = flat.plain_peak_bytes * 6 // 10
    reserved = AnnealingCost(budget_bytes=budget_bytes, reserved=True, room_bytes=1)
    for cost, iterations in ((AnnealingCost(budget_bytes=budget_bytes, weight=0.0), 1000), (reserved, 25)):
        run = AnnealingRun(keep_everything(flat), cost, (100.0, 0.1), (1.0, 12.0), iterations)
        for _ in range(2):
            others = run.choices.copy()[None]
            workspace.advance(run, 1.0, lambda: False, others=others)
            run.at = 0
        groups = flat.tables.operators[:, 1] - flat.tables.operators[:, 0]
        for part in range(2):
            start = flat.value_count + part * flat.operator_count
            named = run.choices[start : start + flat.operator_count]
            assert ((named >= 0) & (named < numpy.maximum(groups, 1))).all(), (seed, part)
print("within bounds")
"""


def test_moves_stay_within_the_arrays() -> None:
    folder = Path(__file__).parent
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1", "PYTHONPATH": f"{folder}:{folder.parent}"}
    program = PROGRAM.replace("{end}", "106" if "MONETLITE_THOROUGH" in os.environ else "102")
    run = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    assert run.stdout == "within bounds\n", run.stderr[-2000:]
