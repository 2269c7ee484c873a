"""Probability distributions, under PyTorch's names."""

from ddp import _aliases
from ddp.distributions import constraints, transforms
from ddp.distributions.distribution import Distribution, Independent, kl_divergence
from ddp.distributions.families import Bernoulli, Categorical, MultivariateNormal, Normal, Uniform
from ddp.distributions.transforms import AffineTransform, TanhTransform, TransformedDistribution

__all__ = ["AffineTransform", "Bernoulli", "Categorical", "Distribution", "Independent", "MultivariateNormal", "Normal"]
__all__ += ["TanhTransform", "TransformedDistribution", "Uniform", "constraints", "kl_divergence", "transforms"]

__getattr__ = _aliases.attribute(__name__)
