"""Two processes on the CPU train a wrapped and a plain model side by side, in each way that is asked for.

python distributed_training.py MEETING_FILE ddp fsdp blocks collectives buckets models
"""

import copy
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1]))

from step_lists import free_profile, recompute_everything, schedule_of

import monetlite
from monetlite.operators.traits import is_collective
from monetlite.profiling.memory_records import peak_growth_bytes

STEPS, WIDTH = 4, 512


class Network(nn.Module):
    """Weights of 1 MiB, dropout and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Dropout(0.1)) for _ in range(2)]
        self.layers = nn.Sequential(*layers)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layers(x))


def train(model: nn.Module, rank: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(rank)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = (model(torch.randn(8, WIDTH)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def wrap(model: nn.Module, *, inside: bool = False) -> monetlite.MONeTWrapper:
    graph = monetlite.trace(model, torch.randn(8, WIDTH, requires_grad=inside))
    return monetlite.MONeTWrapper(model, schedule_of(free_profile(graph), recompute_everything(graph)))


def same(found: nn.Module, expected: nn.Module) -> None:
    for (name, one), (_, other) in zip(found.state_dict().items(), expected.state_dict().items(), strict=True):
        if isinstance(one, torch.distributed.tensor.DTensor):
            one, other = one.full_tensor(), other.full_tensor()
        assert torch.equal(one, other), name


def ddp(rank: int) -> None:
    plain = Network()
    wrapped = wrap(copy.deepcopy(plain))
    first = wrapped.layers[0][0].weight
    ready: list[bool] = []

    def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        ready.append(first.grad is not None)
        work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    reducing = DistributedDataParallel(wrapped, bucket_cap_mb=1)
    reducing.register_comm_hook(None, hook)
    other = DistributedDataParallel(plain, bucket_cap_mb=1)
    losses = train(reducing, rank)
    assert losses == train(other, rank), "losses differ from plain training's"
    same(wrapped, plain)
    # In its first step, DistributedDataParallel has all gradients in one bucket.
    assert ready[0] is True
    assert ready[1] is False, "the first bucket is reduced when the last gradient is there"


def blocks(rank: int) -> None:
    """Every block wrapped and sharded by itself; sharding inside a wrapped module is refused."""
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    plain = Network()
    wrapped = copy.deepcopy(plain)
    for index, block in enumerate(wrapped.layers):
        wrapped.layers[index] = wrap(block, inside=index > 0)
    for network in (wrapped, plain):
        for block in network.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(network, mesh=mesh)
    losses = train(wrapped, rank)
    assert losses == train(plain, rank), "losses differ from plain training's"
    same(wrapped, plain)

    inside = wrap(Network())
    for block in inside.model.layers:
        fully_shard(block, mesh=mesh)
    with pytest.raises(monetlite.MonetliteError, match="fully_shard"):
        inside(torch.randn(8, WIDTH))


def models(rank: int) -> None:
    """Twenty steps of every model of `real_models`, each process on batches of its own."""
    from real_models import NAMES, Loop, batches, build  # which imports transformers

    for name in NAMES:
        model, make = build(name)
        graph = monetlite.trace(model, make())
        schedule = schedule_of(free_profile(graph), recompute_everything(graph))
        wrapped = monetlite.MONeTWrapper(copy.deepcopy(model), schedule)
        made = list(batches(make, 20, seed=rank))
        losses = []
        for network in (wrapped, model):
            torch.manual_seed(rank)
            loop = Loop(DistributedDataParallel(network))
            losses.append([loop.step([batch]) for batch in made])
        for found, expected in zip(*losses, strict=True):
            within = 1e-4 if name in ("gpt2", "llama with LoRA") else 0.0
            assert abs(found - expected) <= within * expected, (name, losses)


def fsdp(rank: int) -> None:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    plain = Network()
    wrapped = wrap(copy.deepcopy(plain))
    fully_shard(wrapped, mesh=mesh)
    fully_shard(plain, mesh=mesh)
    losses = train(wrapped, rank)
    assert losses == train(plain, rank), "losses differ from plain training's"
    same(wrapped, plain)


class Counting(nn.Module):
    """Divides its loss by a number that all processes add up, and has an activation that they add up, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = all_reduce(self.layers(x), "sum", dist.group.WORLD).tanh()
        count = (x > 0).sum().float()
        dist.all_reduce(count)
        return inner.square().sum() / count


def collectives(rank: int) -> None:
    """Each process plans for itself, at its own time, and has a budget of its own."""
    graph = monetlite.trace(Counting(), torch.randn(512, WIDTH))
    defaults = [(item, item.implementations[0].call) for item in graph.operators]
    added = [item for item, call in defaults if call is not None and is_collective(call.target)]
    assert len(added) >= 4, "sums and waits"
    assert not any(item.rerunnable for item in added)
    plain = Counting()
    trained = monetlite.within(copy.deepcopy(plain), budget=["97%", "88%"][rank], time_limit=1)
    for model in (trained, plain):
        model.losses = []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        torch.manual_seed(rank)
        for _ in range(12):
            optimizer.zero_grad()
            loss = model(torch.randn(512, WIDTH))
            loss.backward()
            optimizer.step()
            model.losses.append(loss.item())
    assert trained.losses == plain.losses, "losses differ from plain training's"
    same(trained, plain)


def buckets(rank: int) -> None:
    """A budget counts the copy of the gradients that DistributedDataParallel keeps."""
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(8)]
    trained, x = nn.Sequential(*layers), torch.randn(2048, WIDTH)
    weights_bytes = sum(item.nbytes for item in trained.parameters())
    budget = 70_000_000
    model = monetlite.MONeTWrapper(trained, budget=budget, wait=True, time_limit=2)
    reducing = DistributedDataParallel(model, gradient_as_bucket_view=rank == 1)

    def step() -> None:
        reducing(x).square().mean().backward()

    for _ in range(10):
        step()
        model.zero_grad()
    assert model.schedule is not None
    assert 0.9 * budget < model.schedule.peak_bytes <= budget
    dist.barrier()  # so that none of the gradients' sums is still awaited
    peak_bytes = 2 * weights_bytes + x.nbytes + peak_growth_bytes(step)
    assert peak_bytes <= budget, f"{peak_bytes} bytes with the buckets"


def run(rank: int, meeting: str, kinds: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    for kind in kinds:
        torch.manual_seed(0)
        kinds_of = {"ddp": ddp, "fsdp": fsdp, "blocks": blocks, "collectives": collectives, "buckets": buckets}
        (kinds_of | {"models": models})[kind](rank)
        os.write(1, f"{kind}\n".encode())
    dist.destroy_process_group()


if __name__ == "__main__":
    # Forked before torch starts threads: its import takes longer than the training.
    torch.multiprocessing.start_processes(run, (sys.argv[1], sys.argv[2:]), nprocs=2, start_method="fork")
