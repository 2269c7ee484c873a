"""Gradients as function calls, ops of your own, checkpointed regions, and the checks that gradients are right."""

from typing import TYPE_CHECKING

from ddp import _aliases
from ddp._engine import detect_anomaly as detect_anomaly
from ddp._engine import set_detect_anomaly as set_detect_anomaly
from ddp.autograd._check import gradcheck as gradcheck
from ddp.autograd._function import Function as Function
from ddp.autograd._recompute import checkpoint as checkpoint
from ddp.autograd._recompute import checkpoint_sequential as checkpoint_sequential
from ddp.autograd._run import Variable as Variable
from ddp.autograd._run import backward as backward
from ddp.autograd._run import grad as grad

if not TYPE_CHECKING:  # checkers know which names are defined here
    __all__ = [name for name in globals() if name[0] != "_" and name != "TYPE_CHECKING"]

__getattr__ = _aliases.attribute(__name__)
