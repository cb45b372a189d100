"""Warnings name the line of the person's code, however deep monetlite and torch are in between."""

import contextlib
import inspect
import warnings

import pytest
import torch
from small_models import Reads

import monetlite
from monetlite.core.announcing import warn


def test_a_warning_names_the_line_that_called():
    with pytest.warns(UserWarning, match="said") as said:
        warn("said")
    assert (said[0].filename, said[0].lineno) == (__file__, inspect.currentframe().f_lineno - 1)


@contextlib.contextmanager
def around():
    warn("said")
    yield


def test_contexts_stand_between():
    with pytest.warns(UserWarning, match="said") as said, around():
        pass
    assert said[0].filename == __file__


def test_a_warning_of_a_step_names_the_line_of_the_step():
    """It comes from under TorchDynamo, which calls the planned step."""
    model = monetlite.within(Reads(), budget="200%", device="rtx-4090", time_limit=1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(4):
            line = inspect.currentframe().f_lineno + 1
            loss = model(torch.randn(8, 64)).sum()
            loss.backward()
    assert any("pieces" in str(item.message) for item in said)
    assert {(item.filename, item.lineno) for item in said} == {(__file__, line)}
