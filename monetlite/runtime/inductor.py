"""Lowered programs compiled by Inductor: its fusion inside of what a schedule stores and recomputes.

Inductor plans the memory inside each program by itself, fuses elementwise operators and rounds as its kernels do:
the prediction of the peak is then an estimate, and results differ in their last bits. What is stored between the
programs, and what is recomputed in the second, stays the schedule's choice.
"""

from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from monetlite.captured.calls import fake_mode
from monetlite.errors import ModelError
from monetlite.operators.guards import require
from monetlite.operators.random import replay, rng_state
from monetlite.tracing.capture import Boxed

_STATEFUL = (require, replay, rng_state)


def inductor(program: fx.GraphModule) -> Boxed:
    """A program, compiled; a function of one list, as `boxed` makes.

    Raises:
        ModelError: a program that draws random numbers again, or checks a guard, which can't be compiled.
    """
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table

    for node in program.graph.nodes:
        if node.op == "call_function" and node.target in _STATEFUL:
            raise ModelError(
                f"the schedule runs {node.name}, which Inductor can't compile: random numbers drawn again, "
                "or a guarded implementation. Solve with implementations='default' and a larger budget, or run "
                "the schedule without compile=True"
            )
    placeholders = program.graph.find_nodes(op="placeholder")
    inputs: list[Any] = [node.meta["val"] for node in placeholders]
    if not inputs:
        raise ModelError("a program without inputs can't be compiled")
    with fake_mode(placeholders[0]):
        # Our own functions become torch's operators, and those the ones that Inductor knows.
        traced = make_fx(torch.func.functionalize(lambda *args: program(*args)), select_decomp_table())(*inputs)
    with torch._inductor.config.patch(fallback_random=True):
        run: Boxed = compile_fx_inner(traced, inputs)
    return run


__all__ = ["inductor"]
