"""Arguments under PyTorch's names, and under NumPy's names of them, which PyTorch takes as well."""

from __future__ import annotations

from typing import Any

import pytest
from numpy.testing import assert_allclose

import ddp
from ddp.errors import DtypeError

torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")

CALLS: dict[str, Any] = {
    "permute": {"dims": (1, 0)},
    "reshape": {"shape": (3, -1)},
    "view": {"size": (6,)},
    "expand": {"size": (2, -1, -1)},
    "repeat": {"repeats": (2, 1)},
    "tile": {"dims": (2,)},
    "flip": {"dims": [0, 1]},
    "roll": {"shifts": 1, "dims": 0},
    "swapaxes": {"axis0": 0, "axis1": 1},
}


@pytest.mark.parametrize("name", CALLS)
def test_agrees_with_pytorch(name: str) -> None:
    ours, theirs = (getattr(t.arange(6.0).reshape(2, 3), name)(**CALLS[name]) for t in (ddp, torch))
    assert ours.shape == theirs.shape
    assert_allclose(ours.numpy(), theirs.numpy(), 1e-6)


def test_functions_under_their_names() -> None:
    assert ddp.ones(3).dot(tensor=ddp.ones(3)).item() == 3
    assert ddp.nn.functional.one_hot(input=ddp.tensor([1]), num_classes=7).shape == (1, 7)


@pytest.mark.parametrize("wrong", [2.5, "a", (2, 2.5), None])
def test_sizes_are_integers(wrong: Any) -> None:
    for call in (ddp.zeros, ddp.rand, ddp.ones(4).reshape):
        with pytest.raises(DtypeError, match="expected integers"):
            call(wrong)


REDUCTIONS = ["all", "amax", "amin", "any", "argmax", "argmin", "logsumexp", "mean", "nanmean", "nansum", "prod", "std"]
REDUCTIONS += ["sum", "var"]
OTHERS = ["argsort", "count_nonzero", "cumprod", "cumsum", "log_softmax", "softmax", "squeeze", "unsqueeze"]
NUMBERS = [[1.0, 2.0, 5.0], [3.0, 0.0, 4.0]]


@pytest.mark.parametrize("name", REDUCTIONS + OTHERS)
def test_methods_and_functions(name: str) -> None:
    options: dict[str, Any] = {"axis": 1, "keepdims": True} if name in REDUCTIONS else {"axis": 1}
    expected = getattr(torch.tensor(NUMBERS), name)(**options)
    x = ddp.tensor(NUMBERS)
    for actual in (getattr(x, name)(**options), getattr(ddp, name)(x, **options)):
        assert actual.shape == tuple(expected.shape)
        assert_allclose(actual.numpy(), expected.numpy(), 1e-5)


@pytest.mark.parametrize("name", ["cummax", "cummin", "max", "median", "min", "sort"])
def test_named_results(name: str) -> None:
    values, indices = getattr(ddp.tensor(NUMBERS), name)(axis=1)
    expected = getattr(torch.tensor(NUMBERS), name)(axis=1)
    assert values.tolist() == expected[0].tolist()
    assert indices.tolist() == expected[1].tolist()
