"""The built-in networks: the sizes and names that the field knows them by, and that they train."""

import pytest
import torch
from thoroughness import often

from monetlite.core.errors import ModelError
from monetlite.models import build_model, builtin_names
from monetlite.models.convnets import DoubleConv, Up

PARAMETERS = {
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "resnext50_32x4d": 25_028_904,
    "wide_resnet50_2": 68_883_240,
    "vgg11": 132_863_336,
    "vgg13": 133_047_848,
    "vgg16": 138_357_544,
    "vgg16_bn": 138_365_992,
    "vgg19": 143_667_240,
    "googlenet": 6_624_904,
    "mobilenet_v2": 3_504_872,
    "densenet121": 7_978_856,
    "densenet161": 28_681_000,
    "densenet169": 14_149_480,
    "densenet201": 20_013_928,
    "unet": 17_267_393,
}

# What torchvision calls parameters and buffers; a checkpoint that names these loads.
NAMES = {
    "resnet50": [
        "conv1.weight",
        "bn1.running_mean",
        "layer1.0.downsample.1.bias",
        "layer4.2.conv3.weight",
        "fc.bias",
    ],
    "vgg16": ["features.0.weight", "features.28.bias", "classifier.0.weight", "classifier.6.bias"],
    "vgg16_bn": ["features.1.running_var", "features.40.weight"],
    "googlenet": [
        "conv1.conv.weight",
        "inception3a.branch1.bn.bias",
        "inception5b.branch2.1.conv.weight",
        "fc.weight",
    ],
    "mobilenet_v2": [
        "features.0.0.weight",
        "features.1.conv.1.weight",
        "features.17.conv.0.1.running_var",
        "features.18.1.bias",
        "classifier.1.weight",
    ],
    "densenet121": [
        "features.conv0.weight",
        "features.denseblock4.denselayer16.conv2.weight",
        "features.transition3.norm.running_mean",
        "features.norm5.weight",
        "classifier.bias",
    ],
}

PAPER = {
    "resnet50": (184, 3, 224, 224),
    "vgg16": (176, 3, 224, 224),
    "googlenet": (320, 3, 224, 224),
    "mobilenet_v2": (272, 3, 224, 224),
    "unet": (11, 3, 416, 608),
}


def test_every_builtin_is_listed_here():
    assert set(builtin_names()) == set(PARAMETERS)


DEEPER = ("resnet101", "resnet152", "vgg13", "vgg19", "densenet161", "densenet169", "densenet201")
"""Of the code that others of their families are of, with more layers."""


@pytest.mark.parametrize("name", often(PARAMETERS, *(name for name in PARAMETERS if name not in DEEPER)))
def test_parameter_count_and_logits(name):
    built = build_model(name, batch=2, input_size=(64, 64), meta=True)
    assert sum(parameter.numel() for parameter in built.model.parameters()) == PARAMETERS[name]
    output = built.model(*built.example_inputs)
    assert output.shape == ((2, 1, 64, 64) if name == "unet" else (2, 1000))
    assert all(parameter.is_meta for parameter in built.model.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_names_are_torchvisions(name):
    state = build_model(name, meta=True).model.state_dict()
    assert [key for key in NAMES[name] if key not in state] == []


@pytest.mark.parametrize("name", PAPER)
def test_default_inputs_are_the_papers(name):
    built = build_model(name, meta=True)
    assert tuple(built.example_inputs[0].shape) == PAPER[name]
    assert built.batch == PAPER[name][0]
    assert built.model.training


def test_resident_bytes_of_the_measured_unet():
    """The authors' 416×608 instance holds 102,491,396 bytes all the time: weights, buffers and the images."""
    built = build_model("unet", meta=True)
    tensors = [*built.model.parameters(), *built.model.buffers(), *built.example_inputs]
    counters = [tensor for tensor in tensors if tensor.dtype == torch.int64]
    assert sum(tensor.nbytes for tensor in tensors) - sum(tensor.nbytes for tensor in counters) == 102_491_396


@pytest.mark.parametrize("name", ["resnet18", "googlenet", "mobilenet_v2", "densenet121", "unet"])
def test_a_step_reaches_every_parameter(name):
    torch.manual_seed(0)
    built = build_model(name, batch=2, input_size=(32, 32))
    output = built.model(*built.example_inputs)
    output.square().mean().backward()
    missing = [key for key, parameter in built.model.named_parameters() if parameter.grad is None]
    assert missing == []
    assert all(torch.isfinite(parameter.grad).all() for parameter in built.model.parameters())


def test_unet_takes_sizes_that_do_not_halve_evenly():
    torch.manual_seed(0)
    up, skip = Up(8, 4), torch.randn(1, 4, 5, 7)
    assert up(torch.randn(1, 4, 2, 3), skip).shape == (1, 4, 5, 7)
    assert DoubleConv(3, 4, 5)(torch.randn(2, 3, 5, 7)).shape == (2, 5, 5, 7)


@pytest.mark.parametrize("spelling", ["ResNet-50", "resnet_50", "RESNET50"])
def test_spelling_does_not_matter(spelling):
    assert build_model(spelling, batch=1, meta=True).name == "resnet50"


def test_images_below_the_least_size_are_refused():
    with pytest.raises(ModelError, match="resnet50 can't take images of 31×64: the least is 32×32"):
        build_model("resnet50", input_size=(31, 64), meta=True)
    assert build_model("unet", input_size=(16, 16), meta=True).batch == 11


def test_dtype_is_that_of_parameters_and_inputs():
    built = build_model("resnet18", batch=1, input_size=(32, 32), dtype=torch.bfloat16, meta=True)
    assert {parameter.dtype for parameter in built.model.parameters()} == {torch.bfloat16}
    assert built.example_inputs[0].dtype == torch.bfloat16
    assert "1×3×32×32 bfloat16" in built.description


def test_fake_tensors_work_as_well_as_the_meta_device():
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    with FakeTensorMode():
        built = build_model("resnet18", batch=100_000)
        output = built.model(*built.example_inputs)
    assert isinstance(output, FakeTensor)
    assert (output.device.type, tuple(output.shape)) == ("cpu", (100_000, 1000))
