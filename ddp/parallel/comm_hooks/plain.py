"""The hook that does what is done without one: the simplest example, and what the others are measured against."""

from __future__ import annotations

from typing import Any

from collectives import Work
from ddp.parallel.comm_hooks.grad_bucket import GradBucket


def allreduce(bucket: GradBucket) -> Work[Any]:
    """The sum over ranks times the scale, where the bucket lies."""
    work: Work[Any] = bucket.comm.all_reduce(bucket.buffer, scale=bucket.scale, out=bucket.buffer, async_op=True)
    return work
