"""Errors reach other processes as they were."""

import copy
import pickle

import pytest

from monetlite.core import errors

CLASSES = [item for item in vars(errors).values() if isinstance(item, type) and issubclass(item, Exception)]


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
def test_a_copy_of_an_error_says_the_same(kind, copied):
    facts = {"budget_bytes": 3, "proven_bytes": 2, "reached_bytes": None}
    error = kind("too small", **facts if kind is errors.InfeasibleBudget else {})
    error.add_note("of a sweep")
    other = copied(error)
    assert type(other) is kind
    assert str(other) == "too small"
    assert vars(other) == vars(error)
