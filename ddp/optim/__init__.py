"""Optimizers, under PyTorch's names."""

from ddp.optim._optimizer import Optimizer
from ddp.optim._sgd import SGD

__all__ = ["SGD", "Optimizer"]
