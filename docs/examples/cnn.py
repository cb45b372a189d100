"""A convolutional network within a memory budget."""

import torch
from images import build_cnn, image_batches

import monetlite

model = monetlite.MONeTWrapper(build_cnn(), budget="80%")  # was: model = build_cnn()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for images, labels in image_batches():
    loss = torch.nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(loss.item())
