"""The other door: torch.compile with monetlite as its backend."""

import torch
from model import batches, build

model = build()
model.config.use_cache = False
model.compile(backend="monetlite", options={"budget": "110%", "time_limit": 5})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for inputs in batches():
    loss = model(**inputs).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(loss.item())
