"""What tests of DataParallel share: ranks that are threads, and what a model holds as arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.testing import assert_allclose

import collectives
import ddp
from collectives import Communicator
from ddp import nn

Arrays = dict[str, np.ndarray[Any, Any]]


def on_ranks(fn: Callable[[Communicator], Any], size: int = 2, timeout: float = 20) -> list[Any]:
    return collectives.run_threads(fn, size, timeout=timeout)


def gradients(net: nn.Module) -> Arrays:
    return {name: p.grad.detach().numpy().copy() for name, p in net.named_parameters() if p.grad is not None}


def parameters(net: nn.Module) -> Arrays:
    return {name: p.detach().numpy().copy() for name, p in net.named_parameters()}


def assert_same(got: Arrays, expected: Arrays, tolerance: float = 1e-12) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert_allclose(got[name], value, rtol=tolerance, atol=tolerance, err_msg=name)


class Mute(ddp.autograd.Function):
    """The identity; without a gradient where `mute`."""

    @staticmethod
    def forward(ctx: Any, x: ddp.Tensor, mute: bool) -> ddp.Tensor:
        ctx.mute = mute
        return x * 1

    @staticmethod
    def backward(ctx: Any, g: ddp.Tensor) -> Any:
        return (None if ctx.mute else g), None
