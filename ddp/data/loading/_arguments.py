"""Which arguments of a DataLoader go together: what PyTorch refuses, and `fork`."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from ddp.errors import ArgumentError


def check_sampling(
    stream: bool, batch_size: int | None, shuffle: Any, sampler: Any, batch_sampler: Any, drop_last: bool
) -> None:
    """Raises: ArgumentError for arguments of which one says what another says, too."""
    if stream and (shuffle or sampler is not None or batch_sampler is not None):
        raise ArgumentError("an IterableDataset has an order of its own: no shuffle, sampler or batch_sampler with it")
    if sampler is not None and shuffle:
        raise ArgumentError("the sampler decides on the order: no shuffle with it")
    if batch_sampler is not None and (batch_size != 1 or shuffle or sampler is not None or drop_last):
        raise ArgumentError(
            "the batch_sampler decides on batches: no batch_size, shuffle, sampler or drop_last with it"
        )
    if batch_size is None and drop_last:
        raise ArgumentError("batch_size=None makes no batches: no drop_last with it")
    if batch_size is not None and not (_is_count(batch_size) and batch_size > 0):
        raise ArgumentError(f"batch_size should be a number above 0, is {batch_size!r}")


def check_working(num_workers: int, timeout: float, prefetch_factor: int | None, persistent_workers: bool) -> None:
    """Raises: ArgumentError for numbers that are none, or arguments that are about workers where there are none."""
    if not _is_count(num_workers):
        raise ArgumentError(f"num_workers should be a count, is {num_workers!r}")
    if not isinstance(timeout, (int, float, np.number)) or not 0 <= timeout <= threading.TIMEOUT_MAX:
        raise ArgumentError(f"timeout should be seconds, or 0, is {timeout!r}")
    if num_workers == 0 and (prefetch_factor is not None or persistent_workers or timeout):
        raise ArgumentError("prefetch_factor, persistent_workers and timeout are about workers, and num_workers is 0")
    if prefetch_factor is not None and not (_is_count(prefetch_factor) and prefetch_factor > 0):
        raise ArgumentError(f"prefetch_factor should be a number above 0, is {prefetch_factor!r}")


def _is_count(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(value >= 0)


def start_method(context: Any) -> str:
    """How workers start, "forkserver" or "spawn", by `multiprocessing_context`. Raises: ArgumentError for others."""
    name = "forkserver" if context is None else context if isinstance(context, str) else context.get_start_method()
    if name == "fork":
        raise ArgumentError(
            "multiprocessing_context='fork' would copy a process that may hold MPI, CUDA and threads, which do not"
            " survive that; leave it out: workers are forked from a small server, which starts them as fast"
        )
    if name not in ("forkserver", "spawn"):
        raise ArgumentError(f"multiprocessing_context should be 'forkserver' or 'spawn', is {name!r}")
    return str(name)
