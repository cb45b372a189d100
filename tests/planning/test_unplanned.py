"""A loss that is computed outside of the model: people are told where it matters, and what to do helps."""

import warnings

import commands
import pytest
import torch
from torch import nn

import monetlite

LABELS = torch.arange(512) % 400


class Classes(nn.Module):
    """Its logits are most of what it keeps."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 400))

    def forward(self, x, labels=None):
        logits = self.layers(x)
        return logits if labels is None else {"loss": nn.functional.cross_entropy(logits, labels)}


def build():
    return Classes(), (torch.randn(512, 32),)


def build_with_loss():
    return Classes(), (torch.randn(512, 32), LABELS)


def few_classes():
    return nn.Sequential(nn.Linear(32, 600), nn.GELU(), nn.Linear(600, 2)), (torch.randn(512, 32),)


@pytest.mark.usefixtures("work_folder")
@pytest.mark.parametrize(("build", "said"), [(build, True), (build_with_loss, False), (few_classes, False)])
def test_it_is_said_where_outputs_are_much_of_the_budget(build, said):
    model, inputs = build()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        monetlite.optimize(model, inputs, "100%", device="rtx-4090", time_limit=1)
    found = [str(item.message) for item in caught if "a loss of the model's outputs" in str(item.message)]
    assert len(found) == said
    spec = f"{__name__}:{build.__name__}"
    result = commands.run("solve", "--model", spec, "--budget", "100%", "--device", "t4", "--time-limit", "1")
    assert result.exit_code == 0, result.output
    assert ("the loss" in result.output) == said


def test_a_model_that_returns_its_loss_keeps_its_budget():
    def outside(output):
        return nn.functional.cross_entropy(output, LABELS)

    within = {}
    for build_, loss in ((build, outside), (build_with_loss, None)):
        model, inputs = build_()
        schedule = monetlite.optimize(model, inputs, "100%", device="cpu", time_limit=1)
        report = monetlite.verify(model, schedule, inputs, loss=loss, repeats=1)
        within[build_] = report.peak_bytes <= schedule.budget_bytes
    assert within == {build: False, build_with_loss: True}
