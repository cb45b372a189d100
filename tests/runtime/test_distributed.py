"""Two gloo processes on the CPU: gradients are reduced as they become ready, and training is plain training."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("distributed_training.py")


KINDS = ("ddp", "fsdp", "blocks", *(["models"] if "MONETLITE_THOROUGH" in os.environ else []))


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes(kind):
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", PROGRAM, kind],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert run.stdout.split() == ["same", "same"], run.stderr[-3000:]
