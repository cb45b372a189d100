"""The same loop within a memory budget."""

import torch
from model import batches, build

import monetlite

model = build()
model = monetlite.within(model, budget="90%", optimizer="adamw")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

losses = []
for inputs in batches():
    loss = model(**inputs).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(losses[-1])
