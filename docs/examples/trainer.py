"""transformers' Trainer: give it the wrapped model."""

import tempfile

from model import batches, build
from transformers import Trainer, TrainingArguments

import monetlite

examples = [
    dict(zip(batch, rows, strict=True)) for batch in batches() for rows in zip(*batch.values(), strict=True)
]
model = monetlite.MONeTWrapper(build(), budget="90%")
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=8,
        max_steps=8,
        save_strategy="no",
        use_cpu=True,
    )
    result = Trainer(model=model, args=arguments, train_dataset=examples).train()
print(result.training_loss)
