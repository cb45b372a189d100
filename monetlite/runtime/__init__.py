"""Running schedules: lowering, and the wrapper."""

from monetlite.runtime.limit import limit_reserved
from monetlite.runtime.wrapper import MONeTWrapper

__all__ = ["MONeTWrapper", "limit_reserved"]
