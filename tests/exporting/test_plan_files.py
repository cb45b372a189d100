"""Files of exported plans: run without monetlite, hold data alone, and are refused where they don't fit."""

import ast
import copy
import subprocess
import sys
import threading
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from commands import run
from layered_models import Transformer, transformer
from test_checkpoint_plans import plan_module, random_plan, schedule
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

import monetlite
from monetlite.checking.trainee import default_loss
from monetlite.core.options import PricingOptions
from monetlite.exporting.eager_step import record_step
from monetlite.exporting.exported_plan import export_plan, price_step
from monetlite.exporting.plan_file import Target, plan_text

HERE = Path(__file__).parent.parent
OWN_MODEL = f"""
import sys
import types
sys.path.insert(0, {str(HERE)!r})
from layered_models import transformer

def build():
    return transformer(0.1)
"""
WITHOUT_MONETLITE = """
import copy, sys
sys.modules["monetlite"] = None
sys.path[:0] = [{here!r}, {folder!r}]
import torch
from layered_models import transformer
import plan

model, (tokens,) = transformer(0.1)
wrapped = plan.apply(copy.deepcopy(model))
found = []
for item in (model, wrapped):
    torch.manual_seed(1)
    item(tokens)["loss"].backward()
    found.append({{name: parameter.grad for name, parameter in item.named_parameters()}})
assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
assert not any(name.startswith("monetlite.") for name in sys.modules)
print(len(plan.LAYERS), "layers")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a model and a schedule of it."""
    folder = tmp_path_factory.mktemp("exported")
    (folder / "own.py").write_text(OWN_MODEL)
    model, inputs = transformer(0.1)
    found = monetlite.optimize(model, inputs, "70%", device="cpu", time_limit=0.3)
    found.save(folder / "own.yaml")
    return folder


def export(folder, *options):
    return run(
        "export",
        folder / "own.yaml",
        "--model",
        f"{folder / 'own.py'}:build",
        "--output",
        folder / "plan.py",
        *options,
    )


def test_a_plan_runs_where_monetlite_cant_be_imported(folder):
    found = export(folder, "--to", "checkpoint", "--json", "--force")
    assert found.exit_code == 0, found.output
    code = WITHOUT_MONETLITE.format(here=str(HERE), folder=str(folder))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("layers\n")


def test_a_file_is_replaced_only_by_force(folder):
    (folder / "plan.py").write_text("mine")
    refused = export(folder, "--to", "checkpoint")
    assert refused.exit_code == 2
    assert "--force" in refused.output
    assert (folder / "plan.py").read_text() == "mine"
    found = export(folder, "--to", "transformers", "--force")
    assert found.exit_code == 0, found.output
    assert "this plan" in found.output
    assert "Trainer(model=model" in (folder / "plan.py").read_text()


@pytest.mark.parametrize("name", ["own.yaml", "my-plan.py", "class.py"])
def test_a_file_that_cant_be_imported_is_refused(folder, name):
    before = (folder / "own.yaml").read_text()
    refused = export(folder, "--to", "checkpoint", "--force", "--output", folder / name)
    assert refused.exit_code == 2
    assert "can't be imported" in refused.output
    assert (folder / "own.yaml").read_text() == before


@pytest.mark.parametrize("name", ["torch.py", "json.py"])
def test_a_file_that_would_hide_another_module_is_refused(folder, name):
    refused = export(folder, "--to", "checkpoint", "--output", folder / name)
    assert refused.exit_code == 2
    assert "would hide" in refused.output
    assert not (folder / name).exists()


def test_costs_of_another_machine_are_refused(folder):
    refused = export(folder, "--to", "checkpoint", "--force", "--device", "t4")
    assert refused.exit_code == 2
    assert "on the machine that trains" in refused.output


def test_a_plan_for_torch_compile_counts_no_optimizer(folder):
    """The refusal comes before anything is measured."""
    known = monetlite.load_schedule(folder / "own.yaml")
    replace(known, optimizer="adamw").save(folder / "adamw.yaml")
    found = run("export", folder / "adamw.yaml", "--to", "torch-compile", "--output", folder / "compiled.py")
    assert found.exit_code == 2
    assert "counts no optimizer" in found.stderr
    assert "measuring" not in found.stderr


@pytest.fixture(scope="module")
def exported():
    model, inputs = transformer()
    return export_plan(model, inputs, 10**9, PricingOptions())


@pytest.mark.parametrize("target", Target)
def test_a_file_has_literals_and_functions_alone_whatever_names_say(exported, target):
    hostile = 'x"""\nimport os; os.system("touch hacked")\n# \x1b[2J\r\\'
    block = replace(exported.step.blocks[0], path=hostile)
    step = replace(exported.step, blocks=(block, *exported.step.blocks[1:]))
    found = replace(exported.found, plan={0: frozenset()})
    text = plan_text(replace(exported, step=step, found=found), schedule(hostile), target)
    tree = ast.parse(text)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert {alias.name for node in imports for alias in node.names} == {
        "functools", "Counter", "torch", "CheckpointPolicy", "checkpoint", "create_selective_checkpoint_contexts",
    }  # fmt: skip
    data = [node for node in tree.body if isinstance(node, ast.Assign)]
    assert ast.literal_eval(data[0].value) == {hostile: 0}
    assert all(isinstance(node, ast.Import | ast.ImportFrom | ast.Assign | ast.FunctionDef) for node in tree.body)
    assert all(item.isprintable() for item in text.replace("\n", ""))


@pytest.fixture(scope="module")
def planned():
    model, inputs = transformer()
    priced = price_step(record_step(model, inputs, default_loss), PricingOptions())
    return model, inputs, plan_module(priced, random_plan(priced, 1))


def test_a_plan_is_undone(planned):
    model, _, plan = planned
    copied = copy.deepcopy(model)
    assert plan["apply"](copied) is copied
    with pytest.raises(ValueError, match="replaced already"):
        plan["apply"](copied)
    assert not any("forward" in vars(module) for module in plan["remove"](copied).modules())


def test_what_apply_switches_off_remove_switches_on(planned):
    model, _, plan = planned
    copied = copy.deepcopy(model)
    copied.config = types.SimpleNamespace(use_cache=True)
    assert not plan["apply"](copied).config.use_cache
    assert plan["remove"](copied).config.use_cache
    copied.config.use_cache = False
    assert not plan["remove"](plan["apply"](copied)).config.use_cache


def test_layers_are_compiled_as_torchtitan_does(planned):
    """Each layer by itself, as one graph, with results that are saved."""
    model, (tokens,), plan = planned
    assert any(plan["SAVED"])
    plain, wrapped = copy.deepcopy(model), plan["apply"](copy.deepcopy(model))
    for name in plan["LAYERS"]:
        wrapped.get_submodule(name).compile(backend="aot_eager", fullgraph=True)
    for trained in (plain, wrapped):
        default_loss(trained(tokens)).backward()
    for own, expected in zip(wrapped.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, expected.grad)


def test_models_of_one_plan_train_in_threads(planned):
    """One ends a layer while the other is in the middle of it."""
    model, (tokens,), plan = planned
    plain, first, second = (copy.deepcopy(model) for _ in range(3))
    name = next(name for name, kind in plan["LAYERS"].items() if plan["SAVED"][kind])
    inside, go_on = threading.Event(), threading.Event()

    def step(one):
        one(tokens)["loss"].backward()

    def begin_other(*_):
        hook.remove()
        thread.start()
        assert inside.wait(60)

    def wait(*_):
        inside.set()
        assert go_on.wait(60)

    thread = threading.Thread(target=step, args=(plan["apply"](second),))
    hook = first.get_submodule(name).down.register_forward_pre_hook(begin_other)
    second.get_submodule(name).down.register_forward_pre_hook(wait)
    try:
        step(plan["apply"](first))
    finally:
        go_on.set()
        thread.join()
    step(plain)
    for expected, *own in zip(*(item.parameters() for item in (plain, first, second)), strict=True):
        assert all(torch.equal(item.grad, expected.grad) for item in own)


def test_other_models_are_refused(planned):
    _, (tokens,), plan = planned
    with pytest.raises(ValueError, match="another model"):
        plan["apply"](Transformer(layers=1))
    other = Transformer()
    for layer in other.layers:
        layer.up = torch.nn.Identity()
        layer.down = torch.nn.Identity()
    plan["apply"](other.train())
    with pytest.raises(RuntimeError, match="times, and the plan was made for"):
        other(tokens)


class Holder(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *inputs):
        return self.model(*inputs)


def test_a_plan_is_for_a_part_of_the_planned_model_too(planned):
    """A loss is often computed around a model that a trainer wraps without it."""
    model, inputs, _ = planned
    priced = price_step(record_step(Holder(copy.deepcopy(model)), inputs, default_loss), PricingOptions())
    plan = plan_module(priced, random_plan(priced, 1))
    assert all(name.startswith("model.layers.") for name in plan["LAYERS"])
    part, plain = plan["apply"](copy.deepcopy(model)), copy.deepcopy(model)
    assert len([module for module in part.modules() if "forward" in vars(module)]) == len(plan["LAYERS"])
    default_loss(part(*inputs)).backward()
    default_loss(plain(*inputs)).backward()
    for own, expected in zip(part.parameters(), plain.parameters(), strict=True):
        assert torch.equal(own.grad, expected.grad)
    assert not any("forward" in vars(module) for module in plan["remove"](part).modules())


class SharesALayer(nn.Module):
    """Layers with one projection among them."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(32, 32)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh(), shared) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("seed", range(3))
def test_a_weight_of_several_layers_under_autocast(seed):
    """Autocast casts it once for all of them, so a recomputation could make other calls than the first run."""
    torch.manual_seed(0)
    model, x = SharesALayer(), torch.randn(16, 32)
    with torch.autocast("cpu", torch.bfloat16):
        priced = price_step(record_step(copy.deepcopy(model), (x,), default_loss), PricingOptions())
    plan = plan_module(priced, random_plan(priced, seed))
    assert plan["SAVED"] != ({},)
    wrapped, plain = plan["apply"](copy.deepcopy(model)), copy.deepcopy(model)
    for one in (wrapped, plain):
        with torch.autocast("cpu", torch.bfloat16):
            loss = sum(default_loss(one(part)) for part in (x, x + 1))  # two runs
        loss.backward()
    for own, expected in zip(wrapped.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, expected.grad, rtol=0.02, atol=0.02 * expected.grad.abs().max().item())
    assert torch.is_autocast_cache_enabled()


def test_what_is_saved_is_taken_by_every_torch(planned):
    """Before 2.13 torch asked the policy again in the recomputation, where it has to give the same answers."""
    model, (tokens,), plan = planned
    ran, policies, make = [], [], plan["create_selective_checkpoint_contexts"]

    def noting(policy):
        def noted(context, operator, *args, **kwargs):
            answer = policy(context, operator, *args, **kwargs)
            ran[-1].append((operator, answer))
            return answer

        ran.append([])
        policies.append(policy)
        return make(noted)

    wrapped = plan["apply"](copy.deepcopy(model))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(plan, "create_selective_checkpoint_contexts", noting)
        wrapped(tokens)
    assert any(answer is CheckpointPolicy.MUST_SAVE for calls in ran for _, answer in calls)
    context = SelectiveCheckpointContext(is_recompute=True)
    for policy, calls in zip(policies, ran, strict=True):
        assert [policy(context, operator) for operator, _ in calls] == [answer for _, answer in calls]


def test_evaluation_is_plain(planned):
    model, (tokens,), plan = planned
    wrapped = plan["apply"](copy.deepcopy(model)).eval()
    with torch.no_grad():
        assert torch.equal(wrapped(tokens)["loss"], copy.deepcopy(model).eval()(tokens)["loss"])
