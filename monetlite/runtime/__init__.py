"""Running schedules: lowering, the wrapper, and checking it against plain training."""

from monetlite.runtime.limit import limit_reserved
from monetlite.runtime.verify import Report, verify
from monetlite.runtime.wrapper import MONeTWrapper

__all__ = ["MONeTWrapper", "Report", "limit_reserved", "verify"]
