"""The base of all distributions: shapes, checks, draws, entropies and divergences.

A family has one formula of the cross entropy H(p, q), the mean of -log q over draws of p: the entropy of p is H(p, p),
and the divergence of q from p is H(p, q) - H(p, p).
"""

from __future__ import annotations

from typing import Any

from ddp._engine import no_grad
from ddp._tensor.core import Tensor
from ddp._tensor.creation import zeros
from ddp._tensor.functions import broadcast_tensors
from ddp._tensor.operands import operand_as_tensor
from ddp._tensor.results import Size
from ddp.distributions.constraints import Constraint, independent
from ddp.errors import ArgumentError, ShapeError
from ddp.ops.indexing import check_all

Parameter = Tensor | float
Sizes = tuple[int, ...]
Flag = bool | None
_OPTIONAL = ("_rsample", "_log_prob", "_cross_entropy", "mean", "mode", "variance")


class Distribution:
    """A batch of distributions: draws are of shape batch_shape + event_shape.

    Parameters are tensors or numbers that broadcast. arg_constraints: the constraint of each parameter; support: the
    constraint of draws. validate_args: whether parameters and the values of `log_prob` are checked; None: as set by
    `set_default_validate_args`, by default True unless Python runs with -O. `mean`, `mode`, `variance` and `stddev`
    are of shape batch_shape + event_shape.

    Raises: ArgumentError, which is a ValueError, for a value outside its constraint, if values are checked (on a GPU,
    in the next call that waits for the GPU); ShapeError for shapes that do not broadcast; NotImplementedError for a
    method or property that a distribution lacks.
    """

    arg_constraints: dict[str, Constraint] = {}
    support: Any = None
    has_rsample: Any = False
    _validate_args = __debug__

    @staticmethod
    def set_default_validate_args(value: bool) -> None:
        """Sets whether new and existing distributions with `validate_args=None` check their values."""
        Distribution._validate_args = value

    def __init__(self, batch_shape: Sizes = (), event_shape: Sizes = (), validate_args: Flag = None) -> None:
        self.batch_shape = Size(batch_shape)
        self.event_shape = Size(event_shape)
        if validate_args is not None:
            self._validate_args = validate_args
        for name, constraint in self.arg_constraints.items():
            if name in vars(self):
                self._check(name, vars(self)[name], constraint)

    def _set_parameters(self, validate_args: Flag, **parameters: Any) -> None:
        """Initializes a distribution with () as event_shape, and broadcasts its parameters.

        Parameters that are numbers take dtype and device of the first tensor.
        """
        like = next((x for x in parameters.values() if isinstance(x, Tensor)), zeros(()))
        tensors = [operand_as_tensor(x, like) for x in parameters.values()]
        for name, value in zip(parameters, broadcast_tensors(*tensors), strict=True):
            vars(self)[name] = value
        Distribution.__init__(self, value.shape, (), validate_args)

    def __getattr__(self, name: str) -> Any:
        error = NotImplementedError if name in _OPTIONAL else AttributeError
        raise error(f"{type(self).__name__} has no {name.strip('_')}")

    def _check(self, name: str, value: Tensor, constraint: Constraint) -> None:
        if self._validate_args:
            message = f"{type(self).__name__}: {name} of shape {value.shape}: expected {constraint.description}"
            check_all(value.device.xp, constraint.check(value).array, ArgumentError, message)

    def _validate_sample(self, value: Tensor) -> None:
        shape = getattr(value, "shape", value)
        if not isinstance(value, Tensor) or shape[value.ndim - len(self.event_shape) :] != self.event_shape:
            raise ShapeError(f"log_prob: expected a tensor of shape (..., *{self.event_shape}), got {shape}")
        self._check("value", value, self.support)

    def _extended_shape(self, sample_shape: Sizes = ()) -> Size:
        return Size(sample_shape) + self.batch_shape + self.event_shape

    def rsample(self, sample_shape: Sizes = ()) -> Any:
        """Draws like `sample`, but backward reaches the parameters. Raises: NotImplementedError unless has_rsample."""
        return self._rsample(self._extended_shape(sample_shape))

    @property
    def stddev(self) -> Tensor:
        """The square root of the variance."""
        return self.variance.sqrt()

    def sample(self, sample_shape: Sizes = ()) -> Tensor:
        """Returns draws of shape sample_shape + batch_shape + event_shape, outside the graph."""
        with no_grad():
            return self.rsample(sample_shape)

    def log_prob(self, value: Tensor) -> Tensor:
        """The logarithm of the density, or of the probability, of `value`, (..., *event_shape); returns (...).

        Raises, if `validate_args` is on: ShapeError for another event shape; ArgumentError for a value outside the
        support.
        """
        if self._validate_args:
            self._validate_sample(value)
        return self._log_prob(value)

    def entropy(self) -> Tensor:
        """The entropy in nats, a tensor of batch_shape."""
        return self._cross_entropy(self)


def sum_last(x: Tensor, dims: int) -> Tensor:
    """Sums over the last `dims` dimensions."""
    return x.sum(tuple(range(-dims, 0))) if dims else x


def kl_divergence(p: Any, q: Any) -> Tensor:
    """The Kullback-Leibler divergence of q from p in nats, a tensor of their batch shape.

    Raises: NotImplementedError if p and q differ in family or event shape, or if there is no formula.
    """
    if not isinstance(q, type(p)) or p.event_shape != q.event_shape:
        raise NotImplementedError(f"kl_divergence: no formula for {type(p).__name__} and {type(q).__name__}")
    return p._cross_entropy(q) - p.entropy()


def of_base(name: str) -> Any:
    """A property that returns the attribute `name` of `base_dist`."""
    return property(lambda self: getattr(self.base_dist, name))


class Independent(Distribution):
    """Turns the last `reinterpreted_batch_ndims` batch dimensions of a distribution into event dimensions.

    log_prob and entropy are summed over these dimensions.

    Raises: ArgumentError if the batch has fewer dimensions.
    """

    has_rsample, mean, mode, variance = map(of_base, ("has_rsample", "mean", "mode", "variance"))
    sample, rsample = map(of_base, ("sample", "rsample"))

    def __init__(self, base_distribution: Any, reinterpreted_batch_ndims: int, validate_args: Flag = None) -> None:
        shape = base_distribution.batch_shape
        split = len(shape) - reinterpreted_batch_ndims
        if split < 0:
            raise ArgumentError(f"Independent: {reinterpreted_batch_ndims} dimensions of a batch of shape {shape}")
        self.base_dist = base_distribution
        self.reinterpreted_batch_ndims = reinterpreted_batch_ndims
        super().__init__(shape[:split], shape[split:] + base_distribution.event_shape, validate_args)

    @property
    def support(self) -> Constraint:
        return independent(self.base_dist.support, self.reinterpreted_batch_ndims)

    def _log_prob(self, value: Tensor) -> Tensor:
        return sum_last(self.base_dist.log_prob(value), self.reinterpreted_batch_ndims)

    def _cross_entropy(self, other: Independent) -> Tensor:
        return sum_last(self.base_dist._cross_entropy(other.base_dist), self.reinterpreted_batch_ndims)
