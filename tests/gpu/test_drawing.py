"""Random numbers on several streams: a generator's state is one piece of device memory, which draws read and write."""

from __future__ import annotations

from typing import Any

import pytest
from numpy.testing import assert_allclose

import ddp
from ddp.errors import ArgumentError
from tests.gpu import on_both, simulated

in_any_order = pytest.mark.parametrize("gpu", simulated(12), indirect=True)
SIZE = 64


def draw(generator: Any = None) -> Any:
    return ddp.rand(SIZE, device="cuda", generator=generator)


def expected(count: int, seed: int = 3) -> list[Any]:
    """What one stream gives."""
    source = ddp.Generator("cuda").manual_seed(seed)
    actual = []
    for _ in range(count):
        actual.append(draw(source).tolist())
        ddp.cuda.synchronize()
    return actual


def read(actual: list[Any]) -> list[Any]:
    ddp.cuda.synchronize()
    return [x.tolist() for x in actual]


@on_both
def test_multinomial(gpu: Any) -> None:
    weights = ddp.tensor([[1.0, 0.0, 2.0], [0.0, 3.0, 1.0]], device="cuda")
    assert weights.multinomial(2).sort()[0].tolist() == [[0, 2], [1, 2]]
    with pytest.raises(ArgumentError, match="3 samples of a row with 2 positive weights"):
        ddp.multinomial(weights, 3)


@on_both
def test_probabilities_may_be_on_the_cpu(gpu: Any) -> None:
    assert ddp.empty(3, 2, device="cuda").bernoulli_(ddp.tensor([0.0, 1.0])).tolist() == [[0.0, 1.0]] * 3


@in_any_order
@pytest.mark.parametrize("own", [False, True])
def test_draws_of_several_streams_follow_each_other(gpu: Any, own: bool) -> None:
    ddp.manual_seed(3)
    source = ddp.Generator("cuda").manual_seed(3) if own else None
    actual = []
    s = ddp.cuda.Stream()
    t = ddp.cuda.Stream()
    for side in (s, None, t, s, None):
        with ddp.cuda.stream(side):
            actual.append(draw(source))
    assert read(actual) == expected(5)


DISTRIBUTIONS: dict[str, Any] = {
    "normal": lambda d, x: d.Normal(x, x.exp()),
    "uniform": lambda d, x: d.Uniform(x, x + 2),
    "bernoulli": lambda d, x: d.Bernoulli(logits=x),
    "categorical": lambda d, x: d.Categorical(logits=x),
    "multivariate": lambda d, x: d.MultivariateNormal(x, x.shape[-1] * ddp.eye(x.shape[-1], device=x.device)),
    "gamma": lambda d, x: d.Gamma(x.exp(), 2.0),
    "beta": lambda d, x: d.Beta(x.exp(), 2.0),
    "dirichlet": lambda d, x: d.Dirichlet(x.exp()),
    "squashed": lambda d, x: d.TransformedDistribution(d.Independent(d.Normal(x, 1.0), 1), d.TanhTransform(1)),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distributions(name: str, gpu: Any) -> None:
    x = ddp.tensor([[0.1, -0.4, 0.3], [0.0, 0.2, 1.0]])
    ours, theirs = [DISTRIBUTIONS[name](ddp.distributions, y) for y in (x.cuda(), x)]
    drawn = ours.sample((2,))
    assert drawn.device.type == "cuda"
    assert_allclose(ours.log_prob(drawn).cpu().numpy(), theirs.log_prob(drawn.cpu()).numpy(), 2e-5, 1e-5)
