"""Freed memory stays with the process, because the next training step asks for it again.

glibc returns what lies free at the end of its heap to the system once that is twice the largest block freed so far, a
block counting up to 32 MiB; from then on every page of it comes back by a fault. A network of a few layers frees more
than its largest array at once, so it pays in each step: a tenth of the time of a small CNN's. One block of the largest
size that counts, never touched and so of no memory, sets the measure to 64 MiB at once. Other allocators ignore it.

Source: mallopt(3), M_MMAP_THRESHOLD and M_TRIM_THRESHOLD.
"""

from __future__ import annotations

import numpy as np

LARGEST = (32 << 20) - (64 << 10)  # bytes: what counts, less room for headers and rounding


def keep_freed() -> None:
    """Lets up to 64 MiB lie free at the end of the heap."""
    np.empty(LARGEST, np.uint8)  # freed at once
