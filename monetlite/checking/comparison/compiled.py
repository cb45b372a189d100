"""`torch.compile` within a share of the memory that it takes for activations by itself.

The share is `torch._functorch.config.activation_memory_budget`: 1 is torch's own choice, 0 is checkpointing of
everything.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from monetlite.checking.comparison.contenders import Contender, Task
from monetlite.checking.comparison.data import Peer

SHARES = (1.0, 0.7, 0.5, 0.3, 0.1)
MOST_PROGRAMS = 256
"""How often one function may be compiled, by contenders and for its graph breaks."""

Backend = Callable[[fx.GraphModule, list[torch.Tensor]], Any]


def inductor(_: Task, shares: Sequence[float] | None = None) -> list[Contender]:
    """Compiled by Inductor, as `torch.compile(model)` does."""
    from torch._inductor.compile_fx import compile_fx

    return [_contender(Peer.INDUCTOR, share, compile_fx) for share in shares or SHARES]


def aot_eager(_: Task) -> list[Contender]:
    """The same choice of what to keep, by PyTorch's own kernels: torch's backend `aot_eager_decomp_partition`."""
    from torch._dynamo.backends.debugging import aot_eager_decomp_partition

    return [_contender(Peer.AOT_EAGER, share, aot_eager_decomp_partition) for share in SHARES]


def _contender(peer: Peer, share: float, compile_graph: Backend) -> Contender:
    def prepare(model: nn.Module) -> nn.Module:
        # Dynamo hands one program to models of one class with one backend, whatever the settings were that it was
        # compiled with: each contender has a backend of its own.
        def backend(graph: fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
            with torch._functorch.config.patch(activation_memory_budget=share):
                return compile_graph(graph, inputs)

        model.compile(backend=backend, dynamic=False)
        return model

    return Contender(
        peer=peer, setting=f"memory budget {share:g}", label=f"{peer}, budget {share:g}", prepare=prepare
    )


def settings() -> Any:
    """What has to hold while contenders are run: Dynamo gives up on a function that it compiled often."""
    return torch._dynamo.config.patch(recompile_limit=MOST_PROGRAMS, accumulated_recompile_limit=4 * MOST_PROGRAMS)


__all__ = ["aot_eager", "inductor", "settings"]
