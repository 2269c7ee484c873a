"""Gradients as function calls, ops of your own, checkpointed regions, and the checks that gradients are right."""

from ddp import _aliases
from ddp._engine import detect_anomaly, set_detect_anomaly
from ddp.autograd._check import gradcheck, gradgradcheck
from ddp.autograd._function import Function
from ddp.autograd._recompute import checkpoint, checkpoint_sequential
from ddp.autograd._run import Variable, backward, grad

__all__ = ["Function", "Variable", "backward", "checkpoint", "checkpoint_sequential", "detect_anomaly", "grad"]
__all__ += ["gradcheck", "gradgradcheck", "set_detect_anomaly"]

__getattr__ = _aliases.attribute(__name__)
