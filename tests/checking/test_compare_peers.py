"""The other methods of `monetlite compare`, each in its settings: what they recompute, save and leave equal."""

import io
import json
import math
import sys
from dataclasses import replace

import pytest
import torch
import transformers
from commands import run
from rich.console import Console
from thoroughness import often
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from monetlite.checking.comparison import peers
from monetlite.checking.comparison.auto_sac import planned_by_torch
from monetlite.checking.comparison.bench import Bench, Contender, Unsupported, copy_of
from monetlite.checking.comparison.peer_runs import Comparison, Peer, PeerRun
from monetlite.checking.comparison.peers import by_blocks, selective
from monetlite.checking.comparison.tiled_losses import tiled
from monetlite.checking.trainee import default_loss
from monetlite.core.errors import ScheduleFileError
from monetlite.reporting.text_comparison import print_comparison

WORDS, WIDTH, LENGTH = 3000, 32, 48


def llama(layers=4):
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config).train()


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class Words(nn.Module):
    """A language model by hand. `way` is how its loss takes the logits."""

    def __init__(self, way="rows"):
        super().__init__()
        self.way = way
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.Sequential(*(Layer() for _ in range(3)))

    def forward(self, ids):
        logits, labels = self.head(self.layers(self.embedding(ids))), ids.roll(-1, 1)
        match self.way:
            case "rows":
                return {"loss": F.cross_entropy(logits.view(-1, WORDS), labels.flatten(), ignore_index=7)}
            case "summed, class second":
                return {"loss": F.cross_entropy(logits.float().transpose(1, 2), labels, reduction="sum") / 100}
            case "other order":
                return {"loss": F.cross_entropy(logits.permute(1, 2, 0), labels.T)}
            case "capped":
                return {"loss": F.cross_entropy(logits.tanh().view(-1, WORDS), labels.flatten())}
            case "smoothed":
                return {"loss": F.cross_entropy(logits.view(-1, WORDS), labels.flatten(), label_smoothing=0.1)}
            case "outside":
                return logits


def tokens():
    return torch.randint(0, WORDS, (2, LENGTH))


def bench_of(model, *args, objective=default_loss, **kwargs):
    bench = Bench(model, args, kwargs, objective, "cpu")
    bench.plain_run = bench.enter(Contender(peer=Peer.PLAIN)).run
    return bench


def runs_of(bench, contenders):
    runs = {contender.setting: bench.enter(contender).run for contender in contenders}
    assert not [run for run in runs.values() if run.failure], runs
    return runs


ATTENTION = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda *_, **__: 10**6}
"""A count for the one product that torch doesn't count on a CPU."""


def operations(bench, contender=None):
    """Operations of a step's matrix products, and of attention in its forward pass."""
    model = copy_of(bench.plain.model)
    trainee = bench.plain.of(contender.prepare(model) if contender else model)
    with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter:
        trainee.step()
    bench.plain.clear()
    return counter.get_total_flops()


@pytest.mark.thorough
def test_more_checkpoints_take_less_memory_and_more_operations():
    ids = tokens()
    bench = bench_of(llama(5), input_ids=ids, labels=ids)
    contenders = by_blocks(bench.plain)
    assert [item.setting for item in contenders] == [f"every_n_layers={count}" for count in (1, 2, 3)]
    runs = list(runs_of(bench, contenders).values())
    assert all(run.gradient_difference == 0 and not run.faults for run in runs)
    peaks = [run.peak_bytes for run in [*runs, bench.plain_run]]
    assert peaks == sorted(set(peaks))
    counted = [operations(bench, item) for item in [*contenders, None]]
    assert counted == sorted(set(counted), reverse=True)
    by_hand = by_blocks(bench_of(Words(), ids).plain)
    assert [item.setting for item in by_hand] == ["3 Layer", "every second of 3 Layer", "every third of 3 Layer"]


@pytest.mark.thorough
def test_what_is_saved_is_not_computed_again():
    ids = tokens()
    bench = bench_of(llama(), input_ids=ids, labels=ids)
    contenders = {item.setting: item for item in selective(bench.plain)}
    assert list(contenders) == ["products saved", "attention saved", "every second product saved"]
    counted = {setting: operations(bench, item) for setting, item in contenders.items()}
    everything = operations(bench, by_blocks(bench.plain)[0])
    assert counted["products saved"] == operations(bench)
    assert counted["products saved"] < counted["every second product saved"] < everything
    assert counted["products saved"] < counted["attention saved"] < everything
    runs = runs_of(bench, contenders.values())
    assert all(run.gradient_difference == 0 and not run.faults for run in runs.values())
    assert runs["attention saved"].peak_bytes < runs["products saved"].peak_bytes < bench.plain_run.peak_bytes


def test_policies_that_decide_alike_are_one_setting():
    block = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3, padding=1))
    bench = bench_of(nn.Sequential(block, nn.Sigmoid(), block, nn.Sigmoid()), torch.randn(2, 4, 8, 8))
    assert [item.setting for item in selective(bench.plain)] == [
        "products saved",
        "products saved, nothing in place",
    ]


@pytest.mark.parametrize("model", [llama, Words])
def test_inputs_of_blocks_wait_in_main_memory_where_there_is_a_gpu(model, monkeypatch):
    """The GPU is a CPU here, for which torch's `save_on_cpu` keeps tensors as they are."""
    ids, saved = tokens(), []
    bench = bench_of(model(), **({"input_ids": ids, "labels": ids} if model is llama else {"ids": ids}))
    assert not [item for item in by_blocks(bench.plain) if "offload" in item.setting]
    *_, offloading = by_blocks(replace_device(bench.plain))
    assert offloading.setting.endswith(", offload")

    class Noting(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self, **options):
            assert options["pin_memory"]
            super().__init__(lambda tensor: saved.append(tensor.shape) or tensor, lambda tensor: tensor)

    monkeypatch.setattr(peers, "save_on_cpu", Noting)
    monkeypatch.setattr(transformers.modeling_utils, "save_on_cpu", Noting)
    run = bench.enter(offloading).run
    assert (run.failure, run.gradient_difference, run.faults) == ("", 0, ())
    assert (2, LENGTH, WIDTH) in saved


def replace_device(plain):
    on_gpu = plain.of(plain.model)
    on_gpu.device = "cuda"
    return on_gpu


WAYS = ["transformers", "rows", "summed, class second"]


@pytest.mark.parametrize("way", often(WAYS, "transformers", "summed, class second"))
def test_a_tiled_loss_is_the_same_loss_without_logits(way):
    ids = tokens()
    if way == "transformers":
        bench = bench_of(llama(2), input_ids=ids, labels=ids)
    else:
        bench = bench_of(Words(way), ids)
    runs = runs_of(bench, tiled(bench.plain))
    assert {"8 tiles", "32 tiles", "8 tiles, checkpoint", "32 tiles, products saved"} <= set(runs)
    assert all(run.gradient_difference < 1e-5 and not run.faults for run in runs.values())
    logits_bytes = 2 * LENGTH * WORDS * 4
    assert max(run.peak_bytes for run in runs.values()) < bench.plain_run.peak_bytes - logits_bytes


def test_a_tiled_loss_in_bfloat16_differs_by_rounding():
    ids = tokens()
    bench = bench_of(llama(2).bfloat16(), input_ids=ids, labels=ids)
    run = runs_of(bench, tiled(bench.plain)[:1])["8 tiles"]
    assert run.gradient_difference < 0.03
    assert run.peak_bytes < bench.plain_run.peak_bytes


@pytest.mark.parametrize("way", ["other order", "capped", "outside"])
def test_losses_that_can_not_be_tiled_have_a_reason(way):
    bench = bench_of(Words(way), tokens())
    with pytest.raises(Unsupported, match="takes the results of a linear layer as they are"):
        tiled(bench.plain)


def test_a_smoothed_loss_is_not_tiled():
    bench = bench_of(Words("smoothed"), tokens())
    assert {bench.enter(item).run.failure for item in tiled(bench.plain)} == {
        "its cross-entropy is weighted, smoothed, or not reduced"
    }


def test_torch_plans_what_each_block_saves():
    pytest.importorskip("pulp")
    pytest.importorskip("pwlf")
    bench = bench_of(nn.Sequential(*(Layer() for _ in range(4))), torch.randn(512, WIDTH))
    runs = [bench.enter(item).run for item in planned_by_torch(bench.plain)]
    ran = [run for run in runs if not run.failure]
    assert ran
    assert all(run.gradient_difference == 0 and not run.faults for run in ran)
    peaks = [run.peak_bytes for run in ran]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < bench.plain_run.peak_bytes
    assert all(run.failure == "its solver finds no plan within this budget" for run in runs if run.failure)


def test_packages_of_torchs_planner_that_are_missing_or_too_new_are_named(monkeypatch):
    pytest.importorskip("pulp")
    bench = bench_of(Layer(), torch.randn(4, WIDTH))
    # A later pulp lacks names that torch imports of it.
    monkeypatch.delattr("pulp.LpStatus")
    monkeypatch.delitem(sys.modules, "torch.distributed._tools.sac_ilp", raising=False)
    with pytest.raises(Unsupported, match="pip install 'pulp<4' pwlf"):
        planned_by_torch(bench.plain)


def compared():
    """Plain training, and a run with a long setting, a fault, and a gradient that only one of both has."""
    plain = PeerRun(peer=Peer.PLAIN, peak_bytes=10**9, times_ms=(100.0,), gradient_difference=0.0)
    long = replace(
        plain,
        peer=Peer.TILED_LOSS,
        setting="32 tiles, every second product saved, nothing in place",
        reserved_bytes=10**9,
        gradient_difference=math.inf,
        faults=("statistics updated twice",),
    )
    environment = {"device": "a device", "torch": "2", "python": "3", "monetlite": "0"}
    facts = {"model": "m", "inputs": "1", "device": "cuda", "environment": environment, "autocast": ""}
    numbers = {"repeats": 1, "time_limit": 1.0, "tolerance": 0.0}
    return Comparison(**facts, **numbers, runs=(plain, long), tried=(), duels=(), standings=())


@pytest.mark.parametrize("width", [80, 40])
def test_long_settings_and_faults_fit_a_narrow_terminal(width):
    console = Console(width=width, record=True, file=io.StringIO())
    print_comparison(console, compared())
    printed = console.export_text()
    assert max(map(len, printed.splitlines())) <= width
    words = (*compared().runs[1].setting.split(), "statistics", "updated", "twice")
    assert all(word in printed for word in words)


def test_the_figures_are_json_and_are_printed_before_they_are_written(tmp_path, monkeypatch):
    def full(*_):
        raise ScheduleFileError("no space is left")

    monkeypatch.setattr("monetlite.checking.comparison.runner.compare", lambda *_, **__: compared())
    arguments = ("compare", "--model", "resnet18", "--batch", 1, "--json", "--output", tmp_path / "f.json")
    assert run(*arguments).exit_code == 0
    facts = json.loads((tmp_path / "f.json").read_text(), parse_constant=pytest.fail)
    assert facts["runs"][1]["gradient_difference"] is None
    monkeypatch.setattr(sys.modules["monetlite.cli.compare_command"], "write_atomically", full)
    failed = run(*arguments, "--force")
    assert failed.exit_code == 4
    assert json.loads(failed.stdout, parse_constant=pytest.fail)["runs"] == facts["runs"]
