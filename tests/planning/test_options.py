"""Options are defined once: functions, the wrapper, the torch.compile backend and the commands agree with them."""

import inspect
import json
import subprocess
import sys
from dataclasses import asdict, fields
from pathlib import Path

import click
import numpy as np
import pytest
import torch
from torch import nn

import monetlite
from monetlite.cli import main
from monetlite.core.errors import DeviceError, ModelError
from monetlite.core.options import PricingOptions, SolvingOptions, split_options
from monetlite.planning.pipeline import price
from monetlite.runtime.torch_compile import compile_options

PRICING = {item.name: item.default for item in fields(PricingOptions)}
SOLVING = {item.name: item.default for item in fields(SolvingOptions)}
CONTEXT = click.Context(main)
ROOT = Path(__file__).parents[2]


def keywords(function, *, without=()):
    """Keyword-only parameters of a function, with their defaults."""
    parameters = inspect.signature(function).parameters.values()
    return {
        item.name: item.default
        for item in parameters
        if item.kind is inspect.Parameter.KEYWORD_ONLY and item.name not in without
    }


def test_functions_take_every_option_with_its_default():
    assert keywords(monetlite.optimize, without=("starts", "runs_here")) == PRICING | SOLVING
    # The device stands second, the layout is the graph's, and without a tolerance everything is priced.
    graph_options = {name: PRICING[name] for name in ("optimizer", "accumulate", "step_in_backward")}
    assert keywords(monetlite.profile, without=("progress", "tolerance")) == graph_options
    assert inspect.signature(monetlite.profile).parameters["device"].default is PRICING["device"]


def test_every_option_and_choice_is_explained():
    training = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    for item in (*fields(PricingOptions), *fields(SolvingOptions)):
        assert f"`{item.name}`" in training, f"docs/training.md names no option {item.name}"
        assert f"        {item.name}: " in monetlite.optimize.__doc__
        choices = () if item.name == "optimizer" else item.metadata["choices"]
        unsaid = [name for name in choices if f'"{name}"' not in monetlite.optimize.__doc__]
        assert not unsaid, f"the docstring of monetlite.optimize says nothing of {item.name}: {unsaid}"
    for name in SOLVING:
        assert f"`{name}`" in monetlite.solve.__doc__, f"the docstring of monetlite.solve names no option {name}"


def default_of(option):
    """The value that a command gets where the option is not given."""
    return option.type_cast_value(CONTEXT, option.get_default(CONTEXT))


def test_commands_take_every_option_with_its_default():
    found = {item.name: item for item in main.commands["solve"].params}
    for name, default in (PRICING | SOLVING).items():
        assert found[name].opts == [f"--{name.replace('_', '-')}"]
        assert default_of(found[name]) == default
    for kind in (PricingOptions, SolvingOptions):
        for item in fields(kind):
            if item.metadata["choices"]:
                assert tuple(found[item.name].type.choices) == item.metadata["choices"]
    for command in main.commands.values():
        for item in command.params:
            if (command.name, item.name) == ("fit", "tolerance"):
                continue  # its screen has the exact plan, too
            if item.name in SOLVING and item.name != "time_limit":
                assert default_of(item) == SOLVING[item.name], (command.name, item.name)


def test_solve_and_sweep_take_the_options_of_solving(monkeypatch):
    given = []
    monkeypatch.setattr("monetlite.planning.budgets.solve_budget", lambda *args, **_: given.append(args[2]))
    options = {name: OTHERS[name] for name in SOLVING}
    monetlite.solve(None, "1GB", **options)
    monetlite.solve(None, "1GB")
    assert given == [SolvingOptions(**options), SolvingOptions()]
    for function in (monetlite.solve, monetlite.sweep):
        with pytest.raises(ModelError, match=r"no option 'tolerence'; .*; did you mean tolerance\?"):
            function(None, "1GB", tolerence=0)
        with pytest.raises(ModelError, match="not a fraction"):
            function(None, "1GB", tolerance=2)


def test_what_is_no_profile_is_refused():
    for function in (monetlite.solve, monetlite.sweep):
        with pytest.raises(ModelError, match=r"monetlite.load_profile\('p.json'\)"):
            function("p.json", "1GB")
        with pytest.raises(ModelError, match=r"as monetlite.profile makes, not Linear"):
            function(nn.Linear(2, 2), "1GB")


OTHERS = {
    "device": "t4",
    "optimizer": "adam",
    "accumulate": True,
    "step_in_backward": True,
    "layout": "channels_last",
    "compile": True,
    "outputs": "all",
    "tolerance": 1e-3,
    "implementations": "default",
    "reserved": True,
    "time_limit": 3.0,
    "gap": 0.01,
    "solver": "HIGHS",
    "seed": 7,
}


@pytest.mark.parametrize("left_out", ["accumulate", "step_in_backward"])
def test_the_wrapper_and_the_backend_pass_every_option_on(left_out, monkeypatch):
    assert set(OTHERS) == set(PRICING | SOLVING)
    assert all(value != (PRICING | SOLVING)[name] for name, value in OTHERS.items())
    others = OTHERS | {left_out: False}
    pricing, solving = split_options(others)
    assert vars(pricing) | vars(solving) == others
    compiled = others | {"step_in_backward": False}  # which torch.compile's backend refuses
    options = compile_options({"budget": "1GB", **compiled})
    assert (options.pricing, options.solving) == split_options(compiled)
    given = []

    def planning(graphs, budget, pricing, solving, *more):
        given.append((budget, pricing, solving))
        raise ModelError("enough is known")

    monkeypatch.setattr("monetlite.runtime.schedule_search.PlanningBesideTraining", planning)
    model = nn.Linear(2, 2)
    monetlite.step_in_backward(torch.optim.SGD(model.parameters()))
    with pytest.raises(ModelError, match="enough is known"):
        monetlite.MONeTWrapper(model, budget="1GB", **others)(torch.ones(1, 2))
    assert given == [("1GB", pricing, solving)]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"colour": "red"}, "there is no option 'colour'; there are accumulate, "),
        ({"tolerence": 0}, r"there is no option 'tolerence'; .*; did you mean tolerance\?"),
        ({"optimiser": "sgd"}, r"there is no option 'optimiser'; .*; did you mean optimizer\?"),
        ({"optimizer": "lion"}, "optimizer 'lion' is unknown; there are sgd"),
        ({"optimizer": "AdamW"}, r"optimizer 'AdamW' is unknown; .*; did you mean adamw, "),
        (
            {"optimizer": torch.optim.AdamW},
            r"optimizer takes a name, not an object \(AdamW\); .*; did you mean adamw, ",
        ),
        (
            {"optimizer": torch.optim.AdamW([torch.zeros(1)])},
            r"optimizer takes a name, not an object \(AdamW\); .*; did you mean adamw, ",
        ),
        ({"step_in_backward": True}, "say which, such as optimizer='adamw'"),
        (
            {"optimizer": "sgd", "step_in_backward": True, "accumulate": True},
            "no gradients are left to accumulate; leave one of the two out",
        ),
        ({"layout": "rows"}, "layout 'rows' is unknown; there are as_traced"),
        ({"tolerance": 1.5}, r"tolerance 1.5 is not a fraction"),
        ({"tolerance": "x"}, r"tolerance 'x' is not a fraction"),
        ({"time_limit": "1"}, r"time_limit '1' is not a number of seconds above 0"),
        ({"gap": 1}, r"gap 1 is not a fraction; 0\.01 allows"),
        ({"gap": "1%"}, r"gap '1%' is not a fraction"),
        ({"seed": "x"}, r"seed 'x' is not an integer"),
        ({"seed": -1}, r"seed -1 is not an integer of at least 0"),
        ({"implementations": "some"}, "implementations 'some' is unknown; there are all, default"),
        ({"outputs": None}, "outputs takes a name"),
        ({"solver": "cplex"}, "solver 'CPLEX' is unknown; there are SCIP, HIGHS, GUROBI"),
        ({"solver": 3}, r"solver takes a name, not an object \(int\)"),
        ({"time_limit": 0}, "time_limit 0 is not a number of seconds above 0"),
    ],
)
def test_options_out_of_range_are_refused_everywhere(options, says):
    with pytest.raises(ModelError, match=says):
        split_options(options)
    with pytest.raises(ModelError, match=says):
        monetlite.MONeTWrapper(nn.Linear(2, 2), budget="1GB", **options)
    with pytest.raises(ModelError, match=says):
        compile_options({"budget": "1GB", **options})


def test_a_solver_may_be_in_lower_case():
    assert SolvingOptions(solver="highs") == SolvingOptions(solver="HIGHS")


def test_numbers_of_numpy_become_python_s():
    options = SolvingOptions(tolerance=np.float32(0.25), time_limit=np.int64(3), seed=np.int32(7))
    assert json.loads(json.dumps(asdict(options))) == asdict(SolvingOptions(tolerance=0.25, time_limit=3.0, seed=7))


@pytest.mark.parametrize(
    ("device", "says"),
    [
        ("foo", "no figures for a device called 'foo'"),
        ("cuda:0", r"did you mean cuda\?"),
        (torch.device("cuda"), "give its name, such as 'cuda'"),
    ],
)
def test_unknown_devices_are_refused_before_the_first_step(device, says):
    for call in (split_options, lambda options: monetlite.MONeTWrapper(nn.Linear(2, 2), budget="1GB", **options)):
        with pytest.raises(DeviceError, match=says):
            call({"device": device})


def test_every_public_name_is_seen_by_type_checkers():
    """The imports for type checkers are those that happen when a name is used."""
    program = (
        "import ast, inspect, json, monetlite\n"
        "tree = ast.parse(inspect.getsource(monetlite))\n"
        "checked = next(node for node in tree.body if isinstance(node, ast.If)).body\n"
        "print(json.dumps({item.asname: node.module for node in checked for item in node.names}))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == monetlite._HOME
    assert set(monetlite.__all__) == {"MonetliteError", *monetlite._HOME}


def test_implementations_that_an_option_rules_out_are_neither_priced_nor_chosen():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 2))
    graph = monetlite.trace(model, torch.randn(2, 3, 8, 8))
    pricing = PricingOptions(device="rtx-4090")
    everything, exact = price(graph, pricing), price(graph, pricing, SolvingOptions())
    counts = [sum(map(len, profile.costs)) for profile in (everything, exact)]
    assert counts[0] > counts[1]
    assert exact.costs == SolvingOptions().allowed(everything).costs
    only = SolvingOptions(implementations="default", tolerance=0.5).allowed(everything)
    assert all(len(costs) == 1 for costs in only.costs)
    schedules = monetlite.sweep(everything, ["100%", 1], implementations="default", time_limit=1)
    assert schedules["100%"].choices.implementations == {}
    assert schedules[1] is None
