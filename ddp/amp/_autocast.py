"""`autocast`: before an op runs, its floating inputs are cast to the dtype that suits the op."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import numpy as np

from ddp._engine import Leaf, Node, ReusableNode, Version, lanes, modes
from ddp._tensor.arithmetic import convert
from ddp._tensor.base import TensorBase
from ddp._tensor.dtypes import bfloat16, float16, float32, is_float, parse
from ddp.amp._lists import KEPT, LOW, SINGLE
from ddp.errors import ArgumentError, DtypeError

Fn = TypeVar("Fn", bound=Callable[..., Any])
_DEFAULT = {"cuda": float16, "cpu": bfloat16}


class autocast:
    """Inside, products compute in `dtype` and what needs range or precision in float32: `with autocast("cpu"): ...`.

    device_type: "cuda" or "cpu", whose tensors are meant; dtype: float16 (the default on CUDA) or bfloat16 (on the
    CPU, where it computes in float32 and rounds); enabled: False turns autocast off inside; cache_enabled: a parameter
    that is used several times is cast once.

    Wrap forward and loss in it, not backward: gradients come in the dtype that each op ran in. A context manager and a
    decorator, per thread. Source: Micikevicius et al. 2018, arXiv:1710.03740.

    Raises: ArgumentError for another device; DtypeError for another dtype.
    """

    def __init__(
        self, device_type: str = "cuda", dtype: Any = None, enabled: bool = True, cache_enabled: bool | None = None
    ) -> None:
        if device_type not in _DEFAULT:
            raise ArgumentError(f"autocast: the device type is 'cuda' or 'cpu', not {device_type!r}")
        self.device = device_type
        self.dtype = _DEFAULT[device_type] if dtype is None else parse(dtype)
        if self.dtype not in (float16, bfloat16):
            raise DtypeError(f"autocast: computes in float16 or bfloat16, not {self.dtype}")
        self.enabled = enabled
        self.cache_enabled = cache_enabled is not False
        self._before: list[Any] = []

    def __enter__(self) -> autocast:
        state = modes.state
        self._before.append(state.autocast)
        others = dict(state.autocast.rules) if isinstance(state.autocast, _Casting) else {}
        others.pop(self.device, None)
        if self.enabled:
            others[self.device] = self.dtype
        state.autocast = _Casting(others, self.cache_enabled) if others else None
        return self

    def __exit__(self, *exc: object) -> None:
        modes.state.autocast = self._before.pop()

    def __call__(self, function: Fn) -> Fn:
        @functools.wraps(function)
        def inner(*args: Any, **kwargs: Any) -> Any:
            with autocast(self.device, self.dtype, self.enabled, self.cache_enabled):
                return function(*args, **kwargs)

        return cast(Fn, inner)


def is_autocast_enabled(device_type: str = "cuda") -> bool:
    """Whether ops on this type of device are cast in this thread."""
    return isinstance(modes.state.autocast, _Casting) and device_type in modes.state.autocast.rules


class _Casting:
    """What `apply` asks for the inputs of an op. rules: the 16-bit dtype for each device type."""

    def __init__(self, rules: dict[str, np.dtype[Any]], caches: bool) -> None:
        self.rules = rules
        self.caches = caches
        # A leaf's end: its version, the count of that, and the leaf in 16 bits.
        self.cache: dict[Any, tuple[Version, int, TensorBase]] = {}

    def __call__(self, op: Any, inputs: Sequence[Any]) -> Sequence[Any]:
        first = next(x for x in inputs if isinstance(x, TensorBase))
        low = self.rules.get(first.device.type)
        if low is None:
            return inputs
        if op.name in LOW[first.device.type]:
            return [self._lowered(x, low) if isinstance(x, TensorBase) else x for x in inputs]
        if op.name in SINGLE[first.device.type]:
            if self.spares(op, first):
                return inputs
            return [_raised(x) if isinstance(x, TensorBase) else x for x in inputs]
        return inputs

    def spares(self, op: Any, x: TensorBase) -> bool:
        """Whether the op takes x in 16 bits where PyTorch makes float32 of it, and gives what that would give.

        Its kernel computes in float32; a copy of the logits of a large vocabulary would take longer than the loss.
        """
        where = x.device.type
        return where == "cuda" and where in self.rules and op.name in KEPT and x.array.dtype in (float16, bfloat16)

    def _lowered(self, x: TensorBase, low: np.dtype[Any]) -> TensorBase:
        if x.array.dtype == low or x.array.dtype not in (float32, float16, bfloat16):
            return x  # float64 and integers are left alone
        end = x.edge
        if not (self.caches and isinstance(end, Leaf) and modes.state.enabled):
            return convert(x, low)
        found = self.cache.get(end)
        if found is None or found[0] is not x.version or found[1] != x.version.count:
            found = self.cache[end] = (x.version, x.version.count, _shared(x, low))
        return found[2]


def _shared(x: TensorBase, low: np.dtype[Any]) -> TensorBase:
    """`x` in 16 bits, for all graphs that will ask for it."""
    state = modes.state
    # Of no checkpointed region: another run of it finds this one made. But of the stream that it is made on.
    before, state.observers = state.observers, tuple([each for each in state.observers if each is lanes.stamp])
    try:
        result = convert(x, low)
    finally:
        state.observers = before
    assert type(result.edge) is Node
    result.edge.__class__ = ReusableNode
    return result


def _raised(x: TensorBase) -> TensorBase:
    dtype = x.array.dtype
    return convert(x, float32) if is_float(dtype) and dtype in (float16, bfloat16) else x
