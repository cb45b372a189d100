"""Uses an installed monetlite as a person would: every public name and every command, from a folder of its own.

Run it with the Python of an environment in which only the wheel is installed, from outside of the repository:

    python installed.py REPOSITORY
"""

import contextlib
import lzma
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

import monetlite
from monetlite.cli import main

REPOSITORY = Path(sys.argv[1]).resolve()
MONETS = "solution_vgg16_176_inplace_conv_multiway_newnode_7.00.pkl"
OWN_MODEL = """
import torch
from torch import nn

def build(batch: int = 4):
    layers = [layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.ReLU())]
    return nn.Sequential(*layers), (torch.randn(batch, 32),)
"""
IN_LAYERS = """
import torch
from torch import nn

def build(batch: int = 64):
    row = [nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4)]
    return nn.Sequential(*row), (torch.randn(batch, 32),)
"""
COMMANDS = (
    "solve --model resnet50 --budget 6GB --time-limit 4",
    "solve --model resnet18 --batch 4 --input-size 64 --device t4 --budget 250MB --time-limit 1 --output mine.yaml",
    "show mine.yaml --output timeline.png",
    "show mine.yaml --output report.html --time-limit 1",
    "check mine.yaml --repeats 1",
    "show mine.yaml --time-limit 1",
    "show mine.yaml --batch 2",
    "measure --operators --model own.py:build --device cpu --output profile.json",
    "measure --model own.py:build --device cpu --batch 2,4 --repeats 1 --warmup 0",
    "solve --max-batch --model own.py:build --device t4 --budget 100kB --time-limit 1",
    "compare --model own.py:build --budgets 90% --repeats 1 --time-limit 1 --peers checkpoint --output compared.md",
    "solve --model layered.py:build --budget 95% --device cpu --time-limit 1 --output layered.yaml",
    "export layered.yaml --model layered.py:build --to checkpoint --output plan.py",
    "fit own.py:build --gpu t4 --time-limit 1",
    "zoo list",
    "zoo show zoo:resnet50@6GB",
    "zoo get zoo:resnet50@6GB --output got.yaml",
    "zoo check mine.yaml",
    "zoo add mine.yaml --folder schedules",
    f"zoo import {MONETS}",
)

IN_PROCESSES = (COMMANDS[0], "zoo list")
"""The first of all, and one that takes no time. For each other, torch would be imported once more."""


def use_every_name() -> None:
    """Use each name of `monetlite.__all__` once."""
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    inputs = torch.randn(4, 8)
    profile = monetlite.profile(monetlite.trace(model, inputs), device="t4")
    profile.save("own.json")
    schedule = monetlite.solve(monetlite.load_profile("own.json"), budget="100%", time_limit=1)
    monetlite.simulate(profile, schedule)
    monetlite.sweep(profile, ["100%"], time_limit=1)
    schedule.save("own.yaml")
    assert isinstance(monetlite.load_schedule("own.yaml"), monetlite.Schedule)
    assert monetlite.verify(model, "own.yaml", inputs).passed
    wrapped = monetlite.MONeTWrapper(model, "own.yaml")
    wrapped(inputs).sum().backward()
    monetlite.optimize(model, inputs, budget="100%", device="t4", time_limit=1)
    monetlite.compare(model, inputs, ["90%"], time_limit=1, repeats=1, peers=["checkpoint"])
    with contextlib.suppress(monetlite.MonetliteError):  # where torch's partitioner takes no solver
        monetlite.compile_within(model, "1GB")
    with contextlib.suppress(monetlite.MonetliteError):  # where there is no GPU
        monetlite.limit_reserved("6GB")
    for name in monetlite.__all__:
        getattr(monetlite, name)


def main_program() -> None:
    """Use the names, then the commands."""
    assert REPOSITORY not in Path(monetlite.__file__).resolve().parents or "site-packages" in monetlite.__file__
    use_every_name()
    Path("own.py").write_text(OWN_MODEL, encoding="utf-8")
    Path("layered.py").write_text(IN_LAYERS, encoding="utf-8")
    Path("schedules").mkdir()
    sample = REPOSITORY / "tests" / "zoo" / "monet_samples" / f"{MONETS}.xz"
    Path(MONETS).write_bytes(lzma.decompress(sample.read_bytes()))
    unused = {
        name for name in commands() if not any(line.startswith(f"{name} ") for line in (*COMMANDS, "zoo list "))
    }
    assert not unused, f"no use of {unused}"
    for line in COMMANDS:
        print(f"$ monetlite {line}", flush=True)
        run = in_a_process if line in IN_PROCESSES else in_this_process
        if code := run(line.split()):
            sys.exit(f"exit code {code}")


def in_a_process(arguments: list[str]) -> int:
    """Run a command by the program that was installed."""
    return subprocess.run([Path(sys.executable).with_name("monetlite"), *arguments], check=False).returncode


def in_this_process(arguments: list[str]) -> int:
    """Run a command where torch is imported already."""
    try:
        main(arguments, prog_name="monetlite")
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def commands() -> set[str]:
    """Return the names of the commands that are listed, those of `zoo` with it."""
    listed = {name for name, command in main.commands.items() if not command.hidden}
    return {*listed, *(f"zoo {name}" for name in main.commands["zoo"].commands)}


if __name__ == "__main__":
    main_program()
