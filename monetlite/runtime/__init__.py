"""Training by a schedule.

`in_place`, `wrapper` and `torch_compile` are the three doors to `scheduled_training`. A captured step
(`step_plans`) runs by one of the model's schedules (`model_schedules`) that serves the inputs (`serving`), which is
bound to it (`fitting`), and exchanged for a better one (`schedule_search`). The step is lowered to two programs
(`lowering`), which run eagerly (`buffers`) or by Inductor (`inductor`) and hand gradients to autograd
(`gradient_delivery`). A model that can't be captured whole trains in pieces (`pieces`), of which all are planned
together (`pieces_planning`). `reserved_memory` limits torch's CUDA allocator.
"""

from monetlite.runtime.reserved_memory import limit_reserved
from monetlite.runtime.wrapper import MONeTWrapper

__all__ = ["MONeTWrapper", "limit_reserved"]
