"""What tests of DataParallel share: ranks that are threads, and what a model holds as arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import collectives
from collectives import Communicator
from ddp import nn

Arrays = dict[str, np.ndarray[Any, Any]]


def on_ranks(fn: Callable[[Communicator], Any], size: int = 2, timeout: float = 20) -> list[Any]:
    return collectives.run_threads(fn, size, timeout=timeout)


def gradients(net: nn.Module) -> Arrays:
    return {name: p.grad.numpy().copy() for name, p in net.named_parameters() if p.grad is not None}


def parameters(net: nn.Module) -> Arrays:
    return {name: p.detach().numpy().copy() for name, p in net.named_parameters()}
