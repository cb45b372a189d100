"""Twenty steps within the budget."""

import torch
from segment import build
from torch.nn.functional import cross_entropy

import monetlite

model, (images,) = build()
labels = torch.randint(0, 5, (8, 96, 96))
model = monetlite.MONeTWrapper(model, "segment.yaml")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

losses = []
for _ in range(20):
    loss = cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(f"{losses[0]:.3f} → {losses[-1]:.3f}")
