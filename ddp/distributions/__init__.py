"""Probability distributions, under PyTorch's names."""

from ddp import _aliases
from ddp.distributions import constraints, transforms
from ddp.distributions.distribution import Distribution, Independent, kl_divergence
from ddp.distributions.families import (
    Bernoulli,
    Beta,
    Categorical,
    Dirichlet,
    Gamma,
    MultivariateNormal,
    Normal,
    Uniform,
)
from ddp.distributions.transforms import AffineTransform, TanhTransform, TransformedDistribution

__all__ = ["AffineTransform", "Bernoulli", "Beta", "Categorical", "Dirichlet", "Distribution", "Gamma", "Independent"]
__all__ += ["MultivariateNormal", "Normal", "TanhTransform", "TransformedDistribution", "Uniform", "constraints"]
__all__ += ["kl_divergence", "transforms"]

__getattr__ = _aliases.attribute(__name__)
