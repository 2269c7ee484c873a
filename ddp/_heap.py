"""Freed memory stays with the process, because the next training step asks for it again.

glibc returns what lies free at the end of its heap to the system, and maps large blocks one by one; every page of them
comes back by a fault. A network frees all of its activations at the end of backward, so it pays in each step: a
fourteenth of the time of `benchmarks/zoo.py`'s ResNet-18. Other allocators ignore it.

Source: mallopt(3), M_MMAP_THRESHOLD and M_TRIM_THRESHOLD.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h
FREE = 1 << 30  # bytes
LARGEST = 32 << 20  # bytes, the most that glibc takes


def keep_freed() -> None:
    """Lets up to 1 GiB lie free at the end of the heap, which holds blocks up to 32 MiB."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, LARGEST)
        mallopt(_TRIM_THRESHOLD, FREE)
