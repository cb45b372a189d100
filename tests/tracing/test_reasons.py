"""What can't be captured is refused with the reason, the line and what to do."""

import importlib.util
import inspect
import random
import re
import sysconfig
import traceback

import numpy as np
import pytest
import torch
import transformers
from step_lists import free_profile, schedule_of
from torch import nn
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor
from transformers.utils import output_capturing

import monetlite
from monetlite.core.errors import TraceError
from monetlite.core.steps import plain_steps
from monetlite.tracing.output_recorders import install_recorders
from monetlite.tracing.refusals import line_of


class Net(nn.Module):
    def __init__(self, function, **modules):
        super().__init__()
        self.function, self.layer = function, nn.Linear(6, 6)
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x):
        return self.function(self, self.layer(x)).tanh()


def raises(_, x):
    raise ValueError(f"a batch of {x.shape[0]} (it's odd)")  # here


def reads_what_is_missing(model, x):
    return model.missing(x)  # here


def calls_with_too_much(model, x):
    return model.layer(x, bogus=1)  # here


def draws_from_numpy(_, x):
    return x * torch.from_numpy(np.random.rand(6)).float()  # here


def draws_otherwise_from_numpy(_, x):
    return x * np.random.beta(1.0, 1.0)  # here


GENERATOR = torch.Generator()


def draws_from_a_generator(_, x):
    return x * torch.rand(6, generator=GENERATOR)  # here


def recurs(model, x):
    return model.recurrent(x)[0]  # here


def draws_from_python(_, x):
    return x * (2 if random.random() < 0.5 else 1)  # here


def averages_all_batches(model, x):
    return model.cumulative(x)  # here


def reads_an_unknown_name(_, x):
    return nowhere(x)  # here  # noqa: F821  # as people do


def solves(_, x):
    return torch.linalg.solve(x @ x.t() + torch.eye(4), x)  # here


def aligns(_, x):
    lengths = torch.tensor([4])
    return F.ctc_loss(x[:, None].log_softmax(-1), torch.tensor([[1, 2]]), lengths, lengths // 2)  # here


REFUSED = {
    draws_from_python: r"random\.random\(\) can't be captured\. random\.uniform\(0, 1\) can",
    averages_all_batches: r"momentum=None.*Give it a momentum",
    solves: r"torch\.linalg\.solve looks at its result.*solve_ex",
    aligns: r"F\.ctc_loss.*return log-probabilities",
    raises: r"raises ValueError.*a batch of 4 \(it's odd\).*on these inputs; check",
    reads_what_is_missing: r"raises AttributeError.*'missing'.* on these inputs; check",
    reads_an_unknown_name: r"raises NameError.*'nowhere' is not defined.* on these inputs; check",
    calls_with_too_much: r"other arguments than it takes\. Check|Unexpected keyword arguments.*; check",
    draws_from_numpy: r"random numbers from numpy.*Draw them with torch",
    draws_otherwise_from_numpy: r"random numbers from numpy.*Draw them with torch",
    draws_from_a_generator: r"torch\.Generator of its own\. Leave out generator=",
    recurs: r"other kernels.*Loop over nn\.RNNCell",
}


def place(function):
    """The file and line of a function that are marked, as errors name them."""
    lines, start = inspect.getsourcelines(function)
    line = start + next(number for number, text in enumerate(lines) if "# here" in text)
    return rf"test_reasons\.py:{line}\b"


@pytest.mark.parametrize("function", REFUSED, ids=lambda function: function.__name__)
def test_reasons_are_the_models_own(function):
    if function is solves and torch.__version__ < "2.12":
        pytest.skip("such operators are captured like others there")
    model = Net(function, recurrent=nn.GRU(6, 5), cumulative=nn.BatchNorm1d(6, momentum=None))
    with pytest.raises(TraceError, match=f"{place(function)}.*{REFUSED[function]}") as refused:
        monetlite.trace(model, torch.randn(4, 6))
    assert "depends on the data" not in str(refused.value)


ASSERTING = """
def silent(_, x):
    assert x.shape[0] == 3
    return x
def telling(_, x):
    assert x.shape[0] == 3, f"3, not {x.shape[0]}"
    return x
"""


@pytest.fixture(scope="module")
def asserting(tmp_path_factory):
    """Functions with assertions, from a file: pytest rewrites those that stand here."""
    file = tmp_path_factory.mktemp("code") / "asserting.py"
    file.write_text(ASSERTING)
    spec = importlib.util.spec_from_file_location("asserting", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_failed_assertions_are_told(asserting):
    told = {
        asserting.silent: r"py:3 .* raises AssertionError",
        asserting.telling: r"py:6 .*AssertionError\('3, not 4'\)",
    }
    for function, exception in told.items():
        with pytest.raises(TraceError, match=rf"asserting\.{exception} on these inputs; check"):
            monetlite.trace(Net(function), torch.randn(4, 6))


def test_an_assertion_that_fails_later_is_told(asserting):
    """On a batch that the wrapper is given after it was solved for another."""
    model = Net(asserting.telling)
    graph = monetlite.trace(model, torch.randn(3, 6))
    wrapper = monetlite.MONeTWrapper(model, schedule_of(free_profile(graph), plain_steps(graph)))
    wrapper(torch.randn(3, 6)).sum().backward()
    with pytest.raises(AssertionError, match=r"^3, not 2$"):
        wrapper(torch.randn(2, 6))


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_backward_hooks_of_modules_are_refused_and_others_named(register):
    model = Net(lambda _, x: x)
    getattr(model.layer, register)(lambda *_: None)
    with pytest.raises(TraceError, match=r"backward hooks.*hooks of parameters"):
        monetlite.trace(model, torch.randn(4, 6))


def test_weights_of_tensor_subclasses_are_named_in_plain_words():
    model = nn.Linear(6, 6)
    model.weight = nn.Parameter(TwoTensor(torch.randn(6, 6), torch.randn(6, 6)))
    with pytest.raises(TraceError, match=r"^a gradient is of a tensor subclass, such as a DTensor .*Plan parts of"):
        monetlite.trace(model, torch.randn(4, 6))


def test_torch_compile_refuses_numpys_numbers_too():
    options = {"budget": "100%", "device": "rtx-4090"}
    compiled = torch.compile(Net(draws_from_numpy), backend="monetlite", options=options)
    with pytest.raises(Exception, match=rf"{place(draws_from_numpy)}.*random numbers from numpy"):
        compiled(torch.randn(4, 6))


def test_numpy_that_draws_nothing_is_captured():
    graph = monetlite.trace(Net(lambda _, x: x * torch.from_numpy(np.linspace(0, 1, 6)).float()), torch.randn(4, 6))
    assert not re.search("rng_state", str([operator.name for operator in graph.operators]))


def test_the_same_number_from_python_can_be_captured():
    """As the refusal says."""
    random.seed(5)
    number = random.random()
    random.seed(5)
    assert random.uniform(0, 1) == number


def test_what_is_said_to_leave_the_check_out_is_captured():
    monetlite.trace(Net(lambda _, x: torch.linalg.solve_ex(x @ x.t() + torch.eye(4), x)[0]), torch.randn(4, 6))


def test_what_an_operator_says_of_its_arguments_is_passed_on():
    class Wrong(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            return self.layer(x).sort(0, stable=True).values

    with pytest.raises(TraceError, match=r"fails on these inputs: sort\(\) received an invalid combination"):
        monetlite.trace(Wrong(), torch.randn(4, 8))


def test_lines_of_monetlite_are_never_named():
    """As where the model is one of torch's own, so that no line of the person's is in it."""
    x = torch.randn(4, 8)
    graph = monetlite.trace(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), x)
    assert {operator.source for operator in graph.operators} == {""}
    for model, says in (
        (nn.LSTM(8, 8), "the model can't be captured"),
        (nn.Linear(7, 8), "the model fails on these"),
    ):
        with pytest.raises(TraceError, match=f"^{says}") as refused:
            monetlite.trace(model, x)
        assert ".py" not in str(refused.value)


def test_a_package_whose_name_begins_with_torch_is_not_torch():
    file = f"{torch.__path__[0]}vision/models/resnet.py"
    frames = [traceback.FrameSummary(name, 3, "forward", line="x = x + 1") for name in (file, nn.__file__)]
    assert line_of(frames) == f"{file}:3 (x = x + 1)"


def test_a_budget_is_not_advised_where_there_is_one():
    model = monetlite.within(nn.LSTM(8, 8), budget="1GB", device="rtx-4090", whole=True)
    with pytest.raises(TraceError, match=r"Without whole=True, it trains in pieces$"):
        model(torch.randn(4, 8))


def test_only_one_error_tells_what_fails(caplog):
    """Where a model is captured, it is monetlite's; where it trains, its own."""
    model, x = nn.Linear(7, 8), torch.randn(4, 8)
    with pytest.raises(TraceError, match=r"got \[4, 8\] X \[7, 8\]; check"):
        monetlite.trace(model, x)
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        monetlite.within(model, budget="1GB", device="rtx-4090", whole=True)(x)
    assert caplog.records == []


def test_a_long_loop_is_told_before_its_capture_ends(monkeypatch):
    class Scans(nn.Module):
        def __init__(self):
            super().__init__()
            self.decay = nn.Parameter(torch.rand(8))

        def forward(self, x):
            state, found = torch.zeros(8), []
            for at in range(30):
                state = torch.sigmoid(state * self.decay + x[at])  # here
                found.append(state)
            return torch.stack(found).sum()

    monkeypatch.setattr("monetlite.runtime.scheduled_training.MANY_CALLS", 50)
    wrapper = monetlite.MONeTWrapper(Scans(), budget="110%", device="rtx-4090", time_limit=1)
    with pytest.warns(
        UserWarning, match=r"a loop around .*test_reasons\.py:\d+ makes \d+ of .*torch.compiler.disable"
    ):
        wrapper(torch.randn(30, 8)).backward()


def test_each_part_of_a_transformers_model_records_once():
    """Transformers puts its hooks on the models within a model again where these have theirs already."""
    parts = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = transformers.CLIPModel(
        transformers.CLIPConfig(
            text_config={**parts, "vocab_size": 50, "bos_token_id": 0, "eos_token_id": 1},
            vision_config={**parts, "image_size": 16, "patch_size": 8},
        )
    )
    output_capturing.maybe_install_capturing_hooks(model.vision_model)
    assert install_recorders(model, RuntimeError("output_capturing"))
    layers = [*model.vision_model.encoder.layers, *model.text_model.encoder.layers]
    assert [len(layer._forward_hooks) for layer in layers] == [1, 1]
    assert not install_recorders(model, RuntimeError("output_capturing")), "nothing is lacking"


def test_a_line_of_the_standard_library_is_not_the_persons():
    """A package that is installed beside it may be."""
    installed = f"{sysconfig.get_path('stdlib')}/site-packages/models.py"
    files = (__file__, installed, inspect.__file__)
    frames = [traceback.FrameSummary(name, 3, "forward", line="x = x + 1") for name in files]
    assert line_of(frames) == f"{installed}:3 (x = x + 1)"
