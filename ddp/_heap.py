"""Keeps freed memory in the process, because the next training step allocates it again.

By default glibc returns free memory at the end of its heap to the system, and maps and unmaps each large block. Every
page that is allocated again costs a page fault. A network frees all of its activations by the end of backward, so each
step would have these page faults. They take a fourteenth of the time of `benchmarks/zoo.py`'s ResNet-18. Other
allocators than glibc's are not changed.

Source: mallopt(3), M_MMAP_THRESHOLD and M_TRIM_THRESHOLD.
"""

from __future__ import annotations

import ctypes

# Parameters of mallopt, from malloc.h.
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
FREE = 1 << 30  # bytes, the free memory that the heap keeps
LARGEST = 32 << 20  # bytes, the largest threshold that glibc accepts


def keep_freed() -> None:
    """Makes glibc allocate blocks of less than 32 MiB on its heap, and keep up to 1 GiB free at the heap's end."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, LARGEST)
        mallopt(_TRIM_THRESHOLD, FREE)
