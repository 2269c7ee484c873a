"""Gradients as function calls, and the check that they are right."""

from ddp.autograd._check import gradcheck
from ddp.autograd._run import backward, grad

__all__ = ["backward", "grad", "gradcheck"]
