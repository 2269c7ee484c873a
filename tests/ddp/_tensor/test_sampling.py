"""Random tensors: their distributions, dtypes and generators, and refusals in our own words."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

import ddp
from ddp.errors import ArgumentError, DeviceError, DtypeError, InplaceError, ShapeError

torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")


class TestRandom:
    def test_distributions(self) -> None:
        ddp.manual_seed(0)
        for dtype in (ddp.float16, ddp.bfloat16, ddp.float32, ddp.float64):
            x = ddp.rand(20_000, dtype=dtype).double()
            assert 0 <= x.amin().item() <= x.amax().item() < 1
            assert x.mean().item() == pytest.approx(0.5, abs=0.02)
            y = ddp.randn(20_000, dtype=dtype).double()
            assert y.mean().item() == pytest.approx(0.0, abs=0.04)
            assert (y * y).mean().item() == pytest.approx(1.0, abs=0.05)

    def test_randint(self) -> None:
        for x in (
            ddp.randint(2, 5, (100,)),
            ddp.randint(low=2, high=5, size=(100,)),
            ddp.randint(2, 5, size=(100,)),
            ddp.randint_like(ddp.zeros(100, dtype=ddp.int64), 2, 5),
        ):
            assert x.dtype == ddp.int64
            assert set(x.tolist()) == {2, 3, 4}
        assert set(ddp.randint(3, (100,)).tolist()) == set(ddp.randint(3, size=(100,)).tolist()) == {0, 1, 2}
        assert set(ddp.randint_like(ddp.zeros(100), 2).tolist()) == {0.0, 1.0}
        assert ddp.randint(3, (2, 2), dtype=ddp.uint8).dtype == ddp.uint8
        assert ddp.randint(3, (2,), dtype=ddp.float32, requires_grad=True).requires_grad

    @pytest.mark.parametrize(
        "make",
        [
            lambda: ddp.randint(3, (2, -1)),
            lambda: ddp.normal(0.0, 1.0, (2, -1)),
            lambda: ddp.tril_indices(2, -1),
        ],
    )
    def test_a_negative_size_is_refused(self, make: Callable[[], Any]) -> None:
        with pytest.raises(ShapeError, match=r"\(2, -1\) has a negative size"):
            make()

    @pytest.mark.parametrize(
        ("dtype", "low", "high"),
        [
            (ddp.float16, 0.0, 1.0),
            (ddp.bfloat16, -4.0, -3.0),
            (ddp.float32, 1.0, 1 + 2**-22),
            (ddp.float64, 1.0, 1 + 2**-51),
        ],
    )
    def test_uniform_numbers_are_below_the_upper_bound(self, dtype: ddp.dtype, low: float, high: float) -> None:
        x = ddp.empty(50_000, dtype=dtype).uniform_(low, high)
        assert low <= x.min().item() < x.max().item() < high

    def test_normal(self) -> None:
        ddp.manual_seed(0)
        x = ddp.normal(3.0, 0.5, (20_000,))
        assert x.mean().item() == pytest.approx(3.0, abs=0.02)
        means = ddp.arange(4).double()
        widths = ddp.tensor([0.0, 0.0, 0.0, 1.0], dtype=ddp.float64)
        y = ddp.normal(means, widths)
        assert y.dtype == ddp.float64
        assert y[:3].tolist() == [0.0, 1.0, 2.0]
        assert (
            ddp.normal(means, 0.0).tolist() == ddp.normal(mean=means, std=widths * 0).tolist() == [0.0, 1.0, 2.0, 3.0]
        )
        assert ddp.normal(2.0, widths)[:3].tolist() == [2.0] * 3
        assert ddp.normal(ddp.zeros(3, 1), ddp.ones(2)).shape == (3, 2)
        assert ddp.normal(0, 1, size=(2, 2), dtype=ddp.float16).dtype == ddp.float16
        with pytest.raises(ArgumentError, match="negative"):
            ddp.normal(0.0, -widths)

    def test_bernoulli(self) -> None:
        ddp.manual_seed(0)
        p = ddp.tensor([0.0, 1.0, 0.25]).expand(10_000, 3)
        x = ddp.bernoulli(p)
        assert x.dtype == ddp.float32
        assert x.mean(0).tolist() == pytest.approx([0.0, 1.0, 0.25], abs=0.02)
        assert p.bernoulli(0.5).mean().item() == pytest.approx(0.5, abs=0.02)
        assert ddp.bernoulli(ddp.zeros(4, dtype=ddp.int64), 1.0).tolist() == [1, 1, 1, 1]
        assert ddp.zeros(2, dtype=ddp.bfloat16).bernoulli().dtype == ddp.bfloat16
        for wrong in (ddp.tensor([1.5]), ddp.tensor([-0.1]), ddp.tensor([math.nan])):
            with pytest.raises(ArgumentError, match=r"outside \[0, 1\]"):
                ddp.bernoulli(wrong)


class TestInPlace:
    def test_bernoulli(self) -> None:
        ddp.manual_seed(0)
        x = ddp.empty(10_000)
        assert x.bernoulli_() is x
        assert x.mean().item() == pytest.approx(0.5, abs=0.02)
        assert ddp.empty(3, 1, dtype=ddp.int32).bernoulli_(1.0).tolist() == [[1]] * 3
        assert ddp.empty(2, 3).bernoulli_(ddp.tensor([0.0, 1.0, 0.0])).tolist() == [[0.0, 1.0, 0.0]] * 2

    def test_random(self) -> None:
        ddp.manual_seed(0)
        assert set(ddp.empty(100, dtype=ddp.int64).random_(2, 5).tolist()) == {2, 3, 4}
        assert set(ddp.empty(100).random_(3).tolist()) == {0.0, 1.0, 2.0}
        for dtype, high in ((ddp.uint8, 255), (ddp.int8, 127), (ddp.bfloat16, 256), (ddp.float16, 2048), (ddp.bool, 1)):
            x = ddp.empty(5000, dtype=dtype).random_().long()
            assert 0 <= x.amin().item() <= x.amax().item() <= high
            assert x.amax().item() > 0.98 * high
        assert ddp.empty(5, dtype=ddp.int64).random_().amax().item() > 2**50
        assert ddp.empty(2000, dtype=ddp.uint8).random_(0, 256).amax().item() > 250

    @pytest.mark.parametrize("name", ["bernoulli_", "exponential_", "random_"])
    def test_counts_a_version_and_draws_from_a_generator(self, name: str) -> None:
        x = ddp.zeros(50)
        getattr(x, name)(generator=ddp.Generator().manual_seed(2))
        assert x.version.count == 1
        assert x.tolist() == getattr(ddp.zeros(50), name)(generator=ddp.Generator().manual_seed(2)).tolist()
        with pytest.raises(InplaceError, match=name):
            getattr(ddp.zeros(2, requires_grad=True), name)()


class TestMultinomial:
    @pytest.mark.parametrize("dtype", [ddp.float16, ddp.bfloat16, ddp.float32, ddp.float64], ids=str)
    def test_with_replacement(self, dtype: Any) -> None:
        ddp.manual_seed(0)
        weights = ddp.tensor([0.0, 1.0, 3.0, 0.0], dtype=dtype)
        x = weights.multinomial(8000, replacement=True)
        assert (x.shape, x.dtype) == ((8000,), ddp.int64)
        counts = Counter(x.tolist())
        assert set(counts) == {1, 2}
        assert counts[2] / 8000 == pytest.approx(0.75, abs=0.02)

    def test_of_rows(self) -> None:
        ddp.manual_seed(0)
        weights = ddp.tensor([[0.0, 0.0, 5.0], [1.0, 0.0, 0.0]])
        for n in (1, 5):
            x = ddp.multinomial(weights, n, True)
            assert x.tolist() == [[2] * n, [0] * n]
        x = ddp.multinomial(ddp.tensor([[1.0, 2.0, 1.0]]).expand(5000, 3), 1)
        assert x.shape == (5000, 1)
        assert Counter(x.flatten().tolist())[1] / 5000 == pytest.approx(0.5, abs=0.03)

    def test_without_replacement(self) -> None:
        ddp.manual_seed(0)
        assert sorted(ddp.multinomial(ddp.tensor([1.0, 0.0, 2.0, 1.0]), 3).tolist()) == [0, 2, 3]
        x = ddp.multinomial(ddp.tensor([[1.0, 1.0, 2.0]]).expand(8000, 3), 2)
        assert all(a != b for a, b in x.tolist())
        pairs = Counter((a, b) for a, b in x.tolist())
        assert pairs[2, 0] / 8000 == pytest.approx(0.25, abs=0.02)  # 1/2 * 1/2
        assert pairs[0, 2] / 8000 == pytest.approx(1 / 6, abs=0.02)  # 1/4 * 2/3

    @pytest.mark.parametrize(
        ("weights", "n", "kind", "message"),
        [
            (torch.ones(1, 1, 2), 1, ShapeError, r"\(1, 1, 2\)"),
            (torch.ones(2, dtype=torch.int64), 1, DtypeError, "int64"),
            (torch.ones(2), 0, ArgumentError, "0 samples"),
            (torch.ones(2), 3, ArgumentError, "3 samples of a row with 2 positive weights"),
            (-torch.ones(2), 1, ArgumentError, "negative"),
        ],
    )
    def test_refusals(self, weights: Any, n: int, kind: Any, message: str) -> None:
        with pytest.raises(kind, match=message):
            ddp.multinomial(ddp.from_numpy(weights.numpy()), n)
        with pytest.raises((RuntimeError, IndexError)):
            torch.multinomial(weights, n)


# A function, and its arguments before the generator.
DRAWS: list[tuple[Any, ...]] = [
    ("rand", 4),
    ("randn", 4),
    ("rand_like", ddp.ones(4)),
    ("randn_like", ddp.ones(4)),
    ("randint_like", ddp.ones(4), 1000),
    ("randint", 1000, (4,)),
    ("randperm", 50),
    ("normal", 0.0, 1.0, (4,)),
    ("bernoulli", ddp.full((50,), 0.5)),
    ("multinomial", ddp.ones(50), 20),
]


class TestGenerators:
    @pytest.mark.parametrize("call", DRAWS, ids=lambda call: call[0])
    def test_streams_and_states(self, call: Any) -> None:
        def draw(**options: Any) -> list[float]:
            return getattr(ddp, call[0])(*call[1:], **options).tolist()

        g = ddp.Generator().manual_seed(5)
        first, second = draw(generator=g), draw(generator=g)
        assert first != second
        assert draw(generator=g.manual_seed(5)) == first
        ddp.manual_seed(5)
        before = ddp.get_rng_state()
        assert draw(generator=ddp.Generator().manual_seed(5)) == first
        assert ddp.get_rng_state().tolist() == before.tolist()  # the thread's own stream is not touched
        assert draw() == first
        state = ddp.get_rng_state()
        assert (state.dtype, state.ndim) == (ddp.uint8, 1)
        second = draw()
        ddp.set_rng_state(state)
        assert draw() == second
        g.set_state(state)
        assert draw(generator=g) == second
        assert g.initial_seed() == 5

    def test_refusals(self) -> None:
        with pytest.raises(DeviceError, match="cannot come from a generator on cuda:0"):
            ddp.rand(3, generator=ddp.Generator("cuda:0"), device="cpu")
        for state in (None, [1], "x"):
            with pytest.raises(DtypeError, match="set_state: expected a 1-d uint8 tensor, got "):
                ddp.set_rng_state(state)
