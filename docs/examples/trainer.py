"""transformers' Trainer with a model scheduled in place: it trains, evaluates, saves and resumes as ever."""

import tempfile

from model import batches, build
from transformers import Trainer, TrainingArguments

import monetlite

examples = [
    dict(zip(batch, rows, strict=True)) for batch in batches() for rows in zip(*batch.values(), strict=True)
]


def trainer(folder: str, steps: int) -> Trainer:
    model = monetlite.within(build(), budget="90%", optimizer="adamw")
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=8,
        max_steps=steps,
        eval_strategy="steps",
        eval_steps=4,
        save_steps=4,
        load_best_model_at_end=True,
        use_cpu=True,
        report_to=[],
    )
    return Trainer(model=model, args=arguments, train_dataset=examples, eval_dataset=examples[:16])


with tempfile.TemporaryDirectory() as folder:
    trainer(folder, steps=4).train()
    resumed = trainer(folder, steps=8)
    resumed.train(resume_from_checkpoint=True)
    resumed.model.save_pretrained(f"{folder}/best")
    type(resumed.model).from_pretrained(f"{folder}/best")
print(resumed.state.best_metric)
