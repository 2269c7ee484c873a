"""`autocast`: casts the inputs of some ops before they run, to 16 bits for speed or to float32 for precision."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import numpy as np

from ddp._engine import Leaf, Node, ReusableNode, Version, modes, stream_sync
from ddp._tensor.base import TensorBase
from ddp._tensor.dtypes import bfloat16, float16, float32, parse
from ddp._tensor.operands import convert
from ddp.errors import ArgumentError, DtypeError
from ddp.ops.arrays import compute_dtype

Fn = TypeVar("Fn", bound=Callable[..., Any])
_DEFAULT = {"cuda": float16, "cpu": bfloat16}


def _ops(names: str) -> frozenset[str]:
    return frozenset(names.split())


# Which ops compute in 16 bits under autocast, and which in float32: PyTorch's lists, with the names of our ops. Other
# ops compute in the dtype of their inputs, or in the dtype that the inputs are promoted to. As in PyTorch, the lists
# differ between devices.
# Source: PyTorch 2.13, documentation of `torch.amp`, "Autocast Op Reference".
_PRODUCTS = _ops("""
    conv2d conv_transpose2d einsum feed_forward gru linear linear_act lstm matmul prelu rnn
    scaled_dot_product_attention
""")
_LOSSES = _ops("""
    binary_cross_entropy cross_entropy huber_loss kl_div l1_loss mse_loss nll_loss smooth_l1_loss
    soft_cross_entropy
""")
_PRECISE = _ops("""
    acos asin cosh cumprod cumsum erfinv exp expm1 group_norm layer_norm log log10 log1p log2 log_softmax
    logsumexp pow prod reciprocal rms_norm rsqrt sinh softmax softplus sum tan vector_norm
""")
LOW_PRECISION_OPS = {"cuda": _PRODUCTS, "cpu": _PRODUCTS}
FLOAT32_OPS = {"cuda": _LOSSES | _PRECISE, "cpu": _LOSSES | {"prod"}}
#: On GPUs: ops with a kernel that reads 16 bits, computes in float32 and can return float32.
_READS_16_BITS = frozenset({"cross_entropy"})


class autocast:
    """`with autocast("cpu"): ...` computes matrix products in `dtype`, and ops that need range or precision in float32.

    device_type: "cuda" or "cpu": ops on tensors of this type of device are affected
    dtype: float16 (the default on CUDA) or bfloat16 (the default on the CPU, which computes in float32 and rounds)
    enabled: False turns autocast off inside
    cache_enabled: a parameter that is used several times is cast once

    Run the forward and the loss inside, but not backward, which computes each gradient in the dtype of its op. An
    autocast is also a decorator. It affects this thread alone. Source: Micikevicius et al. 2018, arXiv:1710.03740.

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
        current: Any = state.autocast
        self._before.append(current)
        rules = dict(getattr(current, "rules", {}))
        rules.pop(self.device, None)
        if self.enabled:
            rules[self.device] = self.dtype
        check = getattr(current, "check", None)
        state.autocast = _CastRules(rules, self.cache_enabled, check) if rules or check else None
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
    return isinstance(modes.state.autocast, _CastRules) and device_type in modes.state.autocast.rules


class _CastRules:
    """Casts the inputs of ops that `apply` runs, by `LOW_PRECISION_OPS` and `FLOAT32_OPS`.

    rules: the 16-bit dtype by device type; check: called with each op and its inputs, while a CUDA graph is captured
    """

    def __init__(self, rules: dict[str, np.dtype[Any]], caches: bool, check: Any = None) -> None:
        self.rules = rules
        self.caches = caches
        self.check = check
        # By leaf of the graph: the version of its tensor, `version.count` at the cast, and the tensor in 16 bits.
        self.cache: dict[Any, tuple[Version, int, TensorBase]] = {}

    def __call__(self, op: Any, inputs: Sequence[Any]) -> Sequence[Any]:
        if self.check is not None:
            self.check(op, inputs)
        first = next(x for x in inputs if isinstance(x, TensorBase))
        low = self.rules.get(first.device.type)
        if low is None:
            return inputs
        if op.name in LOW_PRECISION_OPS[first.device.type]:
            return [self._to_low(x, low) if isinstance(x, TensorBase) else x for x in inputs]
        if op.name in FLOAT32_OPS[first.device.type]:
            if self.spares(op, first):
                return inputs
            return [convert(x, compute_dtype(x.array.dtype)) if isinstance(x, TensorBase) else x for x in inputs]
        return inputs

    def spares(self, op: Any, x: TensorBase) -> bool:
        """Whether x stays in 16 bits although PyTorch casts it to float32.

        The op's kernel computes in float32 anyway, with the same result. To cast the logits of a large vocabulary would
        take longer than the loss itself.
        """
        device_type = x.device.type
        return (
            device_type == "cuda"
            and device_type in self.rules
            and op.name in _READS_16_BITS
            and x.array.dtype in (float16, bfloat16)
        )

    def _to_low(self, x: TensorBase, low: np.dtype[Any]) -> TensorBase:
        if x.array.dtype == low or x.array.dtype not in (float32, float16, bfloat16):
            return x  # float64 and integers are left alone
        end = x.edge
        if not (self.caches and isinstance(end, Leaf) and modes.state.enabled):
            return convert(x, low)
        cached = self.cache.get(end)
        if cached is None or cached[0] is not x.version or cached[1] != x.version.count:
            cached = self.cache[end] = (x.version, x.version.count, _cast_leaf(x, low))
        return cached[2]


def _cast_leaf(x: TensorBase, low: np.dtype[Any]) -> TensorBase:
    """Casts a leaf to 16 bits. All later graphs can share the graph node of the result."""
    state = modes.state
    # Only stream tracking observes this node. A checkpointed region must not count it: in the region's second run, the
    # cast is in the cache, and no node is made.
    before = state.observers
    state.observers = tuple([observer for observer in state.observers if observer is stream_sync.note_stream])
    try:
        result = convert(x, low)
    finally:
        state.observers = before
    assert type(result.edge) is Node
    result.edge.__class__ = ReusableNode
    return result
