"""Two gloo processes on the CPU: gradients are reduced as they become ready, and training is plain training."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("distributed_training.py")
KINDS = ["ddp", "fsdp", "blocks", "collectives", "buckets"] + ["models"] * ("MONETLITE_THOROUGH" in os.environ)


def test_two_processes(tmp_path):
    run = subprocess.run(
        [sys.executable, PROGRAM, tmp_path / "meeting", *KINDS],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "MONETLITE_CACHE": str(tmp_path / "costs")},
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert sorted(run.stdout.split()) == sorted(2 * KINDS), run.stderr[-3000:]
