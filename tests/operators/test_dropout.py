"""Dropout: in place, and its gradient from packed bits or from the generator's state."""

import pytest
import torch
from contents import cases, drawn, plain
from hypothesis import given
from hypothesis import strategies as st
from small_models import assert_same, step, twin
from step_lists import free_profile, recompute_everything, schedule_of
from test_relu import shapes
from thoroughness import often
from torch import nn

import monetlite
from monetlite.operators.random import replay

probabilities = st.sampled_from([0.025, 0.1, 0.25, 0.3, 0.5, 0.999, 0.0, 1.0])


@drawn(max_examples=22)
@given(cases(shapes), probabilities)
def test_every_way_to_run_a_dropout_makes_the_same_bits(case, probability):
    case.check(nn.Dropout(probability))


@drawn(max_examples=4)
@given(cases(st.just((2, 3, 5, 4)), dtypes=(torch.float32, torch.float64)))
def test_random_operators_of_other_kinds_draw_the_same_again(case):
    case.check(nn.Sequential(nn.Dropout2d(0.4), nn.RReLU(), nn.AlphaDropout(0.3)))


def test_two_dropouts_draw_numbers_of_their_own():
    """Each from the state it found: the second's mask is not the first's."""
    layer = nn.Sequential(nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.5))
    seen = plain((40, 8)).check(layer)
    assert seen.names("dropout_backward") == {"inplace", "from_mask", "from_mask_inplace", "from_state"}
    assert "inplace" in seen.names("dropout")


def test_what_each_gradient_reads():
    captured = plain((3, 8)).capture(nn.Dropout(0.5))
    backward, mask = captured.operator("dropout_backward"), captured.operator("dropout_mask")
    (state,) = captured.operator("rng_state").writes
    dropout = captured.operator("dropout")
    kept = dropout.writes[1]
    (gradient,) = set(backward.find("default").reads) - {kept}
    assert {item.name: set(item.reads) - {gradient} for item in backward.implementations} == {
        "default": {kept},
        "inplace": {kept},
        "from_mask": {*mask.writes},
        "from_mask_inplace": {*mask.writes},
        "from_state": {state},
    }


def test_a_gpu_draws_again_only_for_what_begins_where_the_allocator_put_it():
    """A thread of CUDA's draws one number or several at a time, as the tensor's address allows."""

    class Joined(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.first = nn.Linear(7, 7), nn.Parameter(torch.randn(1, 7))

        def forward(self, x):
            return torch.cat([self.first, nn.functional.dropout(torch.relu(self.layer(x)), 0.5)])

    graph = monetlite.trace(Joined(), torch.randn(4, 7))
    (devices,) = (
        {item.name: item.devices for item in operator.implementations}
        for operator in graph.operators
        if str(getattr(operator.implementations[0].call, "target", "")).startswith("aten.native_dropout_backward")
    )
    assert devices["from_state"] == ("cpu",)
    whole = plain((4, 7)).capture(nn.Dropout(0.5)).operator("dropout_backward")
    assert whole.find("from_state").devices == ()
    # CUDA rounds the factor of the result otherwise than that of its gradient.
    rounded = plain((4, 7)).capture(nn.Dropout(0.025)).operator("dropout_backward")
    assert rounded.find("from_state").devices == ("cpu",)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_rounds_twice_is_offered_for_float32_alone(dtype):
    offered = plain((3, 8)).capture(nn.Dropout(0.5)).offered("dropout_backward")
    half = plain((3, 8), dtype=dtype).capture(nn.Dropout(0.5))
    assert set(offered) - set(half.offered("dropout_backward")) == {"inplace", "from_state"}
    assert half.offered("dropout") == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("p", often([0.025, 0.1, 0.5], 0.1))
def test_dropout_rounds_as_plain_training_does(dtype, p):
    """A CPU divides by 1 − p in the tensor's type, which `native_dropout` does not."""
    model, x = nn.Sequential(nn.Linear(16, 64), nn.Dropout(p), nn.Linear(64, 8)).to(dtype), torch.randn(32, 16)
    inputs = (x.to(dtype),)
    graph = monetlite.trace(model, inputs)
    schedule = schedule_of(free_profile(graph), recompute_everything(graph))
    assert_same(step(monetlite.MONeTWrapper(twin(model), schedule), inputs), step(model, inputs))


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5])
def test_dropout_drawn_again_is_the_first_draw_and_leaves_the_generator_alone(p):
    torch.manual_seed(3)
    source = torch.randn(1000)
    state = torch.get_rng_state()
    first = torch.ops.aten.native_dropout.default(source, p, True)
    torch.rand(17)
    after = torch.get_rng_state()
    second = replay(state, "cpu", "aten.native_dropout.default", source, p, True)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(first, second, strict=True))
    assert torch.equal(torch.get_rng_state(), after)


def test_an_error_while_drawing_again_leaves_the_generator_alone():
    source, state = torch.randn(3), torch.get_rng_state()
    torch.rand(5)
    after = torch.get_rng_state()
    with pytest.raises(RuntimeError):
        replay(state, "cpu", "aten.native_dropout.default", source, 2.0, True)
    assert torch.equal(torch.get_rng_state(), after)


def test_attention_that_drops_nothing_is_not_random():
    """Attention with dropout is drawn again from the generator's state; without, no state is noted."""

    class Attention(nn.Module):
        def __init__(self, p):
            super().__init__()
            self.p, self.weight = p, nn.Parameter(torch.ones(8))

        def forward(self, x):
            x = x * self.weight
            return nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=self.p)

    x = torch.randn(2, 2, 4, 8)
    for p in (0.0, 0.5):
        graph = monetlite.trace(Attention(p), x)
        states = [op for op in graph.operators if op.family == "rng_state"]
        assert len(states) == (p != 0.0)
        assert not any(op.rerunnable for op in states)
        assert all(op.rerunnable for op in graph.operators if op.phase == "forward" and op not in states)
