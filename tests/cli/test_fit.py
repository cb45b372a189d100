"""`monetlite fit`: the answer agrees with what solve says, and what can't be has an answer that helps."""

import json
import os
import pickle
from xmlrpc import client

import pytest
import torch
from commands import run
from thoroughness import often

import monetlite
from monetlite.cli.fit_command import _loaded_from, model_to_fit
from monetlite.core.child_processes import ChildFailed, begin_call
from monetlite.core.devices import CONTEXT_BYTES, find_device
from monetlite.core.graph import TILED_ROWS
from monetlite.core.options import PricingOptions, SolvingOptions
from monetlite.core.steps import plain_steps
from monetlite.core.units import format_bytes
from monetlite.models import build_model
from monetlite.planning import model_steps
from monetlite.planning.card_fit import CardFit, CardMemory, FitSetting, card_memory
from monetlite.planning.size_costs import SizedStep, TellingSizes, largest, telling_sizes
from monetlite.reporting.fit_lines import every_layer

NARROW = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "num_hidden_layers": 2,
}
FIT = ("--gpu", "rtx-4090", "--batch", "2", "--sequence-length", "128", "--time-limit", "0.5")


@pytest.fixture(scope="module", autouse=True)
def _traced_once():
    """A model is traced once at each size, in this process, however long it takes."""
    known, trace = {}, model_steps.trace_layouts

    def traced(model, inputs, layouts, **options):
        shapes = torch.utils._pytree.tree_map_only(
            torch.Tensor, lambda tensor: (tensor.shape, tensor.dtype), inputs
        )
        dtypes = [(tensor.dtype, tensor.requires_grad) for tensor in model.parameters()]
        key = repr((model, dtypes, shapes, layouts, options))
        if key not in known:
            known[key] = trace(model, inputs, layouts, **options)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_steps, "trace_layouts", traced)
        patch.setattr(model_steps, "WORTH_A_PROCESS", float("inf"))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("narrow")
    (path / "config.json").write_text(json.dumps(NARROW))
    return path


@pytest.fixture(scope="module")
def roomy(folder):
    result = run("fit", folder, *FIT, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def tight(folder, roomy):
    """The same on a card that is too small for plain training."""
    budget = int(0.75 * roomy["ways"][0]["peak_bytes"])
    result = run("fit", folder, *FIT, "--budget", f"{budget}B", "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_what_fits_as_it_is_needs_nothing(roomy):
    assert roomy["fits_as_it_is"]
    assert roomy["fastest"] == "as it is"
    assert roomy["budget_bytes"] == roomy["card_bytes"] - roomy["context_bytes"] - roomy["gaps_bytes"]
    assert sum(roomy["memory"].values()) == roomy["ways"][0]["peak_bytes"]
    assert not any("monetlite" in line for lines in roomy["lines"].values() for line in lines)
    plain, checkpointed, planned = roomy["largest"].values()
    assert plain["batch"] <= checkpointed["batch"] <= planned["batch"]
    assert set(roomy["lines"]) == {"plain loop", "Trainer", "TRL", "Lightning", "torchtitan"}
    assert "--training.dtype=float32 --training.mixed_precision_param=float32" in roomy["lines"]["torchtitan"]
    assert roomy["lines"]["torchtitan"][-1] == "activation-checkpoint:none"


def test_the_fastest_way_on_a_small_card_agrees_with_solve(tight, folder, tmp_path):
    assert not tight["fits_as_it_is"]
    fastest = next(way for way in tight["ways"] if way["way"] == tight["fastest"])
    assert fastest["fits"]
    assert fastest["peak_bytes"] <= tight["budget_bytes"]
    assert all(fastest["latency_ms"] <= way["latency_ms"] for way in tight["ways"] if way["fits"])
    options = ("--device", "rtx-4090", "--optimizer", "adamw", "--batch", "2", "--sequence-length", "128")
    budget = ("--budget", f"{tight['budget_bytes']}B", "--time-limit", "1", "--tolerance", "1e-5")
    solved = run("solve", "--model", f"hf:{folder}", *options, *budget, "--output", tmp_path / "s.yaml", "--json")
    assert solved.exit_code == 0, solved.output
    found = json.loads(solved.stdout)
    assert found["plain_peak_bytes"] == tight["ways"][0]["peak_bytes"]
    assert found["plain_latency_ms"] == pytest.approx(tight["ways"][0]["latency_ms"])
    assert fastest["latency_ms"] <= 1.1 * found["latency_ms"]
    checkpointed, *planned = tight["ways"][1:]
    assert planned
    assert all(way["latency_ms"] <= checkpointed["latency_ms"] for way in planned if checkpointed["fits"])


TOLERANCES = [("1e-6", {0.0}), ("1e-3", {0.0, 1e-3})]


@pytest.mark.thorough
@pytest.mark.parametrize(("tolerance", "allowed"), TOLERANCES)
def test_the_tolerance_is_the_one_that_was_asked_for(tolerance, allowed, folder, tight):
    budget = ("--budget", f"{tight['budget_bytes']}B", "--json", "--tolerance", tolerance)
    found = json.loads(run("fit", folder, *FIT, *budget).stdout)
    assert {way["tolerance"] for way in found["ways"] if way["tolerance"] is not None} == allowed


@pytest.mark.thorough
@pytest.mark.parametrize(("window", "length"), [(256, None), (4096, 512)])
def test_a_length_beyond_a_window_is_not_told(tmp_path, window, length):
    """Attention has a mask there, and another kernel."""
    model = NARROW | {"model_type": "mistral", "sliding_window": window}
    (tmp_path / "config.json").write_text(json.dumps(model))
    found = json.loads(run("fit", tmp_path, *FIT, "--json").stdout)
    assert {of["length"] for of in found["largest"].values()} == {length}


@pytest.mark.parametrize("given", often(["gpt2", "gpt2/config.json"], "gpt2"))
def test_a_folder_is_the_folder_though_a_published_model_has_its_name(tmp_path, monkeypatch, given):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "gpt2"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(NARROW))
    found = json.loads(run("fit", given, *FIT, "--json").stdout)
    assert any('from_pretrained("gpt2"' in line for line in found["lines"]["plain loop"])


def test_names_of_folders_without_a_model_are_the_models(work_folder):
    (work_folder / "gpt2").mkdir()
    for given in ("gpt2", "hf:gpt2", "HF:gpt2"):
        assert model_to_fit(given) == "hf:gpt2"
    assert build_model("hf:gpt2", batch=1, sequence_length=8, meta=True).source.model == "hf:gpt2"


def test_layers_are_counted_in_words():
    assert [every_layer(every) for every in (1, 2, 3, 4)] == [
        "every layer",
        "every 2nd layer",
        "every 3rd layer",
        "every 4th layer",
    ]


def test_a_folder_at_home_is_told_whole(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    assert _loaded_from(f"~/{folder.name}") == str(folder)
    assert _loaded_from(f"~/{folder.name}/config.json") == str(folder)


@pytest.mark.thorough
def test_no_setting_is_shown_that_checkpoints_more_than_its_figures(tmp_path):
    model = {"model_type": "bart", "vocab_size": 128, "d_model": 32, "encoder_attention_heads": 2}
    model |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    model |= {"encoder_layers": 4, "decoder_layers": 2, "max_position_embeddings": 256}
    (tmp_path / "config.json").write_text(json.dumps(model))
    found = json.loads(run("fit", tmp_path, *FIT, "--json").stdout)
    assert not any(way["every_n_layers"] for way in found["ways"])


def begin_here(function, *given):
    """What another process is sent and sends back, without one."""
    function, given = pickle.loads(pickle.dumps((function, given)))
    return lambda: pickle.loads(pickle.dumps(function(*given)))


@pytest.mark.thorough
@pytest.mark.parametrize("begin", [begin_call, begin_here])
def test_sizes_are_told_by_another_process_where_tracing_takes_long(folder, roomy, monkeypatch, begin):
    begun = []
    monkeypatch.setattr(model_steps, "WORTH_A_PROCESS", 0.0)
    monkeypatch.setattr(model_steps, "begin_call", lambda *given: begun.append(given) or begin(*given))
    found = json.loads(run("fit", folder, *FIT, "--json").stdout)
    assert len(begun) == 1
    assert found["largest"] == roomy["largest"]


@pytest.mark.thorough
def test_workspace_of_tiles_follows_to_other_sizes(folder):
    """It has a constant part, which no factor tells."""

    def rebuild(batch, length):
        return build_model(f"hf:{folder}", batch=batch or 2, sequence_length=length or 128, meta=True)

    model = model_steps.ModelSteps(
        built=rebuild(2, 128),
        rebuild=rebuild,
        pricing=PricingOptions(device="rtx-4090", optimizer="adamw"),
        solving=SolvingOptions(tolerance=1e-5),
    )
    sizes = telling_sizes({16, 32, 64, 128, 512}, 128)
    of = [(sizes.batch, sizes.length), (2, 128), (3, 320)]
    sized, asked, other = (model.priced(*given)[TILED_ROWS] for given in of)
    step, tiled = SizedStep(sized, sizes, asked, 2, 128), 0
    expected, known = ({key: cost.workspace_bytes for key, cost in costs_of(item)} for item in (other, asked))
    parts = {power: dict(costs_of(part)) for power, part in step.parts.items()}
    for key in expected.keys() & known.keys() & dict(costs_of(sized)).keys():
        told = sum(
            costs[key].workspace_bytes * (3 / sizes.batch) ** wide * (320 / sizes.length) ** long
            for (wide, long), costs in parts.items()
        )
        assert told == pytest.approx(expected[key], rel=1e-2, abs=1024), key
        tiled += "tiles" in key[1]
    assert tiled > 20


def costs_of(profile):
    """Costs by the names of operator and implementation."""
    for operator, costs in zip(profile.graph.operators, profile.costs, strict=True):
        for way, cost in zip(operator.implementations, costs, strict=True):
            yield (operator.name, way.name), cost


def ends(code):
    os._exit(code)


@pytest.mark.thorough
def test_a_call_in_another_process_returns_raises_or_says_that_it_ended():
    cannot_be_unpickled = client.dumps(client.Fault(1, ""))
    results = [
        begin_call(abs, -3),
        begin_call(int, "three"),
        begin_call(ends, 7),
        begin_call(client.loads, cannot_be_unpickled),
    ]
    assert results[0]() == 3
    with pytest.raises(ValueError, match="three"):
        results[1]()
    with pytest.raises(ChildFailed, match="exit code 7"):
        results[2]()
    with pytest.raises(ChildFailed, match="exit code 0"):
        results[3]()


@pytest.mark.thorough
def test_the_largest_batch_is_the_largest(roomy, folder):
    """Plain training's peak at that batch, traced, is within the budget, and at the next one it is not."""
    batch = 6
    at = json.loads(run("fit", folder, *FIT[:2], "--batch", batch, *FIT[4:], "--json").stdout)
    budget = at["ways"][0]["peak_bytes"]
    found = json.loads(run("fit", folder, *FIT, "--budget", f"{budget}B", "--json").stdout)
    assert found["largest"]["as it is"]["batch"] == batch


def test_the_screen_is_one(folder, tight):
    found = run("fit", folder, *FIT, "--budget", f"{tight['budget_bytes']}B", columns=80)
    assert found.exit_code == 0
    lines = found.stdout.splitlines()
    budget = format_bytes(tight["budget_bytes"])  # not the card, whose memory may be less
    assert lines[0].startswith(f"It fits {budget} with monetlite, +")
    assert max(map(len, lines)) <= 80
    assert any("monetlite.within" in line for line in lines)
    assert "estimated, not measured" in found.stdout


@pytest.mark.thorough
@pytest.mark.parametrize(("given", "length"), [((), 512), (("--sequence-length", "64"), 64)])
def test_without_sizes_it_is_one_sequence_as_long_as_the_model_takes(folder, given, length):
    found = run("fit", folder, *given, "--time-limit", "1", "--json")
    assert found.exit_code == 0, found.output
    answer = json.loads(found.stdout)
    assert (answer["batch"], answer["sequence_length"]) == (1, length)
    if not torch.cuda.is_available():
        assert "--gpu names another" in found.stderr


def test_lines_to_paste_run(tight):
    """What loads the model aside, whose weights are not there."""
    lines = tight["lines"]["plain loop"]
    assert "import monetlite" in lines
    pasted = lines[lines.index("import monetlite") :]
    names = {"model": torch.nn.Linear(2, 2)}
    exec("\n".join(pasted), names)
    assert isinstance(names["optimizer"], torch.optim.Optimizer)
    assert monetlite.release(names["model"]) is names["model"]


@pytest.mark.thorough
def test_lines_to_paste_are_for_what_is_trained(folder, recwarn):
    """torchtitan has no adapters, and a plain loop has to enter autocast itself."""
    found = run("fit", folder, *FIT, "--lora", "4", "--autocast", "bfloat16", "--json")
    assert found.exit_code == 0, found.output
    lines = json.loads(found.stdout)["lines"]
    assert set(lines) == {"plain loop", "Trainer", "TRL", "Lightning"}
    assert any("torch.autocast(" in line for line in lines["plain loop"])
    assert not [item for item in recwarn if item.category is FutureWarning]


def test_a_system_that_does_not_say_its_memory_needs_a_budget(folder, monkeypatch):
    monkeypatch.setattr("monetlite.profiling.memory_use.available_bytes", lambda: None)
    refused = run("fit", folder, "--gpu", "cpu")
    assert refused.exit_code == 2
    assert "--budget" in refused.stderr


def test_what_does_not_fit_gets_advice(folder, tight):
    found = run("fit", folder, *FIT, "--budget", "2MB", columns=80)
    assert found.exit_code == 3, found.output
    assert "It does not fit" in found.stdout
    for word in ("To make it fit:", "(proven)", "LoRA", "a card with"):
        assert word in found.stdout


def test_advice_is_of_the_schedule_that_suits_it(tmp_path):
    """The optimizer's step makes the peak of every schedule. With adapters activations do, which some store."""
    heavy = NARROW | {"num_hidden_layers": 8, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(heavy))
    options = ("--gpu", "rtx-4090", "--batch", "1", "--sequence-length", "128", "--budget", "2MB", "--json")
    whole, adapted = (json.loads(run("fit", tmp_path, *options, *more).stdout) for more in ((), ("--lora", "4")))
    assert whole["smallest_reached_bytes"] == whole["ways"][0]["peak_bytes"], "plain training is as lean as any"
    advised = next(item["peak_bytes"] for item in whole["helpful"] if "LoRA" in item["setting"])
    assert advised == pytest.approx(adapted["smallest_reached_bytes"], rel=0.3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("Qwen/Qwen3-8", "--gpu", "t4"), ("no model", "hf:")),
        (("hf:Qwen/Qwen3-9B", "--gpu", "t4"), ("did you mean hf:qwen3-8b",)),
        (("hf:gpt2", "--gpu", "rtx-5099"), ("no figures", "rtx-4090", "Known")),
        (("hf:gpt2", "--gpu", "t4", "--full", "--lora", "4"), ("exclude each other",)),
        (("resnet18", "--gpu", "t4", "--lora", "4"), ("models of transformers",)),
        (("hf:gpt2", "--gpu", "t4", "--sequence-length", "9999"), ("1024 positions",)),
    ],
)
def test_a_mistake_is_told(arguments, words):
    found = run("fit", *arguments)
    assert found.exit_code == 2
    assert all(word in found.stderr for word in words), found.stderr


def test_the_budget_is_what_the_card_has_left():
    card = card_memory(find_device("rtx-4090"))
    assert card.budget_bytes == card.total_bytes - card.context_bytes - card.gaps_bytes < 24 * 2**30
    assert card_memory(find_device("rtx-4090"), 10**9).budget_bytes == 10**9
    assert CardMemory("cpu", "CPU", 10**9).context_bytes == 0


def test_what_the_allocator_reserves_has_to_fit_too():
    """By default it reserves a quarter more than a network's tensors take."""
    built = build_model("resnet18", batch=64, meta=True)
    graph = monetlite.trace(built.model, built.example_inputs, device="rtx-4060")
    profile = monetlite.profile(graph, "rtx-4060")
    way = FitSetting.of_steps(profile, plain_steps(profile.graph))
    assert way.peak_bytes < way.least_reserved_bytes < 1.05 * way.peak_bytes < way.reserved_bytes

    def answer(reservable_bytes, budget_bytes=None):
        card = CardMemory("rtx-4060", "a card", int(reservable_bytes) + CONTEXT_BYTES, budget_bytes)
        nothing = {"checkpointed": None, "planned": (), "proven_bytes": 0}
        return CardFit(card=card, batch=64, length=None, plain=way, lean=(way,), **nothing)

    least, default = way.least_reserved_bytes, way.reserved_bytes
    for reservable, fits, expandable in (
        (default, True, False),
        (default - 1, True, True),
        (least - 1, False, True),
    ):
        found = answer(reservable)
        assert (found.fits(way), found.needs_expandable(way)) == (fits, expandable)
    given = answer(least - 1, budget_bytes=way.peak_bytes)
    assert given.fits(way)
    assert not given.needs_expandable(way)


def test_sizes_that_tell_are_no_factor_of_the_models():
    assert telling_sizes([4096, 11 * 64, 61 * 2], 8192) == TellingSizes(batch=13, length=128 * 59, factor=59)
    assert telling_sizes([64], None) == TellingSizes(batch=11)
    sizes = TellingSizes(batch=13, length=128 * 59, factor=59)
    assert sizes.power(13 * 128 * 59 * 6) == (1, 1)
    assert sizes.power(59 * 59) == (0, 2)
    assert sizes.power(0) == (0, 0)


def test_the_largest_number_that_fits():
    assert [largest(lambda count, most=most: count <= most, 100) for most in (0, 1, 2, 37, 1000)] == [
        0,
        1,
        2,
        37,
        100,
    ]
