"""Training steps captured and lowered for CUDA, without a GPU: torch is given one that nothing runs on.

The attention that a GPU would choose can't be told so: monetlite's own rules choose it.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
SCHEDULES = HERE.parents[1] / "schedules"
CASES = ["cnn under float16", "small llama", "number", "images"]
if "MONETLITE_THOROUGH" in os.environ:
    CASES += ["llama", "cnn", "gpt", "gpt2", "resnet", "mobilenet", "bert", "vit"]
    CASES += sorted({path.name.rpartition("_")[0]: str(path) for path in SCHEDULES.glob("*/*.yaml")}.values())


def test_schedules_solved_without_a_gpu_run_on_one(tmp_path):
    if torch.version.cuda is not None:
        pytest.skip("this torch is built for CUDA, where a second, pretended CUDA can't be loaded")
    if shutil.which("g++") is None:
        pytest.skip("needs g++, to compile a device for torch (apt-get install g++)")
    library, torch_folder = tmp_path / "fake_gpu.so", Path(torch.__file__).parent
    flags = [f"-I{torch_folder}/include", f"-L{torch_folder}/lib", f"-Wl,-rpath,{torch_folder}/lib"]
    build = ["g++", "-std=c++20", "-O0", "-shared", "-fPIC", HERE / "fake_gpu.cpp", "-o", library, *flags]
    subprocess.run([*build, "-lc10", "-ltorch_cpu"], check=True)
    command = [sys.executable, HERE / "steps_on_fake_gpu.py", library, *CASES]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert {case: item["problems"] for case, item in found.items()} == {case: [] for case in CASES}
    assert all(item["calls"] > 50 for item in found.values())
