"""Special functions beside PyTorch's: values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ddp
from tests.ddp.nn.against_torch import agree, torch

pytest.importorskip("torch", reason="PyTorch is the oracle here")

CASES: dict[str, Callable[..., Any]] = {
    **{name: lambda f, x: f(x) for name in ddp.special.__all__},
    **{name: lambda f, x: f(x, dim=-1) for name in ("log_softmax", "logsumexp", "softmax")},
    "xlogy": lambda f, x: f(x, x + 1),
}


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_pytorch(name: str) -> None:
    ours, theirs = (getattr(t.special, name) for t in (ddp, torch))
    x = np.linspace(0.01, 0.99, 24).reshape(4, 6)
    agree(lambda x: CASES[name](ours, x), lambda x: CASES[name](theirs, x), x)
