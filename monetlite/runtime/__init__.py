"""Training by a schedule.

`in_place`, `wrapper` and `torch_compile` are the three doors to `scheduled_training`. Its plans (`step_plans`)
choose a schedule that serves the inputs (`serving`), bind it to the captured step (`fitting`), and exchange it for
a better one (`refinement`). The step is lowered to two programs (`lowering`), which run eagerly (`buffers`) or by
Inductor (`inductor`) and hand gradients to autograd (`gradient_delivery`). `reserved_memory` limits torch's CUDA
allocator.
"""

from monetlite.runtime.reserved_memory import limit_reserved
from monetlite.runtime.wrapper import MONeTWrapper

__all__ = ["MONeTWrapper", "limit_reserved"]
