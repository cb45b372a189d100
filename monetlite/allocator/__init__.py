"""What torch's CUDA allocator makes of a schedule: the memory that it takes from the GPU, on paper."""

from monetlite.allocator.allocator import Allocator
from monetlite.allocator.reserved import Reserved, least_limit, reserve

__all__ = ["Allocator", "Reserved", "least_limit", "reserve"]
