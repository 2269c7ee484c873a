"""Every family against PyTorch: densities, entropies, moments, divergences, gradients of these, draws and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_less

import ddp
from ddp import errors

torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")

Array = Any
RNG = np.random.default_rng(0)


def numbers(*shape: int, low: float = -2.0, high: float = 2.0) -> Array:
    return RNG.uniform(low, high, shape)


def positive(*shape: int) -> Array:
    return numbers(*shape, low=0.3, high=3.0)


def two() -> list[Array]:
    return [positive(3), positive(3)]


def simplex(*shape: int) -> Array:
    x = positive(*shape)
    return x / x.sum(-1, keepdims=True)


def covariance(*shape: int) -> Array:
    root = numbers(*shape, shape[-1])
    return root @ root.swapaxes(-1, -2) + np.eye(shape[-1])


def lower(x: Any) -> Any:
    return x.tril() * 0.3 + 0.7 * (x * x).tril().triu() + 0.5 * (x * 0 + 1).tril().triu()


# A family: how it is made of parameters, by one of PyTorch's or of our modules; the parameters of two distributions,
# whose gradients are compared; a value.
Make = Callable[..., Any]
FAMILIES: dict[str, Any] = {
    "normal": (lambda d, *p: d.Normal(*p), [numbers(3), positive(2, 1)], [numbers(3), positive(3)], numbers(4, 2, 3)),
    "uniform": (
        lambda d, low, width: d.Uniform(low, low + width),
        [numbers(3, low=0.0), positive(3)],
        [numbers(3, high=-0.5), positive(3) + 6],
        np.array([2.0, 2.1, 2.2]),
    ),
    "gamma": (lambda d, *p: d.Gamma(*p), [positive(2, 3), positive(3)], two(), positive(4, 1, 3)),
    "beta": (
        lambda d, *p: d.Beta(*p),
        two(),
        two(),
        numbers(2, 3, low=0.1, high=0.9),
    ),
    "dirichlet": (lambda d, p: d.Dirichlet(p), [positive(2, 3) + 1], [positive(2, 3)], simplex(4, 2, 3)),
    "bernoulli of probs": (
        lambda d, p: d.Bernoulli(probs=p),
        [numbers(3, low=0.1, high=0.9)],
        [numbers(3, low=0.1, high=0.9)],
        np.array([0.0, 1.0, 1.0]),
    ),
    "bernoulli of logits": (
        lambda d, p: d.Bernoulli(logits=p),
        [numbers(2, 3)],
        [numbers(2, 3)],
        np.array([0.0, 1.0, 1.0]),
    ),
    "categorical of probs": (
        lambda d, p: d.Categorical(p),
        [positive(2, 4)],
        [positive(2, 4)],
        np.array([[3.0], [0.0]]),
    ),
    "categorical of logits": (
        lambda d, p: d.Categorical(logits=p),
        [numbers(2, 4)],
        [numbers(4)],
        np.array([3.0, 1.0]),
    ),
    "multivariate normal of a covariance": (
        lambda d, m, s: d.MultivariateNormal(m, (s + s.mT) / 2),
        [numbers(2, 3), covariance(3)],
        [numbers(3), covariance(2, 3)],
        numbers(4, 2, 3),
    ),
    "multivariate normal of a precision": (
        lambda d, m, s: d.MultivariateNormal(m, precision_matrix=(s + s.mT) / 2),
        [numbers(3), covariance(2, 3)],
        [numbers(3), covariance(3)],
        numbers(2, 3),
    ),
    "multivariate normal of a factor": (
        lambda d, m, s: d.MultivariateNormal(m, scale_tril=lower(s)),
        [numbers(3), numbers(3, 3)],
        [numbers(3), numbers(3, 3)],
        numbers(3),
    ),
    "independent": (
        lambda d, *p: d.Independent(d.Normal(*p), 1),
        [numbers(2, 3), positive(2, 3)],
        [numbers(2, 3), positive(2, 3)],
        numbers(4, 2, 3),
    ),
    "independent of none": (
        lambda d, *p: d.Independent(d.Gamma(*p), 0),
        two(),
        two(),
        positive(3),
    ),
}
TRIGAMMA = 1e-8  # PyTorch's derivative of digamma is no nearer


def both(arrays: list[Array], dtype: str = "float64") -> list[tuple[Any, Any]]:
    return [(t, [t.tensor(x, dtype=getattr(t, dtype), requires_grad=True) for x in arrays]) for t in (ddp, torch)]


def gradients(y: Any, xs: list[Any]) -> list[Any]:
    y.sum().backward()
    results = [np.zeros(x.shape) if x.grad is None else x.grad.numpy().copy() for x in xs]
    for x in xs:
        x.grad = None
    return results


def compare(
    make: Callable[[Any, list[Any]], Any], arrays: list[Array], rtol: float = 1e-12, dtype: str = "float64"
) -> None:
    """The value, and its gradients by all arrays."""
    (y, ours), (expected, theirs) = [(make(t, xs), gradients(make(t, xs), xs)) for t, xs in both(arrays, dtype)]
    assert y.shape == tuple(expected.shape)
    assert str(y.dtype) == str(expected.dtype).removeprefix("torch.")
    assert_allclose(y.detach().numpy(), expected.detach().numpy(), rtol if dtype != "float64" else 1e-12, rtol)
    for one, other in zip(ours, theirs, strict=True):
        assert_allclose(one, other, rtol, rtol)


@pytest.mark.parametrize("family", FAMILIES)
def test_densities(family: str) -> None:
    make, p, _, value = FAMILIES[family]
    values = [] if "categorical" in family else [value]

    def log_prob(t: Any, xs: list[Any]) -> Any:
        return make(t.distributions, *xs[: len(p)]).log_prob(xs[-1] if values else t.tensor(value))

    compare(log_prob, [*p, *values])
    compare(log_prob, [*p, *values], 3e-5, "float32")


@pytest.mark.parametrize("family", FAMILIES)
def test_entropies_and_divergences(family: str) -> None:
    make, p, q, _ = FAMILIES[family]
    rtol = TRIGAMMA if family in ("gamma", "beta", "dirichlet", "independent of none") else 1e-12
    compare(lambda t, xs: make(t.distributions, *xs).entropy(), p, rtol)

    def divergence(t: Any, xs: list[Any]) -> Any:
        one = make(t.distributions, *xs[: len(p)])
        other = make(t.distributions, *xs[len(p) :])
        return t.distributions.kl_divergence(one, other)

    compare(divergence, [*p, *q], rtol)


@pytest.mark.parametrize("family", FAMILIES)
def test_shapes_and_moments(family: str) -> None:
    make, p, _, _ = FAMILIES[family]
    (d, e) = [make(t.distributions, *xs) for t, xs in both(p)]
    assert (d.batch_shape, d.event_shape, d.has_rsample) == (tuple(e.batch_shape), tuple(e.event_shape), e.has_rsample)
    for name in ("mean", "mode", "variance", "stddev"):
        assert_allclose(getattr(d, name).detach().numpy(), getattr(e, name).detach().numpy(), 1e-12, 1e-12)
    if "multivariate" in family:
        for name in ("covariance_matrix", "precision_matrix", "scale_tril"):
            assert_allclose(getattr(d, name).detach().numpy(), getattr(e, name).detach().numpy(), 1e-11, 1e-12)
    for shape in ((), (5,), (2, 3)):
        drawn = d.sample(shape)
        assert drawn.shape == tuple(e.sample(shape).shape)
        assert not drawn.requires_grad


@pytest.mark.parametrize("family", FAMILIES)
def test_draws_have_the_moments(family: str) -> None:
    make, p, _, _ = FAMILIES[family]
    n = 40_000
    d = make(ddp.distributions, *[ddp.tensor(x) for x in p])
    ddp.manual_seed(1)
    x = d.sample((n,))
    if "categorical" in family:
        share = (x[..., None] == ddp.arange(4)).double().mean(0)
        assert_allclose(share.numpy(), d.probs.numpy(), atol=0.012)
        return
    assert_array_less(((x.mean(0) - d.mean).abs() / (d.stddev / n**0.5)).numpy(), 4.5)
    assert_allclose(x.var(0).numpy(), d.variance.numpy(), rtol=0.08)
    ddp.manual_seed(1)
    assert (d.sample((n,)) == x).all()


def test_one_distribution_of_leaves_serves_several_backwards() -> None:
    D = ddp.distributions
    loc = ddp.zeros(3, requires_grad=True)
    scale = ddp.ones(3, requires_grad=True)
    for d in (D.Normal(loc, scale), D.Uniform(loc, scale), D.MultivariateNormal(loc, scale_tril=ddp.eye(3))):
        value = d.sample()
        for make in (d.rsample, lambda d=d, value=value: d.log_prob(value)):
            for _ in range(2):
                loc.grad = None
                make().sum().backward()
                assert loc.grad is not None
                assert loc.grad.all()


@pytest.mark.parametrize("family", ["normal", "uniform", "multivariate normal of a covariance", "independent"])
def test_draws_have_gradients(family: str) -> None:
    make, p, _, _ = FAMILIES[family]

    def draw(*xs: Any) -> Any:
        ddp.manual_seed(3)
        return make(ddp.distributions, *xs).rsample((2,))

    assert ddp.autograd.gradcheck(draw, [ddp.tensor(x, requires_grad=True) for x in p])


@pytest.mark.parametrize("family", ["normal", "uniform", "gamma", "beta", "bernoulli of probs"])
def test_parameters_may_be_numbers(family: str) -> None:
    make = FAMILIES[family][0]
    two = (0.3,) if "bernoulli" in family else (0.3, 1.5)
    d = make(ddp.distributions, *two)
    assert d.sample((2,)).dtype == ddp.float32
    assert (d.batch_shape, d.event_shape) == ((), ())
    mixed = make(ddp.distributions, *[ddp.full((3,), two[0], dtype=ddp.float64), *two[1:]])
    assert mixed.sample().dtype == ddp.float64
    assert mixed.batch_shape == (3,)


def series(a: float, x: float) -> float:
    """dz/da at z = x, by the power series of the distribution function: another formula than the op's."""
    term = 1 / a
    out = 0.0
    for n in range(1000):
        out += term * (torch.digamma(torch.tensor(a + n + 1, dtype=torch.float64)).item() - np.log(x))
        term *= x / (a + n + 1)
    return x * out


@pytest.mark.parametrize("a", [0.02, 0.4, 1.0, 2.5, 30.0, 400.0])
def test_gradients_of_gamma_draws(a: float) -> None:
    shape = ddp.full((20,), a, dtype=ddp.float64, requires_grad=True)
    ddp.manual_seed(2)
    z = ddp.distributions.Gamma(shape, 1.0).rsample()
    z.sum().backward()
    assert_allclose(shape.grad.numpy(), [series(a, x) for x in z.tolist()], rtol=1e-10)
    drawn = torch.tensor(z.detach().numpy())
    theirs = torch._standard_gamma_grad(torch.full((20,), a, dtype=torch.float64), drawn)
    assert_allclose(shape.grad.numpy(), theirs.numpy(), rtol=2e-3)  # PyTorch's is an approximation


@pytest.mark.parametrize("family", ["gamma", "beta", "dirichlet"])
def test_the_mean_of_gradients_is_that_of_the_mean(family: str) -> None:
    make, p, _, _ = FAMILIES[family]
    xs = [ddp.tensor(x, requires_grad=True) for x in p]
    mean = make(ddp.distributions, *xs).mean
    weights = ddp.tensor(numbers(*mean.shape))
    expected = gradients((mean * weights).sum(), xs)
    ddp.manual_seed(4)
    actual = gradients((make(ddp.distributions, *xs).rsample((40_000,)).mean(0) * weights).sum(), xs)
    for one, other in zip(actual, expected, strict=True):
        assert_allclose(one, other, rtol=0.03, atol=0.15)


WRONG = {
    "a scale": lambda d, t: d.Normal(t.tensor([1.0, 1.0]), t.tensor([1.0, -1.0])),
    "a mean": lambda d, t: d.Normal(t.tensor(float("nan")), 1.0),
    "no width": lambda d, t: d.Uniform(1.0, 1.0),
    "a value": lambda d, t: d.Uniform(0.0, 1.0).log_prob(t.tensor(2.0)),
    "a half": lambda d, t: d.Bernoulli(0.5).log_prob(t.tensor(0.5)),
    "a probability": lambda d, t: d.Bernoulli(1.5),
    "both": lambda d, t: d.Bernoulli(0.5, 0.1),
    "neither": lambda d, t: d.Categorical(),
    "a category": lambda d, t: d.Categorical(t.ones(3)).log_prob(t.tensor(3)),
    "probabilities": lambda d, t: d.Categorical(t.tensor([1.0, -0.5])),
    "no categories": lambda d, t: d.Categorical(t.tensor(1.0)),
    "a rate": lambda d, t: d.Gamma(1.0, 0.0),
    "a point": lambda d, t: d.Dirichlet(t.ones(3)).log_prob(t.ones(3)),
    "a shape": lambda d, t: d.Beta(0.0, 1.0),
    "asymmetric": lambda d, t: d.MultivariateNormal(t.zeros(2), t.tensor([[1.0, 0.5], [0.0, 1.0]])),
    "not definite": lambda d, t: d.MultivariateNormal(t.zeros(2), t.tensor([[1.0, 2.0], [2.0, 1.0]])),
    "not lower": lambda d, t: d.MultivariateNormal(t.zeros(2), scale_tril=t.ones(2, 2)),
    "no matrix": lambda d, t: d.MultivariateNormal(t.zeros(2)),
    "an event": lambda d, t: d.MultivariateNormal(t.zeros(2), t.eye(2)).log_prob(t.zeros(1)),
    "a batch": lambda d, t: d.Normal(t.zeros(3), 1.0).log_prob(t.zeros(2)),
    "no tensor": lambda d, t: d.Normal(0.0, 1.0).log_prob(0.5),
    "dimensions": lambda d, t: d.Independent(d.Normal(t.zeros(3), 1.0), 2),
    "tanh": lambda d, t: d.TransformedDistribution(d.Normal(0.0, 1.0), [d.TanhTransform()]).log_prob(t.tensor(1.5)),
}


@pytest.mark.parametrize("case", WRONG)
def test_values_outside_their_constraints(case: str) -> None:
    for t, error in ((torch, ValueError), (ddp, ValueError)):
        with pytest.raises(error):
            WRONG[case](t.distributions, t)


def test_messages_and_switches() -> None:
    D = ddp.distributions
    with pytest.raises(errors.ArgumentError, match=r"Normal: scale of shape \(2,\): expected above 0"):
        D.Normal(0.0, ddp.tensor([1.0, 0.0]))
    assert D.Normal(0.0, -1.0, validate_args=False).mean.item() == 0
    D.Distribution.set_default_validate_args(False)
    try:
        assert D.Uniform(0.0, 1.0).log_prob(ddp.tensor(2.0)).item() == -float("inf")
    finally:
        D.Distribution.set_default_validate_args(True)
    for missing in (
        lambda: D.Categorical(ddp.ones(2)).rsample(),
        lambda: D.kl_divergence(D.Normal(0.0, 1.0), D.Uniform(0.0, 1.0)),
        lambda: D.TransformedDistribution(D.Normal(0.0, 1.0), D.TanhTransform()).entropy(),
        lambda: D.TransformedDistribution(D.Normal(0.0, 1.0), D.TanhTransform()).mean,
    ):
        with pytest.raises(NotImplementedError, match=r"has no|no formula"):
            missing()


EDGES: dict[str, Any] = {
    "masked entropy": lambda d, t: d.Categorical(logits=t.tensor([0.0, 1.0, -float("inf")])).entropy(),
    "certain": lambda d, t: d.Categorical(t.tensor([0.0, 1.0])).log_prob(t.tensor([0, 1])),
    "impossible": lambda d, t: d.kl_divergence(
        d.Categorical(t.tensor([0.5, 0.5])), d.Categorical(t.tensor([0.0, 1.0]))
    ),
    "impossible bit": lambda d, t: d.kl_divergence(
        d.Bernoulli(t.tensor([0.5, 0.0, 1.0])), d.Bernoulli(t.tensor([0.0, 0.0, 1.0]))
    ),
    "outside": lambda d, t: d.kl_divergence(d.Uniform(t.tensor([0.0, 1.0]), 2.0), d.Uniform(0.5, 3.0)),
    "at the edges": lambda d, t: d.Uniform(0.0, 1.0).log_prob(t.tensor([0.0, 1.0])),
    "bits": lambda d, t: d.Bernoulli(t.tensor([0.0, 0.5, 1.0])).mode,
    "entropy of bits": lambda d, t: d.Bernoulli(t.tensor([0.0, 0.5, 1.0])).entropy(),
    "beta at the edges": lambda d, t: d.Beta(t.tensor([1.0, 2.0]), t.tensor([1.0, 1.0])).log_prob(t.tensor([0.0, 1.0])),
}


@pytest.mark.parametrize("case", EDGES)
def test_edges(case: str) -> None:
    ours, theirs = [EDGES[case](t.distributions, t) for t in (ddp, torch)]
    assert_allclose(ours.numpy(), theirs.numpy(), rtol=2e-6, atol=1e-6)


def squashed(t: Any, xs: list[Any], cache_size: int) -> Any:
    d = t.distributions
    base = d.Independent(d.Normal(*xs), 1) if cache_size else d.Normal(*xs)
    affine = d.AffineTransform(0.5, t.tensor([2.0, -3.0, 1.0], dtype=xs[0].dtype))
    return d.TransformedDistribution(base, [d.TanhTransform(), affine, d.TanhTransform(cache_size)])


@pytest.mark.parametrize("cache_size", [0, 1])
def test_transforms(cache_size: int) -> None:
    p = [numbers(2, 3), positive(2, 3)]
    value = numbers(2, 3, low=0.1, high=0.8)
    compare(lambda t, xs: squashed(t, xs[:2], cache_size).log_prob(xs[2]), [*p, value])
    d, e = [squashed(t, xs, cache_size) for t, xs in both(p)]
    assert (d.batch_shape, d.event_shape, d.has_rsample) == (tuple(e.batch_shape), tuple(e.event_shape), True)
    assert d.rsample((4,)).shape == (4, 2, 3)
    whole = squashed(ddp, both(p)[0][1], 0).transforms
    with pytest.raises(errors.ShapeError, match="TransformedDistribution"):
        ddp.distributions.TransformedDistribution(ddp.distributions.Normal(0.0, 1.0), whole).sample()


def test_the_density_of_a_squashed_draw_is_that_of_where_it_came_from() -> None:
    D = ddp.distributions
    mean = ddp.tensor([0.0, 30.0], requires_grad=True)
    d = D.TransformedDistribution(D.Normal(mean, 1.0), [D.TanhTransform(cache_size=1)])
    y = d.rsample()
    assert y[1].item() == 1
    log_prob = d.log_prob(y)
    assert log_prob.isfinite().all()
    log_prob.sum().backward()
    assert mean.grad.isfinite().all()
