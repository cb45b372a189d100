"""Training by a schedule.

`wrapper` and `torch_compile` are the two doors. Both choose a schedule and bind it to the captured step
(`serving`), lower it to two programs (`lowering`), run these eagerly (`buffers`) or by Inductor (`inductor`), and
hand gradients to autograd (`gradient_delivery`). `delegation` makes the wrapper look like its model.
`reserved_memory` limits torch's CUDA allocator.
"""

from monetlite.runtime.reserved_memory import limit_reserved
from monetlite.runtime.wrapper import MONeTWrapper

__all__ = ["MONeTWrapper", "limit_reserved"]
