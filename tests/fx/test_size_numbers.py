"""Numbers that remember what they are computed from."""

import copy
import math
import pickle
from dataclasses import replace

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

import monetlite
from monetlite.core.errors import TraceError
from monetlite.fx.varying_sizes import Size, agreeing

LENGTH, BATCH = sympy.symbols("s0 s1", integer=True, positive=True)


def test_two_sizes_are_equal_if_they_are_for_all_inputs():
    length = Size(64, LENGTH)
    assert length != Size(64, BATCH)
    assert length * 2 == Size(128, 2 * LENGTH)
    assert length == 64
    assert length != 65
    assert hash(length) == hash(64)
    assert (length < 65, length > 63) == (True, True)


@given(st.lists(st.tuples(st.sampled_from("+-*"), st.booleans(), st.integers(0, 50)), max_size=8))
def test_arithmetic_keeps_the_expression(operations):
    """What was computed at one size says what it is at another."""
    made, at_other = Size(7, LENGTH), 11
    for sign, swapped, number in operations:
        pairs = [(number, made), (number, at_other)] if swapped else [(made, number), (at_other, number)]
        made, at_other = (
            one + two if sign == "+" else one - two if sign == "-" else one * two for one, two in pairs
        )
        if not isinstance(made, Size):
            assert made == at_other
            return
        assert int(made) == made.expression.subs(LENGTH, 7)
        assert at_other == made.expression.subs(LENGTH, 11)


def test_products_and_sums_of_many_keep_it():
    shape = (Size(7, LENGTH), 3, Size(5, BATCH))
    assert math.prod(shape).expression == 3 * LENGTH * BATCH
    assert sum(shape).expression == LENGTH + BATCH + 3


def test_copies_keep_it():
    size = Size(7, 2 * LENGTH)
    for copied in (copy.deepcopy(size), pickle.loads(pickle.dumps(size))):
        assert (int(copied), copied.expression) == (7, 2 * LENGTH)


def changed(graph, index, change):
    operators = list(graph.operators)
    operators[index] = change(operators[index])
    return replace(graph, operators=tuple(operators))


def test_implementations_that_forgot_a_size_are_left_out():
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    graph = monetlite.trace(model, torch.randn(4, 8))
    index = next(at for at, item in enumerate(graph.operators) if len(item.implementations) > 1)

    def with_a_number(number, which):
        def change(operator):
            items = list(operator.implementations)
            items[which] = replace(items[which], call=replace(items[which].call, args=(number,)))
            return replace(operator, implementations=tuple(items))

        return change

    assert agreeing(graph, graph) == graph
    one, other = (changed(graph, index, with_a_number(number, -1)) for number in (64, 32))
    left = agreeing(one, other).operators[index].implementations
    assert left == graph.operators[index].implementations[:-1]
    sizes = [changed(graph, index, with_a_number(Size(number, LENGTH), -1)) for number in (64, 32)]
    assert len(agreeing(*sizes).operators[index].implementations) == len(left) + 1
    with pytest.raises(TraceError, match="another operator at other sizes"):
        agreeing(*(changed(graph, index, with_a_number(number, 0)) for number in (64, 32)))
