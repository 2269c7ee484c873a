"""Fourier transforms and complex numbers beside PyTorch's: values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from numpy.testing import assert_array_equal

import ddp
from ddp.errors import ArgumentError, DtypeError, RangeError
from tests.ddp.nn.against_torch import agree, numbers, torch

pytest.importorskip("torch", reason="PyTorch is the oracle here")

Complex = tuple[Any, Any]


def pairs(t: Any, z: Any) -> Any:
    """Complex results as real ones, so that both libraries give them gradients."""
    if t is torch:
        return t.view_as_real(z.resolve_conj()) if z.is_complex() else z
    return t.view_as_real(z) if isinstance(z, ddp.ComplexTensor) else z


OPTIONS: list[tuple[Any, ...]] = [
    ("", {}),
    ("", {"n": 7, "dim": 0, "norm": "ortho"}),
    ("", {"n": 3, "norm": "forward"}),
    ("2", {}),
    ("2", {"s": (5, 3), "dim": (0, 2)}),
    ("n", {"norm": "ortho"}),
    ("n", {"s": (4, 8)}),
    ("n", {"dim": (2, 0), "norm": "forward"}),
]


@pytest.mark.parametrize("name", ["fft", "ifft", "rfft", "irfft"])
@pytest.mark.parametrize(("end", "options"), OPTIONS)
def test_transforms(name: str, end: str, options: Any) -> None:
    def run(t: Any) -> Callable[..., Any]:
        def of_real(x: Any) -> Any:
            return pairs(t, getattr(t.fft, name + end)(x, **options))

        def of_pairs(x: Any) -> Any:
            return pairs(t, getattr(t.fft, name + end)(t.view_as_complex(x), **options))

        return lambda x, z: (
            (of_pairs(z) if name == "irfft" else of_real(x),)
            + (() if name[0] == "r" or name == "irfft" else (of_pairs(z),))
        )

    agree(run(ddp), run(torch), numbers(4, 5, 6), numbers(4, 5, 6, 2))


@pytest.mark.parametrize("name", ["fft", "ifft", "rfft", "irfft"])
@pytest.mark.parametrize(("end", "options"), OPTIONS[1::3])  # between them every option
def test_second_derivatives(name: str, end: str, options: Any) -> None:
    transform = getattr(ddp.fft, name + end)

    def energy(x: Any) -> Any:
        return pairs(ddp, transform(ddp.view_as_complex(x) if name == "irfft" else x[..., 0], **options)).tanh()

    assert ddp.autograd.gradgradcheck(energy, [ddp.tensor(numbers(2, 2, 3, 2), requires_grad=True)])


EXPRESSIONS: dict[str, Any] = {
    "arithmetic": lambda t, z, w, x: (z * w + 2 * z - w / z) * x / 3 - (1 + z) * 2j + x * w + (x[0] - z),
    "parts": lambda t, z, w, x: t.abs(z) + z.angle() + abs(w) + z.real * t.imag(w) + t.real(t.conj(z)) + t.angle(w),
    "at 0": lambda t, z, w, x: (z * 0).abs() + (z - z).abs(),
    "shapes": lambda t, z, w, x: t.cat(
        [t.view_as_real(z.reshape(-1)[2:]), t.view_as_real(w.transpose(0, 1).flatten()[1:])]
    ),
    "sums": lambda t, z, w, x: t.sum(z * w.conj(), 1).mean().abs(),
    "einsum": lambda t, z, w, x: t.einsum("ij,kj->ik", z, w).abs(),
    "polar": lambda t, z, w, x: t.view_as_real(t.polar(x.abs() + 1, x) + t.complex(x, x * x)),
    "correlation": lambda t, z, w, x: t.fft.irfft(t.fft.rfft(x, n=6) * t.conj(t.fft.rfft(x, n=6)), n=6)[..., :3],
    "filter": lambda t, z, w, x: t.fft.irfft2(t.fft.rfft2(x, norm="ortho") * w[:, :2], s=(4, 3), norm="ortho"),
    "shift": lambda t, z, w, x: t.fft.ifftshift(t.fft.fftshift(t.fft.fft2(x)) * z, dim=1).real + t.fft.fftshift(x, 0),
    "frequencies": lambda t, z, w, x: x * t.fft.fftfreq(3, 0.5) + t.fft.rfftfreq(5, dtype=x.dtype),
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_complex_numbers(name: str) -> None:
    def run(t: Any) -> Callable[..., Any]:
        def expression(z: Any, w: Any, x: Any) -> Any:
            return pairs(t, EXPRESSIONS[name](t, t.view_as_complex(z), t.view_as_complex(w), x))

        return expression

    agree(run(ddp), run(torch), numbers(4, 3, 2), numbers(4, 3, 2, seed=1), numbers(4, 3, seed=2))


def test_gradients_and_dtypes() -> None:
    x = ddp.from_numpy(numbers(2, 3, 5)).requires_grad_()
    assert ddp.autograd.gradcheck(lambda x: ddp.view_as_real(ddp.fft.fftn(x, s=(4, 3))), x)
    assert ddp.fft.rfft(x.float()).real.dtype == ddp.float32
    assert ddp.fft.fft(ddp.arange(4)).real.tolist() == [6, -2, -2, -2]
    assert ddp.fft.rfft(ddp.zeros(0, 4)).shape == (0, 3)


def test_refusals() -> None:
    z = ddp.fft.fft(ddp.ones(4))
    for wrong in (lambda: ddp.fft.rfft(z), lambda: ddp.fft.fft(ddp.ones(4).half())):
        with pytest.raises(DtypeError, match="float32 or float64"):
            wrong()
    for options in ({"s": (4, 4), "dim": (0,)}, {"norm": "both"}, {"s": (0,)}):
        with pytest.raises(ArgumentError, match="fft: "):
            ddp.fft.fftn(ddp.ones(4), **options)
    for n in (0, -1):
        with pytest.raises(ArgumentError, match=f"rfft: expected a size of at least 1, got n={n}"):
            ddp.fft.rfft(ddp.ones(4), n=n)
    assert ddp.fft.fftn(ddp.ones(4, 4), s=(-1, 2)).shape == (4, 2)
    for transform in (ddp.fft.fft, ddp.fft.fftshift, ddp.fft.ifftshift):
        with pytest.raises(RangeError, match="dimension 1"):
            transform(ddp.ones(4), dim=1)
    with pytest.raises(AttributeError, match="ComplexTensor has no exp: compute it of its real"):
        z.exp()
    with pytest.raises(DtypeError):
        ddp.cat([z, z])  # type: ignore[list-item]
    assert_array_equal(z.real.numpy(), [4, 0, 0, 0])
