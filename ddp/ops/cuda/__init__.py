"""The fused pairs as CUDA kernels. An op takes them by a table keyed by the name of its array module.

`SOURCES` holds every source: tests compile each for the GPUs we know, and run it on the CPU against the NumPy forms.
"""

from ddp.ops.cuda import adding, attending, choosing, curves, dropping, normalizing, updates, windows
from ddp.ops.cuda._source import SOURCES

__all__ = ["SOURCES", "adding", "attending", "choosing", "curves", "dropping", "normalizing", "updates", "windows"]
