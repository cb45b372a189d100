"""What a trace says of a training step, and what it leaves alone."""

import copy
import inspect
import logging
from collections import UserDict

import pytest
import torch
from small_models import SmallCNN, TwoInputsTwoOutputs, WithLoss
from torch import nn
from torch.nn import functional as F

import monetlite
from monetlite.core.errors import DeviceError, TraceError
from monetlite.core.graph import Phase, TensorRef, ValueKind
from monetlite.models import build_model
from monetlite.profiling.memory_records import peak_growth_bytes

LOGGER = logging.getLogger(__name__)


@pytest.fixture(scope="module")
def cnn_graph():
    return monetlite.trace(SmallCNN(), torch.randn(4, 3, 12, 12))


def operator_named(graph, name):
    return graph.operators[graph.by_name[name]]


def test_operators_are_called_after_their_modules(cnn_graph):
    names = [operator.name for operator in cnn_graph.operators]
    for expected in (
        "stem",
        "bn1",
        "pool",
        "conv2",
        "bn2",
        "dropout",
        "head",
        "loss",
        "bn1.backward",
        "pool.backward",
    ):
        assert expected in names
    assert names.index("stem") < names.index("bn1") < names.index("pool") < names.index("conv2")
    assert operator_named(cnn_graph, "conv2").module == "conv2"
    assert operator_named(cnn_graph, "conv2").family == "convolution"
    nested = monetlite.trace(
        nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 2)), torch.randn(2, 4)
    )
    assert {"0.0", "0.1", "1"} <= set(nested.by_name)


def test_repeated_modules_get_numbers():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(torch.tanh(self.layer(x)))

    names = [operator.name for operator in monetlite.trace(Net(), torch.randn(2, 4)).operators]
    assert len(set(names)) == len(names)
    assert sum(name.startswith("layer") for name in names) >= 4


def test_operators_name_the_persons_line(cnn_graph):
    file, _, line = operator_named(cnn_graph, "conv2").source.rpartition(":")
    assert file.endswith("small_models.py")
    with open(file) as source:
        assert "conv2" in source.read().splitlines()[int(line) - 1]


def test_a_convolutions_backward_is_two_operators(cnn_graph):
    weight = operator_named(cnn_graph, "conv2.backward_weight")
    into = operator_named(cnn_graph, "conv2.backward_input")
    values = cnn_graph.values
    assert [values[v].kind for v in weight.writes] == [ValueKind.PARAM_GRAD, ValueKind.PARAM_GRAD]
    assert [values[v].kind for v in into.writes] == [ValueKind.GRADIENT]
    activation = operator_named(cnn_graph, "pool").writes[0]
    assert activation in weight.implementations[0].reads
    assert activation in into.implementations[0].reads, "ATen's kernel takes the input; families may do without"
    assert "stem.backward_weight" in cnn_graph.by_name
    assert "stem.backward_input" not in cnn_graph.by_name, "the images need no gradient"


def test_views_are_folded_into_their_readers(cnn_graph):
    def refs(operator):
        return [ref for ref in operator.implementations[0].call.tensors() if isinstance(ref, TensorRef)]

    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6))

        def forward(self, x):
            y = x * self.weight
            y = y.view(4, 3, 2).permute(2, 0, 1)[0].unsqueeze(0).expand(5, 4, 3)
            first, second = y.chunk(2, dim=2)
            return (
                first.exp().sum((0, 2)) + second.t().sum() if second.dim() == 2 else first.exp() * second[..., :1]
            )

    graph = monetlite.trace(Views(), torch.randn(4, 6))
    for made in (graph, cnn_graph):
        for operator in made.operators:
            if operator.implementations[0].call is not None:
                function = operator.implementations[0].call.target
                assert function.split(".")[1] not in {
                    "view",
                    "permute",
                    "t",
                    "expand",
                    "slice",
                    "unsqueeze",
                    "select",
                    "split",
                    "detach",
                    "alias",
                    "transpose",
                    "_unsafe_view",
                    "squeeze",
                    "as_strided",
                }
    exp = next(operator for operator in graph.operators if operator.family == "exp")
    (ref,) = refs(exp)
    assert ref.spec.shape == (5, 4, 2)
    assert ref.spec.stride[0] == 0, "read through the expanded view"
    assert graph.values[ref.value].size_bytes == 4 * 6 * 4, "but the storage is the product's"
    written = [v for operator in graph.operators for v in operator.writes]
    assert len(written) == len(set(written)) == len(graph.values)


def test_every_read_is_written_before(cnn_graph):
    """In the order of the graph, optional operators first run where they stand."""
    written = set()
    for operator in cnn_graph.operators:
        for item in operator.implementations:
            assert set(item.reads) <= written, operator.name
            assert set(item.overwrites) <= set(item.reads)
            assert item.writes == operator.writes
        written |= set(operator.writes)


def test_bytes_of_values_and_residents(cnn_graph):
    stem = cnn_graph.values[operator_named(cnn_graph, "stem").writes[0]]
    assert (stem.size_bytes, stem.shape, stem.dtype) == (4 * 8 * 12 * 12 * 4, (4, 8, 12, 12), "float32")
    model = SmallCNN()
    assert cnn_graph.resident.parameters == sum(item.numel() * 4 for item in model.parameters())
    assert cnn_graph.resident.buffers == sum(item.nbytes for item in model.buffers())
    assert cnn_graph.resident.inputs == 4 * 3 * 12 * 12 * 4
    gradients = [value.size_bytes for value in cnn_graph.values if value.kind is ValueKind.PARAM_GRAD]
    assert sum(gradients) == cnn_graph.resident.parameters
    assert {value.shape for value in cnn_graph.values if value.kind is ValueKind.TANGENT} == {(4, 5)}
    assert next(iter(cnn_graph.inputs.values())).shape == (4, 3, 12, 12)


def test_random_operators_are_run_again_from_the_generators_state(cnn_graph):
    dropout = operator_named(cnn_graph, "dropout")
    noted = operator_named(cnn_graph, "dropout.rng_state")
    assert dropout.rerunnable
    assert not noted.rerunnable
    (state,) = noted.writes
    assert state in dropout.implementations[0].reads
    assert cnn_graph.operators.index(noted) + 1 == cnn_graph.operators.index(dropout)


def test_operators_with_a_side_effect_run_once(cnn_graph):
    assert operator_named(cnn_graph, "bn1").rerunnable
    assert operator_named(cnn_graph, "bn1").implementations[0].again is not None
    assert not any(op.rerunnable for op in cnn_graph.operators if op.phase is Phase.BACKWARD)
    once = {op.name for op in cnn_graph.operators if op.phase is Phase.FORWARD and not op.rerunnable}
    assert once == {"bn1.add", "bn2.add", "dropout.rng_state"}, "the counters of batches, and noting the state"


def test_the_fingerprint_is_the_same_for_two_traces_and_no_other_graph():

    def network(width=8):
        return nn.Sequential(nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, 4, 3))

    x = torch.randn(4, 3, 12, 12)
    first, second = monetlite.trace(network(), x), monetlite.trace(network(), torch.zeros(4, 3, 12, 12))
    assert first.fingerprint == second.fingerprint
    frozen = network()
    frozen[3].weight.requires_grad_(False)
    partly = network()
    partly[1].eval()
    others = {
        "batch": monetlite.trace(network(), torch.randn(2, 3, 12, 12)),
        "size": monetlite.trace(network(), torch.randn(4, 3, 16, 12)),
        "width": monetlite.trace(network(16), x),
        "dtype": monetlite.trace(network().double(), x.double()),
        "frozen": monetlite.trace(frozen, x),
        "evaluated": monetlite.trace(partly, x),
        "input gradient": monetlite.trace(network(), x.clone().requires_grad_()),
    }
    prints = {first.fingerprint, *(graph.fingerprint for graph in others.values())}
    assert len(prints) == 1 + len(others)
    assert others["batch"].structure == first.structure
    for kind in ("frozen", "evaluated", "input gradient"):
        assert others[kind].structure != first.structure, kind


def test_a_trace_leaves_model_buffers_and_generator_alone():
    model = SmallCNN()
    x = torch.randn(4, 3, 12, 12, requires_grad=True)
    before = copy.deepcopy(model.state_dict())
    parameters = [id(item) for item in model.parameters()]
    state = torch.get_rng_state()
    monetlite.trace(model, x)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], item) for name, item in model.state_dict().items())
    assert [id(item) for item in model.parameters()] == parameters
    assert all(item.grad is None for item in (*model.parameters(), x))
    assert model.training
    assert type(model) is SmallCNN
    assert not model._forward_hooks


@pytest.mark.thorough
def test_the_papers_resnet50_on_the_meta_device_takes_no_memory():
    """Batch 184 at 224² needs some 17 GB to run; tracing it allocates next to nothing, parameters included."""
    traced = []

    def trace():
        built = build_model("resnet50", meta=True)
        assert all(item.is_meta for item in built.model.parameters())
        traced.append(monetlite.trace(built.model, built.example_inputs))

    grown = peak_growth_bytes(trace)
    assert traced[0].resident.parameters == 25_557_032 * 4
    assert sum(value.size_bytes for value in traced[0].values) > 30e9
    assert grown < 1e6, grown


def test_meta_and_real_models_make_the_same_graph(cnn_graph):
    with torch.device("meta"):
        model, x = SmallCNN(), torch.randn(4, 3, 12, 12)
    graphs = [monetlite.trace(model, x), cnn_graph]
    assert graphs[0].fingerprint == graphs[1].fingerprint
    assert graphs[0].resident == graphs[1].resident
    assert graphs[0].inputs == graphs[1].inputs


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        y = self.layer(x)
        if y.sum() > 0:  # the branch
            y = y * 2
        return y


class Selecting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        y = self.layer(x)
        return y[y > 0].sum()  # the branch


class FailingInside(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(5, 4)

    def forward(self, x):
        x = self.first(x)
        return self.second(x)  # the branch


@pytest.mark.parametrize(
    ("network", "says"),
    [
        (Branching, "can't be captured in one graph"),
        (Selecting, "shape depends on the data"),
        (FailingInside, r"fails on these inputs: .*\[2, 4\] X \[5, 4\]"),
    ],
)
def test_what_cannot_be_captured_is_named_by_file_and_line(network, says):
    lines, start = inspect.getsourcelines(network)
    line = start + next(number for number, text in enumerate(lines) if "the branch" in text)
    with pytest.raises(TraceError, match=rf"test_trace\.py:{line}\b.*{says}"):
        monetlite.trace(network(), torch.randn(2, 4))


def test_nothing_to_train():
    model = nn.Linear(4, 4).requires_grad_(False)
    with pytest.raises(TraceError, match="nothing to train"):
        monetlite.trace(model, torch.randn(2, 4))
    assert monetlite.trace(model, torch.randn(2, 4, requires_grad=True)).operators


def test_inputs_as_a_tokenizer_returns_them():
    model, inputs = nn.Linear(3, 2), {"input": torch.randn(4, 3)}
    assert monetlite.trace(model, UserDict(inputs)).structure == monetlite.trace(model, inputs).structure


def test_evaluation_mode():
    with pytest.raises(TraceError, match=r"evaluation mode; call model\.train\(\)"):
        monetlite.trace(nn.Linear(4, 4).eval(), torch.randn(2, 4))


def test_a_model_that_fails_on_its_inputs_says_why():
    with pytest.raises(TraceError, match=r"the model fails on these inputs: .*\[2, 5\] X \[4, 4\]"):
        monetlite.trace(nn.Linear(4, 4), torch.randn(2, 5))


def test_several_inputs_and_outputs_tied_weights_and_integers():
    tokens, extra = torch.randint(0, 11, (3, 6)), torch.randn(3, 8, requires_grad=True)
    model = TwoInputsTwoOutputs()
    graph = monetlite.trace(model, (tokens, extra))
    assert [spec.dtype for spec in graph.inputs.values()] == ["int64", "float32"]
    assert [spec.requires_grad for spec in graph.inputs.values()] == [False, True]
    assert graph.fingerprint == monetlite.trace(model, {"tokens": tokens, "extra": extra}).fingerprint
    shapes = sorted(value.shape for value in graph.values if value.kind is ValueKind.PARAM_GRAD)
    assert shapes == sorted([(11, 8), (8, 8), (1, 8), (3, 1, 8)]), (
        "the tied weight has one gradient, the input has one"
    )
    assert graph.resident.parameters == (11 * 8 + 8 * 8 + 8) * 4
    outputs = {value.shape for value in graph.values if value.kind is ValueKind.OUTPUT}
    assert outputs == {(18, 11), (3, 6, 8), (3, 8)}
    assert sum(value.kind is ValueKind.TANGENT for value in graph.values) == 3


def test_frozen_parameters_need_no_gradient_and_nothing_before_them_runs_backward():
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    model[0].requires_grad_(False)
    graph = monetlite.trace(model, torch.randn(2, 4))
    assert sorted(v.shape for v in graph.values if v.kind is ValueKind.PARAM_GRAD) == [(1, 3), (3, 5)]
    assert "1.backward" not in graph.by_name


def test_a_model_with_a_loss_is_trained_through_it_alone():
    graph = monetlite.trace(WithLoss(), {"x": torch.randn(4, 6), "labels": torch.tensor([0, 3, 1, 2])})
    assert [value.shape for value in graph.values if value.kind is ValueKind.TANGENT] == [()]


@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
def test_upsampling_stays_one_kernel(mode):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 1)

        def forward(self, x):
            return F.interpolate(self.conv(x), scale_factor=2, mode=mode)

    kernel = f"aten.upsample_{mode}2d."
    before = {key: dict(operator.py_kernels) for key, operator in _upsamplings(mode).items()}
    graph = monetlite.trace(Net(), torch.randn(1, 3, 6, 6))
    targets = [op.implementations[0].call.target for op in graph.operators if op.implementations[0].call]
    assert sum(target.startswith(kernel) for target in targets) == 1
    assert sum(target.startswith(f"aten.upsample_{mode}2d_backward.") for target in targets) == 1
    assert len(targets) <= 5
    after = {key: dict(operator.py_kernels) for key, operator in _upsamplings(mode).items()}
    assert {key: before[key].keys() & after[key].keys() for key in before} == {
        k: v.keys() for k, v in before.items()
    }


def _upsamplings(mode):
    packet = getattr(torch.ops.aten, f"upsample_{mode}2d")
    return {overload: getattr(packet, overload) for overload in packet.overloads()}


@pytest.mark.parametrize("name", ["addcdiv", "addcdiv_", "addcmul", "addcmul_"])
def test_a_scaled_sum_stays_one_kernel(name):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return getattr(torch.Tensor, name)(x.sin(), self.layer(x), 1 + x.square(), value=0.3)

    graph = monetlite.trace(Net(), torch.randn(2, 4))
    targets = [op.implementations[0].call.target for op in graph.operators if op.implementations[0].call]
    assert f"aten.{name.removesuffix('_')}.default" in targets


def test_prints_and_logs_in_a_model_do_not_break_the_capture(capsys):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            LOGGER.warning("shape %s", x.shape)
            print("forward")  # noqa: T201
            return self.layer(x)

    assert "layer" in monetlite.trace(Net(), torch.randn(2, 4)).by_name


def test_batch_norm_shared_values_are_small_and_named(cnn_graph):
    batch_norm = operator_named(cnn_graph, "bn1")
    sizes = [cnn_graph.values[v].size_bytes for v in batch_norm.writes]
    assert max(sizes) == 4 * 8 * 12 * 12 * 4
    assert sorted(sizes)[-2] == 8 * 4


def test_gradients_of_in_place_modules_are_called_after_them():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU6(inplace=True), nn.Conv2d(4, 4, 3), nn.ReLU(inplace=True))
    names = {operator.name for operator in monetlite.trace(model, torch.randn(2, 3, 8, 8)).operators}
    assert {"1.backward", "3.backward"} <= names


def test_a_gpu_that_is_not_there_is_refused_before_torch_looks_for_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with torch.device("meta"):
        model, x = nn.Linear(4, 4), torch.randn(2, 4)
    with pytest.raises(DeviceError, match="device='rtx-4090'"):
        monetlite.trace(model, x, meta_device="cuda")


class AsksForClasses(nn.Module):
    """As MONAI's U-Nets (`torch.jit.isinstance`) and peft's DoRA do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x, skipped=None):
        if type(self.layer.weight).__module__.startswith("torchao."):
            raise TypeError
        x = self.layer(x)
        return torch.cat([x, skipped], 1) if torch.jit.isinstance(skipped, torch.Tensor) else x


def test_what_asks_for_classes_is_captured():
    x = torch.ones(2, 6)
    alone, joined = (monetlite.trace(AsksForClasses(), inputs) for inputs in (x, (x, x)))
    assert len(joined.operators) == len(alone.operators) + 1
