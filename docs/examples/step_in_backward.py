"""A loop in which each weight is updated as its gradient arrives."""

import torch
from model import batches, build

import monetlite

model = build()
optimizer = monetlite.step_in_backward(torch.optim.AdamW(model.parameters(), lr=1e-3))
model = monetlite.within(model, budget="75%", optimizer="adamw", step_in_backward=True)

losses = []
for inputs in batches():
    loss = model(**inputs).loss
    loss.backward()  # updates the weights
    optimizer.step()  # ends the step
    losses.append(loss.item())
print(losses[-1])
