"""accelerate: schedule the model before `prepare`."""

import torch
from accelerate import Accelerator
from model import batches, build

import monetlite

accelerator = Accelerator(cpu=True)
model = monetlite.within(build(), budget="90%", optimizer="adamw")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = accelerator.prepare(model, optimizer)
for inputs in batches():
    loss = model(**inputs).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
print(loss.item())
