"""DistributedDataParallel, as the forward pass of a model inside of it finds it."""

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def ddp_around() -> DistributedDataParallel | None:
    """The DistributedDataParallel whose forward pass runs, as TorchDynamo looks it up; None outside of one.

    If torch notes it elsewhere, budgets don't count the buckets, and a step takes a second copy of the gradients
    more than planned.
    """
    found: DistributedDataParallel | None = DistributedDataParallel._active_ddp_module
    return found


def reduced_by(ddp: DistributedDataParallel) -> list[nn.Parameter]:
    """The parameters that have a place in its buckets."""
    ignored = ddp.parameters_to_ignore
    return [item for name, item in ddp.module.named_parameters() if item.requires_grad and name not in ignored]
