"""Numbers among the arguments of kernels: CuPy takes Python's, and NumPy's are to mean the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ddp
from ddp._cuda import raw_kernel
from ddp.nn import functional as F
from tests.gpu import kernels


def test_cupy_refuses_numpys_integers(gpu: Any) -> None:
    """As Cython's `intptr_t` does: the stand-in is no kinder."""
    function = gpu.cupy.cuda.function
    assert function.CIntptr(True).val == 1
    with pytest.raises(TypeError, match="an integer is required"):
        function.CIntptr(np.int64(7))


@pytest.mark.parametrize("number", [7, True, np.int8(7), np.int64(7), np.uint32(7), np.bool_(True)])
def test_integers_are_passed_in_eight_bytes(number: Any, gpu: Any) -> None:
    passed = raw_kernel.passes(gpu.cupy)[type(number)](number)
    assert type(passed) is kernels.CIntptr
    assert passed.val == int(number)


@pytest.mark.parametrize("number", [0.5, np.float16(0.5), np.float32(0.5), np.float64(0.5)])
def test_reals_are_passed_as_doubles(number: Any, gpu: Any) -> None:
    assert kernels.passed("", "double", raw_kernel.passes(gpu.cupy)[type(number)](number)) == 0.5


def real(*shape: int) -> Any:
    numbers = np.random.default_rng(0).standard_normal(shape)
    return ddp.tensor(numbers, dtype=ddp.float32, device="cuda", requires_grad=True)


# Each gives a number of the user's to a kernel.
CALLS: dict[str, Callable[[type, type], Any]] = {
    "cross_entropy": lambda i, f: F.cross_entropy(
        real(3, 4), ddp.tensor([0, 1, 2], device="cuda"), ignore_index=i(1), label_smoothing=f(0.25)
    ),
    "embedding": lambda i, f: F.embedding(ddp.tensor([0, 1], device="cuda"), real(5, 4), padding_idx=i(1)),
    "group_norm": lambda i, f: F.group_norm(real(2, 4, 3, 3), i(2), eps=f(0.5)),
    "conv2d": lambda i, f: F.conv2d(real(1, 2, 8, 8), real(3, 2, 3, 3), stride=i(1), padding=i(1)),
    "one_hot": lambda i, f: F.one_hot(ddp.tensor([1, 2], device="cuda"), i(4)),
}


@pytest.mark.parametrize("kinds", [(np.int64, np.float64), (np.int32, np.float32)])
@pytest.mark.parametrize("call", CALLS)
def test_ops_take_numpys_numbers(call: str, kinds: tuple[type, type], gpu: Any) -> None:
    grads = []
    for each in ((int, float), kinds):
        result = CALLS[call](*each)
        grads.append(result.cpu().detach().numpy())
        if result.requires_grad:
            result.sum().backward()
    np.testing.assert_array_equal(*grads)


def test_dropout_takes_numpys_probability(gpu: Any) -> None:
    x = F.dropout(ddp.ones(64, device="cuda"), np.float32(0.5)).tolist()
    assert {*x} == {0.0, 2.0}


@pytest.mark.parametrize(("name", "method"), [("maximum", "reduce"), ("minimum", "accumulate"), ("power", "at")])
def test_cupys_ufuncs_reduce_by_sums_and_products_alone(name: str, method: str, gpu: Any) -> None:
    x = gpu.cupy.ones(4)
    with pytest.raises(NotImplementedError, match=f"{name}.{method}"):
        getattr(getattr(gpu.cupy, name), method)(x, *([0, 1] if method == "at" else []))
    assert gpu.cupy.add.reduce(x).item() == 4


def test_cupy_adds_at_places_in_few_dtypes(gpu: Any) -> None:
    x = gpu.cupy.zeros(4, np.int8)
    with pytest.raises(TypeError, match=r"add\.at only supports int32"):
        gpu.cupy.add.at(x, [0, 0], x[:2])
