"""Constraints: which values a parameter may have, and which a distribution can draw."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ddp._tensor.core import Tensor

__all__ = ["Constraint", "boolean", "independent", "integer_interval", "interval", "lower_cholesky", "nonnegative"]
__all__ += ["positive", "positive_definite", "real", "real_vector", "simplex", "unit_interval"]


class Constraint(NamedTuple):
    """A set of values, for instance the numbers above 0.

    description: the set in words, for errors; event_dim: how many of a tensor's last dimensions make one value
    check: takes a tensor (..., *value), and returns whether each value is in the set, (...) of bool
    """

    description: str
    check: Callable[[Tensor], Tensor]
    event_dim: int = 0


def interval(lower_bound: float, upper_bound: float) -> Constraint:
    """Numbers from lower_bound to upper_bound, both included."""
    return Constraint(f"from {lower_bound} to {upper_bound}", lambda x: (x >= lower_bound) & (x <= upper_bound))


def integer_interval(lower_bound: int, upper_bound: int) -> Constraint:
    """Integers, of any dtype, from lower_bound to upper_bound, both included."""
    bounds = interval(lower_bound, upper_bound)
    return Constraint(f"an integer {bounds.description}", lambda x: bounds.check(x) & (x % 1 == 0))


def independent(base_constraint: Constraint, reinterpreted_batch_ndims: int) -> Constraint:
    """Constrains arrays of values: each value must satisfy `base_constraint`.

    reinterpreted_batch_ndims: number of dimensions of such an array
    """
    description, check, event_dim = base_constraint
    dims = tuple(range(-reinterpreted_batch_ndims, 0))
    return Constraint(description, lambda x: check(x).all(dims), event_dim + len(dims))


real = Constraint("a number", lambda x: x == x)
real_vector = independent(real, 1)
positive = Constraint("above 0", lambda x: x > 0)
nonnegative = Constraint("at least 0", lambda x: x >= 0)
unit_interval = interval(0, 1)
boolean = integer_interval(0, 1)
simplex = Constraint("at least 0, with a sum of 1", lambda x: (x >= 0).all(-1) & ((x.sum(-1) - 1).abs() < 1e-6), 1)
lower_cholesky = Constraint(
    "lower triangular, with a positive diagonal",
    lambda x: (x == x.tril()).all((-2, -1)) & (x.diagonal(0, -2, -1) > 0).all(-1),
    2,
)
# Only symmetry is checked here. A matrix that is not positive definite is noticed when its Cholesky factor is computed.
positive_definite = Constraint("symmetric", lambda x: x.isclose(x.mT, atol=1e-6).all((-2, -1)), 2)
