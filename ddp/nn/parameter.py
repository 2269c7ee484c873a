"""`Parameter` and `Buffer` where PyTorch's models import them from."""

from ddp.nn._parameter import Buffer, Parameter

__all__ = ["Buffer", "Parameter"]
