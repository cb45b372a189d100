"""peft's LoRA: the base weights are frozen, so most of the backward pass and of what it stores falls away."""

import tempfile

import peft
import torch
from model import batches, build

import monetlite

adapted = peft.get_peft_model(build(), peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))
model = monetlite.within(adapted, budget="95%", optimizer="adamw")
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-3)
for inputs in batches():
    loss = model(**inputs).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)  # the adapter alone
print(loss.item())
