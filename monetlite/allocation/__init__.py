"""What torch's CUDA allocator makes of a schedule: the memory that it takes from the GPU, on paper."""

from monetlite.allocation.allocator import Allocator
from monetlite.allocation.reserved import Reserved, least_limit, reserve

__all__ = ["Allocator", "Reserved", "least_limit", "reserve"]
