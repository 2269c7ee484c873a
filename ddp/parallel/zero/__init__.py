"""ZeRO stage 1: optimizer state sharded over ranks. Source: Rajbhandari et al. 2020, arXiv:1910.02054, §5.1."""

from ddp.parallel.zero.zero_optimizer import ZeroOptimizer

__all__ = ["ZeroOptimizer"]
