"""torch's CUDA allocator on paper: the memory that a schedule takes from the GPU."""

from monetlite.allocator.allocator import Allocator
from monetlite.allocator.reserved import Reserved, least_limit, reserve

__all__ = ["Allocator", "Reserved", "least_limit", "reserve"]
