"""Numbers among the arguments of kernels: CuPy takes Python's, and NumPy's are to mean the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ddp
from ddp.nn import functional as F


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
