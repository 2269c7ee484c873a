"""Invertible functions of draws, and distributions of the values of such functions."""

from __future__ import annotations

import math
from typing import Any

from ddp._engine import no_grad
from ddp._tensor.core import Tensor
from ddp.distributions.constraints import Constraint, independent, interval, real
from ddp.distributions.distribution import Distribution, Flag, Parameter, Sizes, of_base, sum_last
from ddp.errors import ShapeError
from ddp.nn.functional import softplus

__all__ = ["AffineTransform", "TanhTransform", "Transform"]


class Transform:
    """An invertible function of each element. A subclass has _call(x), _inverse(y) and log_abs_det_jacobian(x, y).

    cache_size: 1: keeps the last x and y = f(x), so that inv(y) returns x itself; 0: keeps nothing.
    codomain: the constraint of the function's values.
    """

    codomain: Any = real
    _call: Any
    _inverse: Any

    def __init__(self, cache_size: int = 0) -> None:
        self._cache_size = cache_size
        self._last: tuple[Any, Any] = (None, None)

    def __call__(self, x: Tensor) -> Any:
        """y = f(x)."""
        y = self._call(x)
        if self._cache_size:
            self._last = (x, y)
        return y

    def inv(self, y: Tensor) -> Any:
        """The x for which f(x) is y."""
        x, last = self._last
        return x if y is last else self._inverse(y)


class AffineTransform(Transform):
    """y = loc + scale * x. loc, scale: tensors or numbers."""

    def __init__(self, loc: Parameter, scale: Parameter, cache_size: int = 0) -> None:
        self.loc = loc
        self.scale = scale
        super().__init__(cache_size)

    def _call(self, x: Tensor) -> Tensor:
        return self.loc + self.scale * x

    def _inverse(self, y: Tensor) -> Tensor:
        return (y - self.loc) / self.scale

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        """log |scale|, of the shape of x."""
        return (x * 0 + self.scale).abs().log()


class TanhTransform(Transform):
    """y = tanh x. With cache_size=1, log_prob of the last draw is exact even if the draw is rounded to 1."""

    codomain = interval(-1, 1)

    def _call(self, x: Tensor) -> Tensor:
        return x.tanh()

    def _inverse(self, y: Tensor) -> Tensor:
        return y.atanh()

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        """log(1 - y**2). The result is accurate even if y is near 1 or -1."""
        return 2 * (math.log(2) - x - softplus(-2 * x))


class TransformedDistribution(Distribution):
    """The distribution of draws of `base_distribution` after `transforms`: one Transform, or several in order.

    The shapes are those of the base distribution. Raises: ShapeError if a transform changes the shape of draws.
    """

    has_rsample = of_base("has_rsample")

    def __init__(self, base_distribution: Any, transforms: Any, validate_args: Flag = None) -> None:
        self.base_dist = base_distribution
        self.transforms = [transforms] if isinstance(transforms, Transform) else list(transforms)
        super().__init__(base_distribution.batch_shape, base_distribution.event_shape, validate_args)

    @property
    def support(self) -> Constraint:
        last = self.transforms[-1].codomain if self.transforms else real
        return independent(last, len(self.event_shape))

    def _transform(self, x: Any) -> Any:
        y = x
        for transform in self.transforms:
            y = transform(y)
        if y.shape != x.shape:
            raise ShapeError(f"TransformedDistribution: transforms made shape {y.shape} of draws of shape {x.shape}")
        return y

    def rsample(self, sample_shape: Sizes = ()) -> Any:
        return self._transform(self.base_dist.rsample(sample_shape))

    def sample(self, sample_shape: Sizes = ()) -> Any:
        with no_grad():
            return self._transform(self.base_dist.sample(sample_shape))

    def _log_prob(self, value: Tensor) -> Any:
        y = value
        corrections: Any = 0
        for transform in reversed(self.transforms):
            x = transform.inv(y)
            corrections = corrections + sum_last(transform.log_abs_det_jacobian(x, y), len(self.event_shape))
            y = x
        return self.base_dist.log_prob(y) - corrections
