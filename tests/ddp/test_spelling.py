"""NumPy's names of arguments, which PyTorch takes as well."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ddp
from ddp.errors import ArgumentError

torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")

REDUCTIONS = ["all", "amax", "amin", "any", "argmax", "argmin", "logsumexp", "mean", "nanmean", "nansum", "prod", "std"]
REDUCTIONS += ["sum", "var"]
OTHERS = ["argsort", "count_nonzero", "cumprod", "cumsum", "log_softmax", "softmax", "squeeze", "unsqueeze"]
NUMBERS = [[1.0, 2.0, 5.0], [3.0, 0.0, 4.0]]


@pytest.mark.parametrize("name", REDUCTIONS + OTHERS)
def test_methods_and_functions(name: str) -> None:
    options: dict[str, Any] = {"axis": 1, "keepdims": True} if name in REDUCTIONS else {"axis": 1}
    expected = getattr(torch.tensor(NUMBERS), name)(**options)
    x = ddp.tensor(NUMBERS)
    for found in (getattr(x, name)(**options), getattr(ddp, name)(x, **options)):
        assert found.shape == tuple(expected.shape)
        np.testing.assert_allclose(found.numpy(), expected.numpy(), 1e-5)


@pytest.mark.parametrize("name", ["cummax", "cummin", "max", "median", "min", "sort"])
def test_named_results(name: str) -> None:
    values, indices = getattr(ddp.tensor(NUMBERS), name)(axis=1)
    expected = getattr(torch.tensor(NUMBERS), name)(axis=1)
    assert values.tolist() == expected[0].tolist()
    assert indices.tolist() == expected[1].tolist()


@pytest.mark.parametrize("name", ["cat", "concat", "concatenate", "stack"])
def test_joins(name: str) -> None:
    def joined(t: Any) -> Any:
        return getattr(t, name)([t.tensor(NUMBERS)] * 2, axis=1)

    assert joined(ddp).tolist() == joined(torch).tolist()


def test_both_names_are_refused() -> None:
    with pytest.raises(ArgumentError, match="sum: axis and dim are one argument"):
        ddp.ones(2).sum(dim=0, axis=0)
