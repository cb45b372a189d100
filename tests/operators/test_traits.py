"""The table of operators' traits names operators, overloads and arguments that torch has."""

import pytest
import torch
import transformers.integrations.moe  # noqa: F401  # has operators of its own

from monetlite.operators.traits import TRAITS, aten_name, family_of, operation_formula, traits_of

OURS = {"layer_norm_backward_"}
OF_TRANSFORMERS = {"grouped_mm_fallback", "grouped_mm_fallback_backward"}


def overloads(name: str) -> list[torch._ops.OpOverload]:
    packet = getattr(torch.ops.transformers if name in OF_TRANSFORMERS else torch.ops.aten, name)
    return [getattr(packet, overload) for overload in packet.overloads()]


@pytest.mark.parametrize("name", sorted(set(TRAITS) - OURS))
def test_operators_exist(name):
    assert overloads(name)


@pytest.mark.parametrize("name", sorted(set(TRAITS) - OURS))
def test_positions_are_those_of_tensors(name):
    traits = traits_of(f"aten.{name}.default")
    positions = (
        *traits.wide_statistics,
        *traits.wants_channels_last,
        *((0, 1) if traits.gradient_follows else ()),
        *([0] if traits.by_storage else ()),
        *([] if traits.shape_only is None else [traits.shape_only]),
        *([] if traits.ends_of_groups is None else [traits.ends_of_groups]),
        *([traits.left_factor, traits.left_factor + 1] if traits.left_factor else []),
    )
    arguments = [str(item.type) for item in overloads(name)[0]._schema.arguments]
    assert all("Tensor" in arguments[position] for position in positions)


def test_families_are_the_same_for_kernels_of_all_devices():
    assert family_of("aten._scaled_dot_product_flash_attention_for_cpu.default") == "attention"
    assert family_of("aten._scaled_dot_product_efficient_attention.default") == "attention"
    assert family_of("aten._log_softmax.default") == "log_softmax"
    assert aten_name("deliver") == family_of("deliver") == "deliver"


def test_formulas_are_torchs():
    assert operation_formula("aten.mm.default")((2, 3), (3, 5)) == 60
    assert operation_formula("aten.relu.default") is None
    shapes = [(1, 2, 8, 4)] * 3
    of_cpu = operation_formula("aten._scaled_dot_product_flash_attention_for_cpu.default")
    assert of_cpu(*shapes) == operation_formula("aten._scaled_dot_product_flash_attention.default")(*shapes) > 0
    queries, keys = (2, 8, 16, 4), (2, 2, 32, 4)
    for backward in ("", "_backward"):
        formula = operation_formula(f"aten._scaled_dot_product_flash_attention_for_cpu{backward}.default")
        gradient = (queries,) if backward else ()
        fewer = formula(*gradient, queries, keys, keys, 0.0, True)
        assert fewer == formula(*gradient, queries, (2, 8, 32, 4), (2, 8, 32, 4), 0.0, True) > 0
