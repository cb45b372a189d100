"""Configurations that come along are those of the published models: their parameters are as many."""

import sys

import pytest

from monetlite.core.errors import ModelError
from monetlite.models import build_model, check_spelling
from monetlite.models.library_models import split_adapters
from monetlite.models.published import find_published, published_models


def test_names_are_those_of_the_hub_or_their_last_part():
    assert find_published("Qwen/Qwen3-8B") is find_published("qwen3-8b") is published_models()["qwen3-8b"]
    assert find_published("somebody/Qwen3-8B") is None
    assert len({model.hub_name for model in published_models().values()}) == len(published_models()) > 40
    assert {model.config["model_type"] for model in published_models().values()} >= {"llama", "gemma2", "phi3"}


@pytest.mark.parametrize("name", published_models())
def test_parameters_are_as_many_as_published(name):
    pytest.importorskip("transformers")
    model = build_model(f"hf:{name}", batch=1, meta=True).model
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    assert millions == pytest.approx(published_models()[name].millions, abs=0.051)  # rounded to a tenth


def test_a_misspelt_one_is_refused_with_the_one_that_was_meant(monkeypatch):
    monkeypatch.delitem(sys.modules, "transformers", raising=False)  # imported, it may have been given more names
    for name in ("Qwen/Qwen3-9B", "qwen3_8b", "meta-llama/Llama-3.1-8"):
        with pytest.raises(ModelError, match="did you mean hf:"):
            check_spelling(f"hf:{name}")
    with pytest.raises(ModelError, match="did you mean hf:qwen3-8b"):
        check_spelling("hf:Qwen/Qwen3-8")


def test_adapters_are_trained_alone_in_the_dtype_of_the_weights():
    pytest.importorskip("peft")
    assert split_adapters("a/b+lora8") == ("a/b", 8)
    assert split_adapters("a/b") == ("a/b", 0)
    built = build_model("hf:smollm2-135m+lora8", batch=1, sequence_length=8, meta=True)
    trained = [(name, item) for name, item in built.model.named_parameters() if item.requires_grad]
    assert all("lora_" in name for name, _ in trained)
    assert {str(item.dtype) for _, item in trained} == {"torch.bfloat16"}
    assert built.name == built.source.model == "hf:smollm2-135m+lora8"
    # Seven linear layers in each of 30 layers, each with two adapters.
    assert len(trained) == 30 * 7 * 2
