"""The families of distributions."""

from __future__ import annotations

import math
from typing import Any

from ddp._device import generator
from ddp._tensor.base import apply
from ddp._tensor.core import Tensor
from ddp._tensor.dtypes import finfo
from ddp._tensor.functions import broadcast_tensors, digamma, lgamma, stack, where, xlogy
from ddp._tensor.indexing import broadcast_shape
from ddp._tensor.sampling import bernoulli, multinomial, rand_like, randn_like
from ddp.distributions.constraints import (
    Constraint,
    boolean,
    independent,
    integer_interval,
    lower_cholesky,
    nonnegative,
    positive,
    positive_definite,
    real,
    real_vector,
    simplex,
    unit_interval,
)
from ddp.distributions.distribution import Distribution, Flag, Parameter, Sizes
from ddp.errors import ArgumentError, ShapeError
from ddp.nn.functional import binary_cross_entropy_with_logits
from ddp.ops import products, special


def _one_of(family: str, **parameters: Any) -> tuple[str, Any]:
    """The name and value of the one parameter that is not None. Raises: ArgumentError if none or several are given."""
    given = [(name, value) for name, value in parameters.items() if value is not None]
    if len(given) != 1:
        raise ArgumentError(f"{family}: expected one of {', '.join(parameters)}, got {len(given)}")
    return given[0]


def _normalized(x: Tensor) -> Tensor:
    return x / x.sum(-1, True)


def _clamped(probs: Tensor) -> Tensor:
    """Clamps probabilities so that their logarithms are finite."""
    eps = float(finfo(probs.dtype).eps)
    return probs.clamp(eps, 1 - eps)


def _standard_gamma(concentration: Tensor, shape: Sizes) -> Any:
    return apply(special.standard_gamma, (concentration.expand(shape),), generator=generator(concentration.device))


class Normal(Distribution):
    """The normal distribution. loc: its mean; scale: its standard deviation."""

    arg_constraints = {"loc": real, "scale": positive}
    support = real
    has_rsample = True
    mean = mode = property(lambda self: self.loc)

    def __init__(self, loc: Parameter, scale: Parameter, validate_args: Flag = None) -> None:
        self._set_parameters(validate_args, loc=loc, scale=scale)

    @property
    def variance(self) -> Tensor:
        return self.scale.square()

    def _rsample(self, shape: Sizes) -> Tensor:
        return self.loc + randn_like(self.loc.expand(shape)) * self.scale

    def _log_density(self, squared: Tensor) -> Tensor:
        return -(squared / self.variance + math.log(2 * math.pi)) / 2 - self.scale.log()

    def _log_prob(self, value: Tensor) -> Tensor:
        return self._log_density((value - self.loc).square())

    def _cross_entropy(self, other: Normal) -> Tensor:
        return -other._log_density(self.variance + (self.loc - other.loc).square())


class Uniform(Distribution):
    """The uniform distribution over [low, high). Rounding may make a draw equal to high, where the density is 0.

    Raises: ArgumentError unless low < high, if values are checked.
    """

    arg_constraints = {"low": real, "high": real}
    has_rsample = True
    _width = property(lambda self: self.high - self.low)

    def __init__(self, low: Parameter, high: Parameter, validate_args: Flag = None) -> None:
        self._set_parameters(validate_args, low=low, high=high)
        self._check("high - low", self._width, positive)

    @property
    def support(self) -> Constraint:
        return Constraint("from low to high", lambda x: (x >= self.low) & (x <= self.high))

    @property
    def mean(self) -> Tensor:
        return (self.low + self.high) / 2

    @property
    def mode(self) -> Tensor:
        return self.low * math.nan

    @property
    def variance(self) -> Tensor:
        return self._width.square() / 12

    def _rsample(self, shape: Sizes) -> Tensor:
        return self.low + rand_like(self.low.expand(shape)) * self._width

    def _log_prob(self, value: Tensor) -> Tensor:
        return where((value >= self.low) & (value < self.high), -self._width.log(), -math.inf)

    def _cross_entropy(self, other: Uniform) -> Tensor:
        return where((other.low > self.low) | (other.high < self.high), math.inf, other._width.log())


class Gamma(Distribution):
    """The gamma distribution. concentration: its shape parameter; rate: the inverse of its scale."""

    arg_constraints = {"concentration": positive, "rate": positive}
    support = nonnegative
    has_rsample = True

    def __init__(self, concentration: Parameter, rate: Parameter, validate_args: Flag = None) -> None:
        self._set_parameters(validate_args, concentration=concentration, rate=rate)

    @property
    def mean(self) -> Tensor:
        return self.concentration / self.rate

    @property
    def mode(self) -> Tensor:
        return ((self.concentration - 1) / self.rate).clamp(min=0)

    @property
    def variance(self) -> Tensor:
        return self.mean / self.rate

    def _rsample(self, shape: Sizes) -> Tensor:
        return _standard_gamma(self.concentration, shape) / self.rate

    def _log_density(self, logs: Tensor, value: Tensor) -> Tensor:
        a = self.concentration
        rate = self.rate
        return a * rate.log() + logs - rate * value - lgamma(a)

    def _log_prob(self, value: Tensor) -> Tensor:
        return self._log_density(xlogy(self.concentration - 1, value), value)

    def _cross_entropy(self, other: Gamma) -> Tensor:
        logs = digamma(self.concentration) - self.rate.log()
        return -other._log_density((other.concentration - 1) * logs, self.mean)


class Dirichlet(Distribution):
    """The Dirichlet distribution, which draws probabilities of K categories. concentration: (..., K).

    The mode is nan if no concentration is above 1.
    """

    arg_constraints = {"concentration": independent(positive, 1)}
    support = simplex
    has_rsample = True

    def __init__(self, concentration: Tensor, validate_args: Flag = None) -> None:
        if not concentration.ndim:
            raise ShapeError("Dirichlet: concentration has shape (), expected (..., K)")
        self.concentration = concentration
        super().__init__(concentration.shape[:-1], concentration.shape[-1:], validate_args)

    @property
    def mean(self) -> Tensor:
        return _normalized(self.concentration)

    @property
    def mode(self) -> Tensor:
        return _normalized((self.concentration - 1).clamp(min=0))

    @property
    def variance(self) -> Tensor:
        return self.mean * (1 - self.mean) / (self.concentration.sum(-1, True) + 1)

    def _rsample(self, shape: Sizes) -> Tensor:
        return _normalized(_standard_gamma(self.concentration, shape))

    def _log_density(self, logs: Tensor) -> Tensor:
        a = self.concentration
        return (logs - lgamma(a)).sum(-1) + lgamma(a.sum(-1))

    def _log_prob(self, value: Tensor) -> Tensor:
        return self._log_density(xlogy(self.concentration - 1, value))

    def _cross_entropy(self, other: Dirichlet) -> Tensor:
        a = self.concentration
        return -other._log_density((other.concentration - 1) * (digamma(a) - digamma(a.sum(-1, True))))


def _of_first(name: str) -> Any:
    return property(lambda self: getattr(self._dirichlet, name)[..., 0])


class Beta(Distribution):
    """The beta distribution. Its mean is concentration1 / (concentration1 + concentration0)."""

    arg_constraints = {"concentration1": positive, "concentration0": positive}
    support = unit_interval
    has_rsample = True
    mean, mode, variance = map(_of_first, ("mean", "mode", "variance"))
    _dirichlet = property(lambda self: Dirichlet(stack([self.concentration1, self.concentration0], -1), False))

    def __init__(self, concentration1: Parameter, concentration0: Parameter, validate_args: Flag = None) -> None:
        self._set_parameters(validate_args, concentration1=concentration1, concentration0=concentration0)

    def _rsample(self, shape: Sizes) -> Tensor:
        return self._dirichlet._rsample((*shape, 2))[..., 0]

    def _log_prob(self, value: Tensor) -> Tensor:
        return self._dirichlet.log_prob(stack([value, 1 - value], -1))

    def _cross_entropy(self, other: Beta) -> Tensor:
        return self._dirichlet._cross_entropy(other._dirichlet)


class MultivariateNormal(Distribution):
    """The normal distribution of vectors. loc: (..., n); and one matrix (..., n, n): covariance_matrix, its inverse
    precision_matrix, or its Cholesky factor scale_tril.

    Raises: ArgumentError unless exactly one matrix is given; ShapeError; numpy.linalg.LinAlgError, which is a
    ValueError, for a matrix that is not positive definite (on a GPU, results are nan instead).
    """

    arg_constraints = {
        "loc": real_vector,
        "covariance_matrix": positive_definite,
        "precision_matrix": positive_definite,
        "scale_tril": lower_cholesky,
    }
    support = real_vector
    has_rsample = True
    mean = mode = property(lambda self: self.loc)

    def __init__(
        self,
        loc: Tensor,
        covariance_matrix: Tensor | None = None,
        precision_matrix: Tensor | None = None,
        scale_tril: Tensor | None = None,
        validate_args: Flag = None,
    ) -> None:
        name, matrix = _one_of(
            "MultivariateNormal",
            covariance_matrix=covariance_matrix,
            precision_matrix=precision_matrix,
            scale_tril=scale_tril,
        )
        n = loc.shape[-1:]
        if not n or matrix.shape[-2:] != n + n:
            raise ShapeError(f"MultivariateNormal: {name} of shape {matrix.shape} for loc of shape {loc.shape}")
        self.loc = broadcast_tensors(loc, matrix[..., 0])[0]
        shape = self.loc.shape[:-1]
        super().__init__(shape, n, validate_args)
        self._check(name, matrix, self.arg_constraints[name])
        if name == "precision_matrix":
            matrix = apply(products.inverse, (matrix,))
        if name != "scale_tril":
            matrix = apply(products.cholesky, (matrix,))
        self._factor = matrix  # not expanded, so that it is inverted once
        self.scale_tril = matrix.expand(shape + n + n)

    @property
    def covariance_matrix(self) -> Tensor:
        return self.scale_tril @ self.scale_tril.mT

    @property
    def precision_matrix(self) -> Any:
        return apply(products.inverse, (self.covariance_matrix,))

    @property
    def variance(self) -> Tensor:
        return self.scale_tril.square().sum(-1)

    def _rsample(self, shape: Sizes) -> Tensor:
        return self.loc + (self._factor @ randn_like(self.loc.expand(shape))[..., None])[..., 0]

    def _log_density(self, difference: Tensor, factor: Tensor | None = None) -> Tensor:
        """The log density at loc + difference. difference: (..., n, 1)

        factor: if given, the result is the mean over normally distributed differences, with mean `difference` and a
        covariance with this Cholesky factor
        """
        inverse = apply(products.inverse, (self._factor,))
        squares = (inverse @ difference).square().sum((-2, -1))
        if factor is not None:
            squares = squares + (inverse @ factor).square().sum((-2, -1))
        logs = self._factor.diagonal(0, -2, -1).log() + math.log(2 * math.pi) / 2
        return -squares / 2 - logs.sum(-1)

    def _log_prob(self, value: Tensor) -> Tensor:
        return self._log_density((value - self.loc)[..., None])

    def _cross_entropy(self, other: MultivariateNormal) -> Tensor:
        return -other._log_density((self.loc - other.loc)[..., None], self._factor)


class Bernoulli(Distribution):
    """Draws 0 or 1, as a float. Give probs, the probability of 1, or logits, log(probs / (1 - probs)).

    Raises: ArgumentError unless exactly one is given.
    """

    arg_constraints = {"probs": unit_interval, "logits": real}
    support = boolean
    mean = property(lambda self: self.probs)

    def __init__(self, probs: Any = None, logits: Any = None, validate_args: Flag = None) -> None:
        name, given = _one_of("Bernoulli", probs=probs, logits=logits)
        self._set_parameters(validate_args, **{name: given})
        value = vars(self)[name]
        if name == "logits":
            self.probs = value.sigmoid()
        else:
            self.logits = _clamped(value).logit()

    @property
    def mode(self) -> Tensor:
        return where(self.probs == 0.5, math.nan, (self.probs > 0.5).to(self.probs.dtype))

    @property
    def variance(self) -> Tensor:
        return self.probs * (1 - self.probs)

    def sample(self, sample_shape: Sizes = ()) -> Tensor:
        return bernoulli(self.probs.expand(self._extended_shape(sample_shape)))

    def _log_prob(self, value: Tensor) -> Tensor:
        logits, target = broadcast_tensors(self.logits, value)
        return -binary_cross_entropy_with_logits(logits, target, reduction="none")

    def _cross_entropy(self, other: Bernoulli) -> Tensor:
        impossible = ((other.probs == 0) & (self.probs > 0)) | ((other.probs == 1) & (self.probs < 1))
        return where(impossible, math.inf, -other._log_prob(self.probs))


class Categorical(Distribution):
    """Draws one of K categories, as an int64. Give probs, (..., K), or logits, their logarithms.

    Probabilities need not sum to 1: they are divided by their sum.

    Raises: ArgumentError unless exactly one is given; ShapeError for a 0-d tensor.
    """

    arg_constraints = {"probs": simplex, "logits": real_vector}

    def __init__(self, probs: Any = None, logits: Any = None, validate_args: Flag = None) -> None:
        name, given = _one_of("Categorical", probs=probs, logits=logits)
        if not given.ndim:
            raise ShapeError(f"Categorical: {name} has shape (), expected (..., K)")
        value = vars(self)[name] = _normalized(given) if name == "probs" else given - given.logsumexp(-1, True)
        super().__init__(given.shape[:-1], (), validate_args)
        if name == "logits":
            self.probs = value.exp()
        else:
            self.logits = _clamped(value).log()

    @property
    def support(self) -> Constraint:
        return integer_interval(0, self.probs.shape[-1] - 1)

    @property
    def mean(self) -> Tensor:
        return self.probs[..., 0] * math.nan

    variance = mean

    @property
    def mode(self) -> Tensor:
        return self.probs.argmax(-1)

    def sample(self, sample_shape: Sizes = ()) -> Tensor:
        drawn = multinomial(self.probs.reshape(-1, self.probs.shape[-1]), math.prod(sample_shape), True)
        return drawn.T.reshape(self._extended_shape(sample_shape))

    def _log_prob(self, value: Tensor) -> Tensor:
        shape = broadcast_shape("log_prob", value.shape, self.batch_shape)
        index = value.long().expand(shape)[..., None]
        return self.logits.expand(*shape, self.logits.shape[-1]).gather(-1, index)[..., 0]

    def _cross_entropy(self, other: Categorical) -> Tensor:
        logits = other.logits.clamp(min=float(finfo(other.logits.dtype).min))
        impossible = (other.probs == 0) & (self.probs > 0)
        return where(impossible, math.inf, -self.probs * logits).sum(-1)
