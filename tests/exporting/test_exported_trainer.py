"""An exported plan in transformers' Trainer: the same losses, and the peak that was predicted."""

import copy

import pytest
import transformers
from small_models import tiny_transformer
from test_checkpoint_plans import plan_module, trainee

from monetlite.checking.trainee import default_loss
from monetlite.core.options import PricingOptions
from monetlite.exporting.checkpoint_search import CheckpointSearch
from monetlite.exporting.eager_step import record_step
from monetlite.exporting.exported_plan import price_step
from monetlite.exporting.plan_file import Target

STEPS = 20


def losses(model, inputs, folder, **options):
    rows = [{name: item[at] for name, item in inputs.items()} for at in range(len(inputs["input_ids"]))]
    arguments = transformers.TrainingArguments(
        folder, per_device_train_batch_size=len(rows), max_steps=STEPS, logging_steps=1, report_to=[], use_cpu=True,
        save_strategy="no", disable_tqdm=True, **options,
    )  # fmt: skip
    run = transformers.Trainer(model, arguments, train_dataset=rows * STEPS)
    run.train()
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def test_losses_are_the_same_and_the_peak_is_held(tmp_path):
    model, inputs = tiny_transformer("gpt2", layers=2)
    model.config.use_cache = False
    priced = price_step(record_step(model, inputs, default_loss), PricingOptions())
    search = CheckpointSearch(priced)
    found = search.solve((search.smallest().peak_bytes + search.found({}).peak_bytes) // 2)
    assert found.plan
    plan = plan_module(priced, found.plan, Target.TRANSFORMERS)
    planned = plan["apply"](copy.deepcopy(model))
    expected = losses(copy.deepcopy(model), inputs, tmp_path)
    assert len(expected) == STEPS
    assert losses(planned, inputs, tmp_path) == expected
    taken = trainee(planned, inputs).memory().peak_bytes
    assert found.peak_bytes == pytest.approx(taken, rel=0.01)


def test_checkpointing_twice_is_refused(tmp_path):
    model, inputs = tiny_transformer("gpt2", layers=2)
    priced = price_step(record_step(model, inputs, default_loss), PricingOptions())
    plan = plan_module(priced, dict.fromkeys(priced.recompute, frozenset()))
    with pytest.raises(RuntimeError, match="switch gradient checkpointing off"):
        losses(plan["apply"](model), inputs, tmp_path, gradient_checkpointing=True)
