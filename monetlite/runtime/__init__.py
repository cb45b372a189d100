"""Running schedules: lowering, and the wrapper."""

from monetlite.runtime.reserved_memory import limit_reserved
from monetlite.runtime.wrapper import MONeTWrapper

__all__ = ["MONeTWrapper", "limit_reserved"]
