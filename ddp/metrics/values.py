"""Which rank writes a metric, and how a value is stored in a file."""

from __future__ import annotations

from typing import Any

from ddp.errors import ArgumentError

RESERVED = "step"


def is_writer(name: str, rank: int | None, comm: Any) -> bool:
    """True on rank 0. Raises: ArgumentError if neither or both of `rank` and `comm` (which has a rank) are given."""
    if (rank is None) == (comm is None):
        raise ArgumentError(f"{name}: expected this process's rank, or its communicator: rank=0, or comm=comm")
    return int(comm.rank if rank is None else rank) == 0


def check_step(writer: object, step: Any) -> int:
    """The step as an int. Raises: ArgumentError if it is no whole number."""
    step = as_plain(step)
    if type(step) is not int:
        raise ArgumentError(f"{type(writer).__name__}.log: expected a step that is a whole number, got {step!r}")
    return step


def as_plain(value: Any) -> Any:
    """A tensor or array of one element as a number, anything else as it is."""
    return value.item() if hasattr(value, "item") else value
