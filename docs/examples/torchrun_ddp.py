"""DistributedDataParallel around the wrapper: torchrun --nproc-per-node 2 torchrun_ddp.py"""

import torch
import torch.distributed as dist
from model import batches, build
from torch.nn.parallel import DistributedDataParallel

import monetlite

dist.init_process_group()  # NCCL on GPUs, gloo on CPUs
model = DistributedDataParallel(monetlite.MONeTWrapper(build(), budget="90%", optimizer="adamw", time_limit=5))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step, inputs in enumerate(batches()):
    if step % dist.get_world_size() == dist.get_rank():
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
if dist.get_rank() == 0:
    print(loss.item())
dist.destroy_process_group()
