"""The wrapper as a module: the wrapped model's own state, what it passes through, and what it refuses."""

import contextlib
import copy
import io
import pickle

import pytest
import torch
from small_models import TinyCNN, TwoInputsTwoOutputs, assert_same, call, step, twin
from step_lists import schedule_for
from thoroughness import often
from torch import fx, nn
from torch._subclasses import FakeTensorMode

import monetlite
from monetlite.core.errors import DeviceError, ModelError, ScheduleFileError, ScheduleMismatch
from monetlite.runtime.scheduled_training import refuse_other_gpu
from monetlite.runtime.torch_compile import compile_graph
from monetlite.tracing.capture import capture
from monetlite.tracing.step_inputs import Arguments, device_of, refuse_several_devices


def mlp(width=12):
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.BatchNorm1d(width), nn.Linear(width, 2))


@pytest.fixture(scope="module")
def schedules():
    """Schedules of the small models here, each traced once."""
    return {
        "cnn": schedule_for(TinyCNN(), torch.randn(4, 3, 12, 12)),
        "mlp": schedule_for(mlp(), torch.randn(4, 8)),
        "scaled": schedule_for(Scaled(), torch.randn(4, 6)),
    }


@pytest.fixture
def cnn(schedules):
    return TinyCNN(), (torch.randn(4, 3, 12, 12),), schedules["cnn"]


def test_parameters_buffers_and_keys_are_the_models_own(cnn):
    model, inputs, schedule = cnn
    keys, parameters = list(model.state_dict()), dict(model.named_parameters())
    wrapper = monetlite.MONeTWrapper(model, schedule)
    step(wrapper, inputs)
    assert list(wrapper.state_dict()) == keys
    assert {name: id(item) for name, item in wrapper.named_parameters()} == {
        name: id(item) for name, item in parameters.items()
    }
    assert [name for name, _ in wrapper.named_buffers()] == [name for name, _ in model.named_buffers()]
    assert [name for name, _ in wrapper.named_modules()] == [name for name, _ in model.named_modules()]
    assert wrapper.stem is model.stem
    assert len(list(wrapper.children())) == len(list(model.children()))


def test_state_dict_goes_into_the_plain_model_and_back(cnn):
    model, inputs, schedule = cnn
    wrapper = monetlite.MONeTWrapper(twin(model), schedule)
    step(wrapper, inputs)
    plain = TinyCNN()
    plain.load_state_dict(wrapper.state_dict())
    assert_same(step(wrapper, inputs), step(plain, inputs))
    other = monetlite.MONeTWrapper(TinyCNN(), schedule)
    other.load_state_dict(plain.state_dict())
    assert_same(step(other, inputs), step(twin(plain), inputs))


def test_loading_weights_between_steps_takes_effect(cnn):
    model, inputs, schedule = cnn
    wrapper = monetlite.MONeTWrapper(model, schedule)
    step(wrapper, inputs)
    other = TinyCNN()
    wrapper.load_state_dict(other.state_dict())
    assert_same(step(wrapper, inputs), step(other, inputs))


def test_deep_copies_share_nothing_and_train_alike(schedules):
    model, inputs, schedule = mlp(), (torch.randn(4, 8),), schedules["mlp"]
    wrapper = monetlite.MONeTWrapper(model, schedule)
    step(wrapper, inputs)
    clone = copy.deepcopy(wrapper)
    assert clone.model is not model
    assert clone[0].weight is not wrapper[0].weight
    expected = step(twin(model), inputs)
    assert_same(step(clone, inputs), expected)
    with torch.no_grad():
        clone[0].weight.zero_()
    assert model[0].weight.abs().sum() > 0


def test_deep_copies_have_the_same_options():
    options = {"budget": "80%", "compile": True, "tolerance": 1e-3, "wait": True}
    clone = copy.deepcopy(monetlite.MONeTWrapper(TinyCNN(), **options))
    assert clone._training.schedules.options == {"compile": True, "tolerance": 1e-3}
    assert clone._training.schedules.wait


def test_torch_save_and_load_of_a_wrapper_that_has_trained(schedules):
    model, inputs, schedule = mlp(), (torch.randn(4, 8),), schedules["mlp"]
    wrapper = monetlite.MONeTWrapper(model, schedule)
    step(wrapper, inputs)
    file = io.BytesIO()
    torch.save(wrapper, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert list(loaded.state_dict()) == list(wrapper.state_dict())
    assert loaded._parameters is loaded.model._parameters, "state is shared with the wrapped model again"
    assert_same(step(loaded, inputs), step(twin(model), inputs))
    assert pickle.loads(pickle.dumps(wrapper)).schedule == schedule


def test_a_function_is_applied_to_the_model():
    seen = []
    wrapper = monetlite.MONeTWrapper(nn.Sequential(nn.Linear(2, 2)), budget="1GB")
    assert wrapper.apply(seen.append) is wrapper
    assert seen == [wrapper.model[0], wrapper.model]


def test_train_and_eval_reach_the_model_and_eval_is_the_model(cnn):
    model, inputs, schedule = cnn
    wrapper = monetlite.MONeTWrapper(model, schedule)
    assert wrapper.training
    assert wrapper.eval() is wrapper
    assert not wrapper.training
    assert not model.training
    assert not model.bn1.training
    assert torch.equal(wrapper(*inputs), model(*inputs))
    assert wrapper._training._step is None, "nothing is compiled for evaluation"
    wrapper.train()
    assert model.bn1.training
    expected = step(twin(model), inputs)
    assert_same(step(wrapper, inputs), expected)


def test_evaluation_mode_of_the_model_itself_is_respected(cnn):
    model, inputs, schedule = cnn
    wrapper = monetlite.MONeTWrapper(model, schedule)
    model.eval()
    assert torch.equal(wrapper(*inputs), model(*inputs))


def test_no_grad_in_training_mode_is_the_model(cnn):
    model, inputs, schedule = cnn
    wrapper = monetlite.MONeTWrapper(twin(model), schedule)
    with torch.no_grad():
        torch.manual_seed(5)
        found = wrapper(*inputs)
        torch.manual_seed(5)
        assert torch.equal(found, model(*inputs))
    assert not found.requires_grad
    assert torch.equal(wrapper.bn1.running_mean, model.bn1.running_mean)


def test_to_another_dtype_applies_to_the_model_and_needs_another_schedule(cnn):
    model, inputs, schedule = cnn
    wrapper = monetlite.MONeTWrapper(model, schedule)
    assert wrapper.to(torch.float64) is wrapper
    assert model.stem.weight.dtype is torch.float64
    with pytest.raises(ModelError, match=r"input 0 is float64, the schedule was solved for float32"):
        wrapper(inputs[0].double())
    wrapper.float()
    expected = step(twin(model), inputs)
    assert_same(step(wrapper, inputs), expected)


def test_a_smaller_last_batch_runs_by_the_same_schedule(cnn):
    model, inputs, schedule = cnn
    wrapper, plain = monetlite.MONeTWrapper(twin(model), schedule), twin(model)
    for batch in (4, 3, 4):
        smaller = (inputs[0][:batch].clone(),)
        assert_same(step(wrapper, smaller), step(plain, smaller))


def test_inputs_the_schedule_cannot_serve(cnn):
    """They are refused before the first step and after it."""
    model, inputs, schedule = cnn
    wrapper = monetlite.MONeTWrapper(twin(model), schedule)

    def assert_refused():
        for shape, dtype, problem in (
            (
                (5, 3, 12, 12),
                torch.float32,
                r"input 0 has shape \(5, 3, 12, 12\), the schedule was solved for \(4, 3, 12, 12\)",
            ),
            ((4, 3, 14, 12), torch.float32, r"input 0 has shape \(4, 3, 14, 12\)"),
            ((3, 12, 12), torch.float32, r"input 0 has shape \(3, 12, 12\)"),
            ((4, 3, 12, 12), torch.bfloat16, r"input 0 is bfloat16, the schedule was solved for float32"),
        ):
            with pytest.raises(ModelError, match=problem):
                wrapper(torch.zeros(shape, dtype=dtype))

    assert_refused()
    assert_same(step(wrapper, inputs), step(model, inputs))
    assert_refused()


def test_another_number_of_inputs():
    model = TwoInputsTwoOutputs()
    inputs = (torch.randint(0, 11, (3, 6)), torch.randn(3, 8))
    wrapper = monetlite.MONeTWrapper(model, schedule_for(model, inputs))
    with pytest.raises(ModelError, match=r"solved for 2 input tensors, this call has 1; solve for these inputs"):
        wrapper(inputs[0])


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)

    def forward(self, input_ids=None, attention_mask=None, **others):
        x = self.embed(input_ids)
        return (x if attention_mask is None else x * attention_mask[..., None]) * others["labels"][..., None]


def test_an_input_too_many_is_named_with_what_to_do():
    """Tokenizers give an attention_mask; a schedule that was solved without one does not serve it."""
    model, tokens = Masked(), torch.randint(0, 11, (3, 6))
    wrapper = monetlite.MONeTWrapper(model, schedule_for(model, {"labels": tokens, "input_ids": tokens}))
    with pytest.raises(ModelError) as refused:
        wrapper(input_ids=tokens, labels=tokens, attention_mask=torch.ones_like(tokens))
    told = str(refused.value)
    assert "this call has 3 (input_ids, attention_mask, labels)" in told
    assert "leave out what it was solved without: an all-ones attention_mask changes nothing" in told
    assert 'monetlite.within(model, budget="' in told
    kept = {"labels": tokens, "input_ids": tokens}  # in any order
    assert_same(step(wrapper, kept), step(model, kept))


def test_keyword_arguments_and_nested_outputs():
    model = TwoInputsTwoOutputs()
    inputs = {"tokens": torch.randint(0, 11, (3, 6)), "extra": torch.randn(3, 8, requires_grad=True)}
    wrapper = monetlite.MONeTWrapper(twin(model), schedule_for(model, inputs))
    output = call(wrapper, inputs)
    assert set(output) == {"logits", "parts"}
    assert isinstance(output["parts"], tuple)
    assert_same(step(wrapper, inputs), step(model, inputs))


def test_parameters_frozen_after_solving(schedules):
    model, inputs = mlp(), (torch.randn(4, 8),)
    schedule = schedules["mlp"]
    model[0].weight.requires_grad_(False)
    with pytest.raises(ScheduleMismatch, match="frozen"):
        monetlite.MONeTWrapper(model, schedule)(*inputs)


def test_parameters_frozen_after_the_first_step(schedules):
    model, inputs = mlp(), (torch.randn(4, 8),)
    wrapper = monetlite.MONeTWrapper(model, schedules["mlp"])
    step(wrapper, inputs)
    model[0].weight.requires_grad_(False)
    with pytest.raises(ScheduleMismatch, match="frozen"):
        wrapper(*inputs)
    model[0].weight.requires_grad_(True)
    step(wrapper, inputs)


def test_a_submodule_put_into_evaluation_mode_after_the_first_step(schedules):
    model, inputs = mlp(), (torch.randn(4, 8),)
    wrapper = monetlite.MONeTWrapper(model, schedules["mlp"])
    step(wrapper, inputs)
    model[2].eval()
    with pytest.raises(ScheduleMismatch, match="evaluation mode"):
        wrapper(*inputs)


def test_a_graph_with_frozen_parameters_of_its_own():
    model, inputs = mlp(), (torch.randn(4, 8),)
    model[0].weight.requires_grad_(False)
    wrapper = monetlite.MONeTWrapper(twin(model), schedule_for(model, inputs))
    after = step(wrapper, inputs)
    assert after.gradients["0.weight"] is None
    assert_same(after, step(model, inputs))


def test_another_model():
    inputs = (torch.randn(4, 8),)
    schedule = schedule_for(mlp(), inputs)
    deeper = nn.Sequential(mlp(), nn.Linear(2, 2))
    with pytest.raises(ScheduleMismatch, match="solved for Sequential with"):
        monetlite.MONeTWrapper(deeper, schedule)(*inputs)


def test_a_wrapper_is_not_wrapped_again(cnn):
    model, _, schedule = cnn
    with pytest.raises(ModelError, match="wrapped already"):
        monetlite.MONeTWrapper(monetlite.MONeTWrapper(model, schedule), schedule)
    with pytest.raises(ModelError, match="has a schedule already"):
        monetlite.MONeTWrapper(monetlite.within(twin(model), schedule), schedule)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (None, "not None$"),
        ("resnet50", "not 'resnet50'$"),
        (TinyCNN, r"not <class .*; call the class to make a model: TinyCNN\("),
        (twin, "not <function twin"),
    ],
)
def test_what_is_no_module_is_refused_everywhere(model, says):
    x = torch.randn(2, 3, 8, 8)
    for function in (
        lambda: monetlite.MONeTWrapper(model, budget="1GB"),
        lambda: monetlite.within(model, budget="1GB"),
        lambda: monetlite.schedule_of(model),
        lambda: monetlite.optimize(model, x, "1GB"),
        lambda: monetlite.trace(model, x),
        lambda: monetlite.verify(model, "zoo:resnet50@6GB", x),
        lambda: monetlite.compare(model, x, ["1GB"]),
        lambda: monetlite.compile_within(model, "1GB"),
    ):
        with pytest.raises(ModelError, match=f"give a torch.nn.Module as the model, {says}"):
            function()


def test_what_is_no_schedule_is_refused(cnn):
    with pytest.raises(ScheduleFileError, match=r"give a monetlite.Schedule, .*, not \{'budget': '1GB'\}"):
        monetlite.MONeTWrapper(cnn[0], {"budget": "1GB"})


def test_a_path_in_place_of_a_schedule(cnn, tmp_path):
    model, inputs, schedule = cnn
    schedule.save(tmp_path / "s.yaml")
    wrapper = monetlite.MONeTWrapper(twin(model), str(tmp_path / "s.yaml"))
    assert wrapper.schedule == schedule
    assert_same(step(wrapper, inputs), step(model, inputs))
    with pytest.raises(ScheduleFileError, match="can't be read"):
        monetlite.MONeTWrapper(model, tmp_path / "absent.yaml")


def test_inputs_and_outputs_are_the_callers_to_keep(cnn):
    """The step writes over none of what the caller handed in or got back."""
    model, inputs, schedule = cnn
    wrapper = monetlite.MONeTWrapper(model, schedule)
    x = inputs[0].clone()
    output = wrapper(x)
    kept = output.detach().clone()
    output.square().sum().backward()
    assert torch.equal(x, inputs[0])
    assert torch.equal(output, kept)


def test_backward_twice_is_refused_as_plain_autograd_does(cnn):
    model, inputs, schedule = cnn
    output = monetlite.MONeTWrapper(model, schedule)(*inputs)
    output.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        output.sum().backward()


def test_more_layouts_than_torchs_own_limit_of_recompilations():
    model, inputs = nn.Linear(8, 2), (torch.randn(12, 8),)
    wrapper = monetlite.MONeTWrapper(twin(model), schedule_for(model, inputs))
    for batch in (*range(12, 2, -1), 1):
        smaller = (inputs[0][:batch].clone(),)
        found, plain = wrapper(*smaller), model(*smaller)
        assert torch.equal(found, plain)


def test_autocast_turned_on_later_needs_another_schedule(schedules):
    model, inputs = mlp(), (torch.randn(4, 8),)
    wrapper = monetlite.MONeTWrapper(model, schedules["mlp"])
    step(wrapper, inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ModelError, match=r"without torch\.autocast"):
        wrapper(*inputs)


class Scaled(nn.Module):
    """What a forward pass reads: a number, one behind a property, and one that is not always there."""

    def __init__(self):
        super().__init__()
        self.layer, self.alpha, self._beta = nn.Linear(6, 6), 1.0, 1.0

    @property
    def beta(self):
        return self._beta

    @beta.setter
    def beta(self, value):
        self._beta = value + 1

    def forward(self, x):
        return self.layer(x).tanh() * self.alpha * self._beta * getattr(self, "gamma", 1.0)


@pytest.mark.parametrize("name", often(["alpha", "beta", "_beta", "gamma"], "alpha", "beta"))
def test_an_attribute_that_is_set_reaches_the_model(schedules, name):
    model, inputs = Scaled(), (torch.randn(4, 6),)
    wrapper = monetlite.MONeTWrapper(twin(model), schedules["scaled"])
    step(wrapper, inputs)
    setattr(wrapper, name, 0.5)
    setattr(model, name, 0.5)
    assert getattr(wrapper, name) == getattr(wrapper.model, name) == getattr(model, name)
    assert_same(step(wrapper, inputs), step(model, inputs))


def test_an_attribute_that_is_deleted_is_the_models():
    model = Scaled()
    wrapper = monetlite.MONeTWrapper(model, budget="90%")
    wrapper.gamma, wrapper.extra = 2.0, nn.Parameter(torch.zeros(2))
    del wrapper.gamma, wrapper.extra
    assert not hasattr(model, "gamma")
    assert "extra" not in dict(model.named_parameters())
    with pytest.raises(AttributeError):
        del wrapper.gamma


def test_parameters_buffers_and_modules_that_are_set_are_registered_in_the_model(schedules):
    model, inputs = Scaled(), (torch.randn(4, 6),)
    wrapper = monetlite.MONeTWrapper(model, schedules["scaled"])
    wrapper.layer = nn.Linear(6, 6)
    wrapper.weight = nn.Parameter(torch.ones(3))
    wrapper.kept = nn.Buffer(torch.ones(2))
    assert model.layer is wrapper.layer
    assert (
        list(model.state_dict()) == list(wrapper.state_dict()) == ["weight", "kept", "layer.weight", "layer.bias"]
    )
    assert not {"layer", "weight", "kept"} & (vars(wrapper).keys() | vars(model).keys())
    assert_same(step(wrapper, inputs), step(twin(model), inputs))


def test_what_libraries_set_on_the_module_they_are_given_stays_there(schedules):
    model, inputs = Scaled(), (torch.randn(4, 6),)
    wrapper = monetlite.MONeTWrapper(model, schedules["scaled"])
    wrapper._original_forward = wrapper.forward
    wrapper.forward = lambda x: wrapper._original_forward(x) * 2
    assert torch.equal(wrapper(*inputs), model(*inputs) * 2)
    assert not {"forward", "_original_forward"} & vars(model).keys()
    wrapper.forward = vars(wrapper).pop("_original_forward")
    assert torch.equal(wrapper(*inputs), model(*inputs))
    del wrapper.forward
    assert_same(step(copy.deepcopy(wrapper), inputs), step(twin(model), inputs))


def test_the_training_flag_reaches_the_model():
    model = Scaled()
    wrapper = monetlite.MONeTWrapper(model, budget="90%")
    wrapper.training = False
    assert not model.training
    assert model.layer.training, "as for any module, the flag alone is not its submodules'"


@pytest.mark.parametrize("name", ["model", "schedule"])
def test_what_was_compiled_for_is_not_replaced(cnn, name):
    model, _, schedule = cnn
    wrapper = monetlite.MONeTWrapper(model, schedule)
    with pytest.raises(ModelError, match=f"wrapper.{name} can't be replaced"):
        setattr(wrapper, name, TinyCNN())
    assert wrapper.model is model


def test_a_wrapped_container_is_one():
    model = mlp()
    wrapper = monetlite.MONeTWrapper(model, budget="90%")
    assert len(wrapper) == 4
    assert list(wrapper) == list(model)
    assert model[1] in wrapper
    wrapper[1] = nn.Tanh()
    assert isinstance(model[1], nn.Tanh)
    del wrapper[3]
    assert len(model) == 3
    names = monetlite.MONeTWrapper(nn.ModuleDict({"a": nn.Linear(2, 2)}), budget="90%")
    assert "a" in names
    assert "b" not in names


def test_a_wrapped_module_that_is_no_container():
    wrapper = monetlite.MONeTWrapper(Scaled(), budget="90%")
    assert wrapper
    assert monetlite.MONeTWrapper(nn.Sequential(), budget="90%"), "truth is not length"
    for function in (len, iter, lambda model: 1 in model):
        with pytest.raises(TypeError):
            function(wrapper)


class Versioned(nn.Module):
    """Its state has more than tensors, and is brought up to date when it is loaded."""

    def __init__(self):
        super().__init__()
        self.linear, self.steps, self.said = nn.Linear(4, 4), 7, []

    def forward(self, x):
        return self.linear(x)

    def get_extra_state(self):
        return {"steps": self.steps}

    def set_extra_state(self, state):
        self.steps = state["steps"]

    def _load_from_state_dict(self, state_dict, prefix, *others):
        if prefix + "old" in state_dict:
            state_dict[prefix + "linear.bias"] = state_dict.pop(prefix + "old")
        super()._load_from_state_dict(state_dict, prefix, *others)


def test_a_wrapped_part_loads_its_state_as_the_model_does():
    outer, model = nn.Module(), Versioned()
    outer.part = wrapper = monetlite.MONeTWrapper(model, budget="100%")
    wrapper.register_state_dict_post_hook(lambda *_: model.said.append("saved"))
    wrapper.register_load_state_dict_post_hook(lambda *_: model.said.append("loaded"))
    model.register_load_state_dict_pre_hook(lambda *_: model.said.append("loading"))
    state = outer.state_dict()
    model.steps = 0
    state["part.old"] = state.pop("part.linear.bias") + 1
    outer.load_state_dict(state)
    assert model.steps == 7
    assert torch.equal(model.linear.bias, state["part.old"])
    assert model.said == ["saved", "loading", "loaded"]


def test_data_parallel_is_refused_before_it_changes_the_model(cnn):
    """`replicate` would put each GPU's copies into the model itself."""
    model, _, schedule = cnn
    wrapper = monetlite.MONeTWrapper(model, schedule)
    with pytest.raises(ModelError, match="torchrun and DistributedDataParallel"):
        wrapper._replicate_for_data_parallel()
    trained = monetlite.within(nn.Linear(4, 4), budget="100%")
    with FakeTensorMode():
        trained.weight = nn.Parameter(torch.empty(4, 4, device="cuda:0"))
        x = torch.empty(2, 4, device="cuda:1")
    with pytest.raises(ModelError, match=r"inputs are on cuda:1, and the model is on cuda:0\. nn\.DataParallel"):
        refuse_other_gpu(trained, Arguments((x,), {}))


def test_a_model_on_several_devices_is_refused(monkeypatch):
    """Random numbers would be drawn again by one generator, and memory be counted as one device's."""
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    x = torch.randint(4, (2, 3))

    def model_on(*devices):
        model = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4))
        with FakeTensorMode():
            model[0].weight, model[1].weight = (nn.Parameter(torch.empty(4, 4, device=item)) for item in devices)
            model[1].bias = nn.Parameter(torch.empty(4, device=devices[1]))
        return model

    for devices in (("cpu", "cuda:0"), ("cuda:0", "cuda:1")):
        model, says = model_on(*devices), rf"2 devices \(0\.weight on {devices[0]}, 1\.weight on {devices[1]}\)"
        for begin in (
            lambda model: refuse_several_devices(model, (x,)),
            lambda model: capture(model, (x,), {}),
            lambda model: compile_graph(fx.symbolic_trace(model), [x], budget="1GB"),
            lambda model: monetlite.within(model, budget="1GB")(x),
        ):
            with pytest.raises(DeviceError, match=says):
                begin(model)
    model = model_on("cuda:0", "cuda:0")
    model.register_parameter("scale", nn.Parameter(torch.ones(())))
    model.register_buffer("lengths", torch.ones(4))
    refuse_several_devices(model, x)


def test_a_device_that_is_no_cpu_and_no_gpu_by_cuda_is_refused(cnn):
    """Its generator and its memory would be taken for the CPU's."""
    _, (x,), schedule = cnn
    model = TinyCNN()
    with FakeTensorMode():
        for name, item in list(model.stem.named_parameters()):
            setattr(model.stem, name, nn.Parameter(torch.empty(item.shape, device="xpu")))
    for begin in (
        lambda: device_of(model, x),
        lambda: monetlite.optimize(model, x, "1GB", device="rtx-3090"),
        lambda: compile_graph(fx.symbolic_trace(model), [x], budget="1GB"),
        lambda: monetlite.MONeTWrapper(model, schedule)(x),
    ):
        with pytest.raises(DeviceError, match="runs on xpu:0, and steps are planned on 'cpu' and 'cuda' alone"):
            begin()
