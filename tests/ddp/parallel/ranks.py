"""What tests of DataParallel share: ranks that are threads, and what a model holds as arrays."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.testing import assert_allclose

import collectives
import ddp
from collectives import Communicator
from ddp import nn

Arrays = dict[str, np.ndarray[Any, Any]]
Tensors = dict[str, ddp.Tensor]


def on_ranks(fn: Callable[[Communicator], Any], size: int = 2, timeout: float = 20) -> list[Any]:
    return collectives.run_threads(fn, size, timeout=timeout)


def on_each_of(size: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a test of `test(comm, ...)`, which each of so many ranks runs."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            on_ranks(lambda comm: test(comm, **fixtures), size)

        names = inspect.signature(test)
        run.__signature__ = names.replace(parameters=[*names.parameters.values()][1:])  # type: ignore[attr-defined]
        return run

    return decorate


def make_net(*middle: nn.Module, seed: int = 0) -> nn.Sequential:
    """3 features, 2 results, in float64."""
    ddp.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), *middle, nn.Tanh(), nn.Linear(4, 2)).double()


def gradients(net: nn.Module) -> Arrays:
    return {name: p.grad.detach().numpy().copy() for name, p in net.named_parameters() if p.grad is not None}


def parameters(net: nn.Module) -> Arrays:
    return {name: p.detach().numpy().copy() for name, p in net.named_parameters()}


def assert_same(got: Any, expected: Any, tolerance: float = 1e-12, name: str = "") -> None:
    """Compares tensors, arrays and numbers, alone or in dicts, lists and tuples.

    tolerance: relative and absolute; of bfloat16 a thousand times as much
    """
    if isinstance(expected, dict):
        assert got.keys() == expected.keys(), name
        for key in expected:
            assert_same(got[key], expected[key], tolerance, f"{name} {key}")
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected), name
        for number, pair in enumerate(zip(got, expected, strict=True)):
            assert_same(*pair, tolerance, f"{name} {number}")
    elif isinstance(expected, ddp.Tensor):
        assert (got.dtype, got.device) == (expected.dtype, expected.device), name
        factor = 1000 if expected.dtype == ddp.bfloat16 else 1
        assert_same(got.detach().double().numpy(), expected.detach().double().numpy(), factor * tolerance, name)
    elif isinstance(expected, np.ndarray | float):
        assert tolerance > 0 or type(got) is type(expected), name
        assert np.shape(got) == np.shape(expected), name
        assert_allclose(got, expected, rtol=tolerance, atol=tolerance, err_msg=name)
    else:
        assert got == expected, name


class Mute(ddp.autograd.Function):
    """The identity; without a gradient where `mute`."""

    @staticmethod
    def forward(ctx: Any, x: ddp.Tensor, mute: bool) -> ddp.Tensor:
        ctx.mute = mute
        return x * 1

    @staticmethod
    def backward(ctx: Any, g: ddp.Tensor) -> Any:
        return (None if ctx.mute else g), None
