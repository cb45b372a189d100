"""Every form of a model specification, and what each says when it can't be resolved."""

import json
import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from monetlite.core.errors import ModelError
from monetlite.models import build_model

TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
CONFIGS = {
    "gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32, "vocab_size": 50},
    "bert": {**TINY, "vocab_size": 50, "max_position_embeddings": 32},
    "llama": {**TINY, "vocab_size": 50, "num_key_value_heads": 1, "max_position_embeddings": 32},
    "t5": {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 50},
    "vit": {**TINY, "image_size": 16, "patch_size": 8},
}
CLASSES = {
    "gpt2": "GPT2LMHeadModel",
    "bert": "BertForMaskedLM",
    "llama": "LlamaForCausalLM",
    "t5": "T5ForConditionalGeneration",
    "vit": "ViTForImageClassification",
}


def write_config(folder, model_type, **more):
    path = folder / "config.json"
    path.write_text(json.dumps({"model_type": model_type, **CONFIGS[model_type], **more}))
    return path


def fails(spec, *words, **options):
    with pytest.raises(ModelError) as failure:
        build_model(spec, meta=True, **options)
    for word in words:
        assert word in str(failure.value)
    assert "\n" not in str(failure.value)


def test_unknown_names_get_suggestions_and_the_families():
    fails("resnet5", "'resnet5'", "did you mean resnet50", "torchvision:NAME", "hf:MODEL_TYPE", "mobilenet_v2")
    fails("zzz", "Built in: resnet18")
    fails("model.py", "names a file but no function", "model.py:build")
    fails("hf:", "names no model", "hf:NAME")


@pytest.mark.parametrize("option", [{"batch": 0}, {"input_size": (0, 224)}, {"sequence_length": -1}])
def test_sizes_are_positive(option):
    fails("resnet18", "give a positive number", **option)


def test_images_that_no_tensor_can_hold_are_refused():
    fails("resnet18", "4000000000×4000000000 images: no tensor", input_size=(4 * 10**9, 4 * 10**9))


def test_a_path_is_no_name_that_means_the_same_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    write_config(tmp_path / "mine", "gpt2")
    assert build_model("hf:mine", batch=1, meta=True).source is None


def test_images_have_no_sequence_length():
    fails("resnet18", "takes images, not sequences", sequence_length=16)


@pytest.mark.parametrize("family", ["torchvision", "timm"])
def test_a_missing_library_is_named(family, monkeypatch):
    monkeypatch.setitem(sys.modules, family, None)
    monkeypatch.setitem(sys.modules, f"{family}.models", None)
    fails(f"{family}:resnet18", family, f"pip install {family}")


class Net(nn.Module):
    """Stands in for a library's model."""

    def __init__(self):
        super().__init__()
        self.default_cfg = {"input_size": (1, 48, 40)}
        self.conv = nn.Conv2d(1, 4, 3)

    def forward(self, x):
        return self.conv(x)


def test_torchvision_models(monkeypatch):
    library, models = ModuleType("torchvision"), ModuleType("torchvision.models")
    models.list_models = lambda module: ["resnet18", "vit_b_16"]
    models.get_model = lambda name, weights: Net()
    monkeypatch.setitem(sys.modules, "torchvision", library)
    monkeypatch.setitem(sys.modules, "torchvision.models", models)
    built = build_model("torchvision:vit_b_16", batch=2, meta=True)
    assert (built.name, tuple(built.example_inputs[0].shape)) == ("torchvision:vit_b_16", (2, 3, 224, 224))
    fails("torchvision:resnet81", "no classification model 'resnet81'", "resnet18")


def test_timm_models_use_their_own_image_size(monkeypatch):
    library = ModuleType("timm")
    library.list_models = lambda: ["convnext_tiny"]
    library.is_model = lambda name: name == "convnext_tiny"
    library.create_model = lambda name, pretrained: Net()
    monkeypatch.setitem(sys.modules, "timm", library)
    assert tuple(build_model("timm:convnext_tiny", batch=2).example_inputs[0].shape) == (2, 1, 48, 40)
    fails("timm:convnext_tinny", "no model 'convnext_tinny'", "did you mean timm:convnext_tiny")


def test_what_an_import_that_fails_arose_from_is_told(tmp_path, monkeypatch):
    """A torchvision for another torch keeps transformers from importing its models."""

    def fail(_):
        try:
            raise RuntimeError("operator torchvision::nms does not exist\nand more")
        except RuntimeError as error:
            raise ModuleNotFoundError("Could not import module 'GPT2LMHeadModel'") from error

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_config", fail)
    path = write_config(tmp_path, "gpt2")
    fails(f"hf:{path}", "'GPT2LMHeadModel' (RuntimeError: operator torchvision::nms does not exist)")


@pytest.mark.parametrize("model_type", CLASSES)
def test_transformers_models_return_a_loss(model_type, tmp_path):
    torch.manual_seed(0)
    path = write_config(tmp_path, model_type)
    size = {} if model_type == "vit" else {"sequence_length": 8}
    built = build_model(f"hf:{path}", batch=2, **size)
    assert type(built.model).__name__ == CLASSES[model_type]
    assert built.batch == 2
    loss = built.model(**built.example_inputs).loss
    loss.backward()
    assert torch.isfinite(loss)
    assert built.model.config.use_cache is False


def test_a_folder_and_its_architecture_are_honoured(tmp_path):
    write_config(tmp_path, "bert", architectures=["BertForSequenceClassification"], num_labels=3)
    built = build_model(f"hf:{tmp_path}", batch=4, sequence_length=8, meta=True)
    assert type(built.model).__name__ == "BertForSequenceClassification"
    assert tuple(built.example_inputs["labels"].shape) == (4,)
    assert built.model(**built.example_inputs).logits.shape == (4, 3)


def test_model_types_have_default_configurations():
    built = build_model("hf:gpt2", batch=1, meta=True)
    assert tuple(built.example_inputs["input_ids"].shape) == (1, 128)
    assert "124.4 M parameters" in built.description


def test_image_size_reaches_the_configuration(tmp_path):
    path = write_config(tmp_path, "vit")
    built = build_model(f"hf:{path}", batch=1, input_size=(32, 32), meta=True)
    assert built.model(**built.example_inputs).logits.shape == (1, 2)


def test_what_transformers_cannot_resolve(tmp_path):
    fails("hf:gpt3", "'gpt3'", "gpt2")
    fails("hf:bert-base-unknown", "nothing is downloaded", "did you mean hf:bert")
    fails("hf:nowhere/config.json", "no file or folder nowhere/config.json")
    fails("hf:gpt2", "sequences of 5000 tokens", "1024 positions", sequence_length=5000)
    fails("hf:gpt2", "takes sequences, not images", input_size=(8, 8))
    fails("hf:vit", "takes images, not sequences", sequence_length=8)
    fails("hf:clip_text_model", "no class of model type 'clip_text_model'")
    (tmp_path / "config.json").write_text("{")
    fails(f"hf:{tmp_path}", "not a model configuration")


def test_transformers_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    fails("hf:gpt2", "pip install transformers")
