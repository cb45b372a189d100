"""`monetlite compare`: who takes part, what is said of each, and what is written."""

import copy
import io
import json
import os
import signal
from dataclasses import replace

import commands
import pytest
import torch
import transformers
from rich.console import Console
from thoroughness import often
from torch import nn

import monetlite
from monetlite.checking.comparison import contest, runner, scheduled_peers
from monetlite.checking.comparison import peers as other_ways
from monetlite.checking.comparison.bench import Bench, Contender, Entrant, environment
from monetlite.checking.comparison.checkpoint_blocks import wrap_blocks
from monetlite.checking.comparison.peer_runs import PEERS, Comparison, Peer, PeerRun, standings
from monetlite.checking.comparison.peers import counts, cut
from monetlite.core.simulate import simulate
from monetlite.core.steps import plain_steps
from monetlite.core.units import format_ms
from monetlite.models import build_model
from monetlite.reporting.plots.comparison_plot import draw_comparison, save_comparison
from monetlite.reporting.text_comparison import comparison_markdown, print_comparison

MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x):
        return torch.relu(self.norm(x)) + x

def build():
    layers = [nn.Conv2d(3, 8, 3, padding=1), *(Block() for _ in range(3)), nn.Flatten(), nn.Linear(2048, 4)]
    return nn.Sequential(*layers), (torch.randn(4, 3, 16, 16),)
"""
QUICK = ("--time-limit", "0.2", "--repeats", "2")


@pytest.fixture
def folder(work_folder):
    (work_folder / "net.py").write_text(MODEL)
    return work_folder


def run(*arguments):
    return commands.run("compare", *arguments, columns=80)


def net():
    scope = {}
    exec(MODEL, scope)
    return scope["build"]()


def of(comparison, peer):
    return [item for item in comparison.runs if item.peer is peer]


def test_the_command_measures_judges_and_writes(folder):
    outputs = ("t.md", "f.json", "p.png")
    result = run(
        "--model",
        "net.py:build",
        "--budgets",
        "90%,60%",
        "--peers",
        "checkpoint,segments,checkmate",
        *QUICK,
        "--json",
        *(part for name in outputs for part in ("--output", name)),
    )
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    facts = json.loads((folder / "f.json").read_text())
    assert printed == {**facts, "outputs": list(outputs)}
    runs = facts["runs"]
    plain, *others = runs
    assert (plain["peer"], plain["ratio"], plain["exact"]) == ("plain", 1.0, True)
    assert {"device", "threads", "torch", "python", "monetlite"} <= facts["environment"].keys()
    for item in others:
        assert item["failure"] or (len(item["times_ms"]) >= 2 and item["peak_bytes"] > 0), item

    # Every row is told as soon as it is measured, in a log too, with the time left.
    told = result.stderr.splitlines()
    assert sum(line.startswith("plain PyTorch: peak") for line in told) == 1
    assert any(line.startswith("checkpoint: 3 Block: peak ") and ", one step ×" in line for line in told)
    assert any(line.startswith("monetlite: budget ") for line in told)

    # Blocks with batch norm run twice; plain training's gradients all the same.
    checkpoints = {item["setting"]: item for item in [*runs, *facts["tried"]] if item["peer"] == "checkpoint"}
    assert set(checkpoints) == {"3 Block", "every second of 3 Block", "every third of 3 Block"}
    checkpointed = checkpoints["3 Block"]
    assert checkpointed["gradient_difference"] == 0
    assert checkpointed["faults"] == ["statistics updated twice"]
    assert checkpointed["peak_bytes"] < plain["peak_bytes"]
    segmented = [item for item in [*runs, *facts["tried"]] if item["peer"] == "segments"]
    assert len(segmented) > 2
    assert all(item["faults"] == ["statistics updated twice"] for item in segmented)

    by_schedule = [item for item in runs if item["peer"] in ("monetlite", "checkmate") and not item["failure"]]
    assert {item["peer"] for item in by_schedule} == {"monetlite", "checkmate"}
    for item in by_schedule:
        assert item["exact"], item
        assert item["peak_bytes"] <= item["asked_bytes"], item

    fought = {duel["run"]: duel for duel in facts["duels"]}
    assert set(fought) == {at for at, item in enumerate(runs) if item["step_ms"] and item["peer"] in PEERS}
    for standing, share in zip(facts["budgets"], (0.9, 0.6), strict=True):
        assert standing["budget_bytes"] == int(share * plain["peak_bytes"])
        lost = []
        for duel in standing["peers"]:
            peer = runs[duel["run"]]
            assert duel == fought[duel["run"]]
            assert peer["peak_bytes"] <= standing["budget_bytes"]
            within = [item for item in by_schedule if item["peer"] == "monetlite"]
            within = [item["step_ms"] for item in within if item["peak_bytes"] <= peer["peak_bytes"]]
            assert duel["faster"] == (min(within, default=float("inf")) < peer["step_ms"])
            lost += [] if duel["faster"] else [peer]
        assert standing["faster"] == (standing["monetlite"] is not None and not lost)
        assert standing["verdict"].startswith("No: ") == bool(lost)
        fitting = {runs[duel["run"]]["peer"] for duel in standing["peers"]}
        assert fitting.isdisjoint(runs[at]["peer"] for at in standing["too_large"])

    table = (folder / "t.md").read_text()
    for said in (
        *(item["title"] for item in runs),
        *(standing["verdict"] for standing in facts["budgets"]),
        *(facts["environment"][name] for name in ("device", "torch", "monetlite")),
        "statistics updated twice",
        "2 steps of each",
    ):
        assert said in table
    picture = (folder / "p.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 10_000
    assert sorted(os.listdir(folder)) == sorted(["net.py", *outputs])


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("--budgets", "70%,much"), 2, "much"),
        (("--budgets", "0"), 2, "at least 1 byte"),
        (("--budgets", " , "), 2, "no budget"),
        (("--peers", "checkpoint,nobody"), 2, "no peer 'nobody'"),
        (("--output", "table.txt"), 2, "table.txt"),
        (("--output", "absent/t.md"), 4, "no folder absent"),
        (("--time-limit", "inf"), 2, "seconds"),
        (("--tolerance", "2"), 2, "tolerance"),
    ],
)
def test_what_is_refused_before_anything_runs(folder, monkeypatch, arguments, code, says):
    monkeypatch.setattr(runner, "Bench", lambda *_, **__: pytest.fail("ran in vain"))
    result = run("--model", "net.py:build", *arguments)
    assert result.exit_code == code, result.output
    assert says in result.stderr
    assert result.stdout == ""
    assert os.listdir(folder) == ["net.py"]


def test_the_quick_default_says_what_it_leaves_out(folder, monkeypatch):
    asked = {}

    def compare(*args, **options):
        asked.update(options, budgets=args[2])
        return monetlite.compare(*args, **{**options, "peers": [], "time_limit": 0.2, "repeats": 1})

    monkeypatch.setattr(runner, "compare", compare)
    result = run("--model", "net.py:build")
    assert result.exit_code == 0, result.output
    assert asked["peers"] == ["checkpoint", "selective"]
    assert asked["budgets"] == ["50%"]
    words = " ".join(result.stdout.split())
    assert "Left out: segments, tiled_loss, auto_sac, aot_eager, inductor, checkmate, gist (--peers all)" in words
    assert "--budgets 70%,50%,40%" in words


def test_interrupted_while_solving_nothing_is_written(folder, monkeypatch):
    """A solve takes Ctrl-C for the end of its time; the comparison ends."""
    solve_layouts = scheduled_peers.solve_layouts

    def interrupted(*args, **kwargs):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            return solve_layouts(*args, **kwargs)
        pytest.fail("not interrupted")

    monkeypatch.setattr(scheduled_peers, "solve_layouts", interrupted)
    before = signal.getsignal(signal.SIGINT)
    result = run("--model", "net.py:build", "--peers", "gist", *QUICK, "--output", "t.md", "--output", "p.png")
    assert result.exit_code == 4
    assert "monetlite: interrupted" in result.stderr
    assert os.listdir(folder) == ["net.py"]
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.thorough
def test_wrong_gradients_are_told_from_other_masks(monkeypatch):
    """GPT-2 with dropout: torch's partitioner draws masks again in the backward pass; checkpointing doesn't."""

    def draw(*_):
        torch.rand(())

    def shifted(model):
        model.register_forward_pre_hook(draw)
        return model

    def others(_):
        return [Contender(peer=Peer.SEGMENTS, setting="with masks of its own", prepare=shifted)]

    monkeypatch.setattr(other_ways, "SHARES", (0.1,))
    monkeypatch.setitem(contest.METHODS, Peer.SEGMENTS, others)
    config = transformers.GPT2Config(
        vocab_size=90, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2
    )
    model, tokens = transformers.GPT2LMHeadModel(config).train(), torch.randint(0, 90, (4, 16))
    inputs = {"input_ids": tokens, "labels": tokens}
    peers = ("checkpoint", "segments", "aot_eager")
    comparison = monetlite.compare(model, inputs, ["100%"], peers=peers, time_limit=0.5, repeats=1)
    (checkpointed,), (masked,), (compiled_,) = (of(comparison, Peer(peer)) for peer in peers)
    assert checkpointed.setting == "every_n_layers=1"
    assert checkpointed.faults == ()
    assert masked.faults == ("other dropout masks", "generator left in another state")
    assert compiled_.faults[0] == "wrong gradients: not those of its own loss"
    ours = [item for item in of(comparison, Peer.MONETLITE) if not item.failure]
    assert ours
    for item in ours:
        assert item.faults == ()
        assert item.gradient_difference <= 1e-6

    console = Console(width=80, record=True, file=io.StringIO())
    print_comparison(console, comparison)
    printed = console.export_text()
    assert max(map(len, printed.splitlines())) <= 80
    words = " ".join(printed.split())
    for item in comparison.runs:
        assert item.title.split(":")[0] in words
        assert all(fault in words for fault in item.faults)


def test_who_fails_is_a_run_with_a_reason_and_the_model_stays_as_it_was(monkeypatch):
    def too_large(model):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    class Tired(nn.Module):
        """Runs while it is looked at alone, and fails when steps are timed."""

        def __init__(self, model):
            super().__init__()
            self.model, self.steps = model, 0

        def forward(self, *inputs):
            self.steps += 1
            if self.steps > 3:
                raise RuntimeError("no more\nthan that")
            return self.model(*inputs)

    monkeypatch.setitem(
        contest.METHODS,
        Peer.CHECKPOINT,
        lambda _: [
            Contender(peer=Peer.CHECKPOINT, setting="everything", prepare=too_large),
            Contender(peer=Peer.CHECKPOINT, setting="nothing", prepare=int),
            Contender(peer=Peer.CHECKPOINT, setting="all", prepare=too_large),
        ],
    )
    monkeypatch.setitem(
        contest.METHODS,
        Peer.SELECTIVE,
        lambda _: [Contender(peer=Peer.SELECTIVE, setting="for a while", prepare=Tired)],
    )

    class TwoInputs(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net()[0]

        def forward(self, x, y):
            return self.net(x + y)

    model, inputs = TwoInputs(), (torch.randn(4, 3, 16, 16), torch.randn(4, 3, 16, 16))
    kept, random_state = copy.deepcopy(model), torch.get_rng_state()
    comparison = monetlite.compare(
        model, inputs, ["100%"], peers=("checkpoint", "segments", "selective"), time_limit=0.5, repeats=1
    )
    (large,), (several,), (tired,) = (
        of(comparison, peer) for peer in (Peer.CHECKPOINT, Peer.SEGMENTS, Peer.SELECTIVE)
    )
    assert (large.setting, large.times_ms) == ("every setting", ())
    assert large.failure.startswith("out of memory; TypeError: int() argument")
    assert large.failure.count("out of memory") == 1
    assert "this model has other inputs" in several.failure
    assert tired.failure == "RuntimeError: no more"
    (standing,) = comparison.standings
    assert not standing.duels
    assert standing.ours.gradient_difference == 0

    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(parameter.grad is None for parameter in model.parameters())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, kept.state_dict()[name]), name


@pytest.mark.thorough
def test_beside_inductor_schedules_may_have_compiled_regions(monkeypatch):
    """Within Inductor's peak only, and with sums in another order though the others are exact."""
    asked = []

    def wrap(model, schedule):
        asked.append(schedule)
        return monetlite.MONeTWrapper(model, schedule)

    def fused(_):
        return [Contender(peer=Peer.INDUCTOR, setting="budget 0.5", prepare=lambda model: model)]

    monkeypatch.setitem(contest.METHODS, Peer.INDUCTOR, fused)
    monkeypatch.setattr(scheduled_peers, "MONeTWrapper", wrap)
    model, inputs = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 8)), (torch.randn(256, 16),)
    comparison = monetlite.compare(model, inputs, ["95%"], peers=("inductor",), time_limit=0.5, repeats=1)
    (theirs,) = of(comparison, Peer.INDUCTOR)
    (compiled,) = (item for item in of(comparison, Peer.MONETLITE) if item.setting.endswith(", compiled"))
    assert compiled.asked_bytes == theirs.peak_bytes
    assert [schedule.budget_bytes for schedule in asked if schedule.tolerance == 1e-5] == [theirs.peak_bytes]
    assert all(schedule.layout == "as_traced" for schedule in asked if schedule.tolerance == 0)


@pytest.mark.thorough
def test_where_plain_training_does_not_fit_the_rest_is_still_measured(monkeypatch, tmp_path):
    enter = Bench.enter

    def too_large(bench, contender):
        if contender.peer is Peer.PLAIN:
            return Entrant(run=PeerRun(peer=Peer.PLAIN, failure="out of memory"))
        return enter(bench, contender)

    monkeypatch.setattr(Bench, "enter", too_large)
    model, inputs = net()
    comparison = monetlite.compare(model, inputs, ["90%"], peers=["checkpoint"], time_limit=0.2, repeats=2)
    (standing,) = comparison.standings
    profile = monetlite.profile(monetlite.trace(model, inputs))
    assert standing.budget_bytes == int(0.9 * simulate(profile, plain_steps(profile.graph)).peak_bytes)
    ran = [item for item in comparison.runs if item.times_ms]
    assert {item.peer for item in ran} == {Peer.CHECKPOINT, Peer.MONETLITE}
    assert all(comparison.ratio(item) is None and item.gradient_difference is None for item in ran)
    text = comparison_markdown(comparison)
    assert "Plain training: out of memory" in text
    assert format_ms(standing.ours.step_ms) in text
    save_comparison(comparison, tmp_path / "p.svg")
    assert "step time (ms)" in (tmp_path / "p.svg").read_text()


def test_schedules_that_are_compiled_have_a_line_and_a_label_of_their_own():
    eager = [PeerRun(peer=Peer.MONETLITE, peak_bytes=10**6 * at, times_ms=(1000.0 / at,)) for at in (9, 5)]
    compiled = [replace(run, label="monetlite, compiled", times_ms=(40.0,)) for run in eager]
    runs = (PeerRun(peer=Peer.PLAIN, peak_bytes=10**7, times_ms=(100.0,)), eager[0], *compiled, eager[1])
    figure = draw_comparison(
        Comparison(
            model="a model",
            inputs="2×3 float32",
            device="cpu",
            environment=environment("cpu"),
            repeats=1,
            time_limit=1.0,
            tolerance=0.0,
            autocast="",
            runs=runs,
            tried=(),
            duels=(),
            standings=(),
        )
    )
    (axes,) = (axes for axes in figure.axes if axes.lines)
    joined = {tuple(line.get_ydata()) for line in axes.lines if len(set(line.get_xdata())) == 2}
    assert {(2.0, 1000 / 9 / 100), (0.4, 0.4)} <= joined
    assert not any(2.0 in line and 0.4 in line for line in joined)
    assert {"monetlite", "monetlite, compiled"} <= {text.get_text() for text in axes.texts}


def test_a_verdict_says_no_where_another_is_faster():
    plain = PeerRun(peer=Peer.PLAIN, peak_bytes=1000, times_ms=(10.0,))
    quick = PeerRun(peer=Peer.INDUCTOR, setting="0.5", peak_bytes=600, times_ms=(8.0, 8.2, 8.1))
    slow = PeerRun(peer=Peer.CHECKPOINT, peak_bytes=500, times_ms=(14.0, 14.1, 14.2))
    ours = PeerRun(peer=Peer.MONETLITE, peak_bytes=500, times_ms=(9.0, 9.1, 9.2))
    roomy = PeerRun(peer=Peer.MONETLITE, peak_bytes=650, times_ms=(7.0, 7.1, 7.2))
    over, under = standings({"70%": 700, "50%": 500}, [plain, quick, slow, ours, roomy])
    assert over.ours is roomy
    # What needs more memory than the peer is no answer to it.
    duels = {duel.peer.peer: duel for duel in over.duels}
    assert (duels[Peer.INDUCTOR].ours, duels[Peer.INDUCTOR].faster) == (ours, False)
    assert (duels[Peer.CHECKPOINT].ours, duels[Peer.CHECKPOINT].faster) == (ours, True)
    assert not over.faster
    assert (under.ours, under.too_large, under.faster) == (ours, (quick,), True)
    near = replace(slow, times_ms=(8.9, 9.15, 9.2))
    ((duel,),) = (standing.duels for standing in standings({"50%": 500}, [plain, near, ours]))
    assert (duel.faster, duel.clear) == (True, False)
    (alone,) = standings({"40%": 400}, [plain, quick, slow, ours])
    assert (alone.ours, alone.faster) == (None, False)


BLOCKS = [
    ("unet", 32, "5 DoubleConv, 4 Up"),
    ("vgg16", 64, "8 Conv2d-ReLU, 5 Conv2d-ReLU-MaxPool2d"),
    ("mobilenet_v2", 64, "17 InvertedResidual, 2 Conv2d-BatchNorm2d-ReLU6"),
    ("resnet50", 64, "16 Bottleneck"),
    ("googlenet", 64, "9 Inception, 3 BasicConv2d"),
    ("densenet121", 64, "58 DenseLayer"),
]


@pytest.mark.parametrize(("spec", "size", "wrapped"), often(BLOCKS, *BLOCKS[:3]))
def test_blocks_and_sequences_are_found_in_models_of_all_kinds(spec, size, wrapped):
    built = build_model(spec, batch=1, input_size=(size, size), meta=True)
    found = wrap_blocks(copy.deepcopy(built.model), lambda forward: forward)
    assert found.startswith(wrapped)
    pieces = cut(copy.deepcopy(built.model))
    assert len(pieces) >= 4
    assert all(2 <= count <= len(pieces) for count in counts(len(pieces)))


def test_a_model_cut_into_a_sequence_is_the_same_model():
    for _ in range(2):
        model, (x,) = net()
        expected = model(x)
        y = x
        for piece in cut(model):
            y = piece(y)
        assert torch.equal(y, expected)
