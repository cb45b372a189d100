"""Lightning: schedule the network inside the module."""

import lightning
import torch
from model import batches, build

import monetlite


class Language(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = monetlite.within(build(), budget="90%", optimizer="adamw")

    def training_step(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = self.network(**inputs).loss
        self.last = loss.item()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


module = Language()
trainer = lightning.Trainer(
    max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
)
trainer.fit(module, torch.utils.data.DataLoader(list(batches()), batch_size=None))
print(module.last)
