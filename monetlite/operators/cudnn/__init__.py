"""Convolutions on CUDA by cuDNN's execution plans: each one has its own latency and workspace.

`enumerate_plans` lists the plans for a piece of work, on the present GPU or on a described one; `run_plan` does
the work by the plan of a name. Both need the optional package nvidia-cudnn-frontend (`available`). `offer_plans`
makes implementations of plans, and `with_named_plans` of those that a schedule names.
"""

from monetlite.operators.cudnn.convolution_parts import is_plan, tf32_allowed
from monetlite.operators.cudnn.execution_plans import enumerate_plans, find_plan, forget_plans, run_plan
from monetlite.operators.cudnn.library import available, problem, properties_json
from monetlite.operators.cudnn.offers import offer_plans, with_named_plans

__all__ = [
    "available",
    "enumerate_plans",
    "find_plan",
    "forget_plans",
    "is_plan",
    "offer_plans",
    "problem",
    "properties_json",
    "run_plan",
    "tf32_allowed",
    "with_named_plans",
]
