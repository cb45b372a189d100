"""Training by a schedule.

`in_place`, `wrapper` and `torch_compile` are the three doors to `scheduled_training`. It chooses a schedule
(`serving`) and binds it to the captured step, lowers it to two programs (`lowering`), runs these eagerly
(`buffers`) or by Inductor (`inductor`), and hands gradients to autograd (`gradient_delivery`).
`reserved_memory` limits torch's CUDA allocator.
"""

from monetlite.runtime.reserved_memory import limit_reserved
from monetlite.runtime.wrapper import MONeTWrapper

__all__ = ["MONeTWrapper", "limit_reserved"]
