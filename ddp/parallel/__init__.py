"""Training on many devices: `DataParallel` and what it is made of."""

from ddp.parallel.plan import plan_buckets
from ddp.parallel.wrapper import DataParallel

__all__ = ["DataParallel", "plan_buckets"]
