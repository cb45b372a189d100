"""Attention masks of transformers models: where plain training makes none, no step makes any."""

import copy
import itertools

import pytest
import torch
from thoroughness import often
from transformers import LlamaConfig, LlamaForCausalLM, NystromformerConfig, NystromformerForMaskedLM

import monetlite
from monetlite.core.errors import ModelError
from monetlite.tracing.attention_masks import is_known, with_known_masks
from monetlite.tracing.step_inputs import Arguments

IDS = torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(0))
ONES = torch.ones(2, 12, dtype=torch.int64)
PADDED = torch.tensor([[1] * 12, [1] * 9 + [0] * 3])
IN_ORDER = torch.arange(12).expand(2, -1)
PACKED = torch.cat([torch.arange(5), torch.arange(7)]).expand(2, -1)


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=50,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


def trained(model: torch.nn.Module, inputs: dict[str, object]) -> list[torch.Tensor]:
    output = model(**inputs)
    output["loss"].backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return [output["loss"].detach(), *(gradient for gradient in gradients if gradient is not None)]


def attention_inputs(inputs: dict[str, object]) -> set[int]:
    """The numbers of tensors that attention reads in a trace."""
    graph = monetlite.trace(llama(), inputs)
    found = [item for item in graph.operators if "attention" in item.family and item.phase == "forward"]
    assert found
    return {len(item.implementations[0].reads) for item in found}


@pytest.mark.parametrize(
    ("use_cache", "kind"),
    often(itertools.product([None, False], ["none", "one sequence", "packed"]), (None, "packed")),
)
def test_gradients_are_plain_training_s(use_cache: bool | None, kind: str):
    """Packed sequences attend to each other in plain training, unless the cache is switched off."""
    inputs: dict[str, object] = {"input_ids": IDS, "labels": IDS}
    inputs |= {} if use_cache is None else {"use_cache": use_cache}
    inputs |= {} if kind == "none" else {"position_ids": {"one sequence": IN_ORDER, "packed": PACKED}[kind]}
    model = llama()
    expected = trained(copy.deepcopy(model), inputs)
    wrapper = monetlite.MONeTWrapper(model, budget="90%", device="rtx-4090", time_limit=0.3, wait=True)
    for ours, plain in zip(trained(wrapper, inputs), expected, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-7)


@pytest.mark.thorough
def test_a_mask_is_made_only_where_plain_training_may_make_one():
    plainly = {"input_ids": IDS, "labels": IDS}
    without = attention_inputs(plainly)
    assert attention_inputs(plainly | {"use_cache": False}) == without
    assert attention_inputs(plainly | {"position_ids": PACKED}) == without
    assert attention_inputs(plainly | {"position_ids": PACKED, "use_cache": False}) != without


def test_masks_of_ones_are_known_by_their_layout():
    model = llama()
    args, _ = with_known_masks(model, Arguments((IDS, ONES), {}))
    assert args[0] is IDS
    assert is_known(args[1])
    assert torch.equal(args[1], ONES)
    assert args[1].untyped_storage().data_ptr() == ONES.untyped_storage().data_ptr(), "a copy"
    assert with_known_masks(model, Arguments((), {"attention_mask": PADDED})).kwargs["attention_mask"] is PADDED
    zeros = torch.zeros(1, 1).expand(2, 12)
    assert not is_known(with_known_masks(model, Arguments((), {"attention_mask": zeros})).kwargs["attention_mask"])


@pytest.mark.parametrize("wait", often([True, False], False))
def test_masks_of_ones_are_left_out_and_others_are_not(wait: bool):
    """As in plain training. Each kind of mask has its plan, whichever comes first."""
    model = llama()
    expected = [trained(copy.deepcopy(model), {"input_ids": IDS, "labels": IDS, "attention_mask": PADDED})]
    expected.append(trained(copy.deepcopy(model), {"input_ids": IDS, "labels": IDS, "attention_mask": ONES}))
    wrapper = monetlite.MONeTWrapper(model, budget="90%", device="rtx-4090", time_limit=0.3, wait=wait)
    peaks = []
    for mask in (PADDED, ONES, PADDED, ONES):
        wrapper.zero_grad()
        found = trained(wrapper, {"input_ids": IDS, "labels": IDS, "attention_mask": mask})
        peaks.append(wrapper.schedule.plain_peak_bytes)
        for ours, plain in zip(found, expected[int(mask is ONES)], strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-7)
    assert peaks[1] < peaks[0], "the mask of ones is made whole"


@pytest.mark.thorough
def test_a_schedule_of_masks_of_ones_says_so_of_others():
    """A schedule that is kept serves any mask, unless it was solved for ones only."""
    model = llama()
    inputs = {"input_ids": IDS, "labels": IDS, "attention_mask": ONES}
    any_mask = monetlite.optimize(model, inputs, budget="90%", device="rtx-4090", runs_here=True, time_limit=0.3)
    expected = trained(copy.deepcopy(model), inputs | {"attention_mask": PADDED})
    found = trained(monetlite.MONeTWrapper(copy.deepcopy(model), any_mask), inputs | {"attention_mask": PADDED})
    for ours, plain in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-7)
    wrapper = monetlite.MONeTWrapper(model, budget="90%", device="rtx-4090", time_limit=0.3, wait=True)
    trained(wrapper, inputs)
    kept = monetlite.MONeTWrapper(copy.deepcopy(model), wrapper.schedule)
    trained(kept, inputs)
    with pytest.raises(ModelError, match="attention mask with padding"):
        trained(kept, inputs | {"attention_mask": PADDED})


@pytest.mark.thorough
def test_a_mask_that_the_model_makes_is_left_out():
    """Nystromformer can't run with a mask, and makes one of ones, which plain training leaves out."""
    torch.manual_seed(0)
    config = NystromformerConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_landmarks=4,
        segment_means_seq_len=12,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
    )
    model, inputs = NystromformerForMaskedLM(config), {"input_ids": IDS, "labels": IDS}
    expected = trained(copy.deepcopy(model), inputs)
    wrapper = monetlite.MONeTWrapper(model, budget="90%", device="rtx-4090", time_limit=0.3, wait=True)
    for ours, plain in zip(trained(wrapper, inputs), expected, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-7)
