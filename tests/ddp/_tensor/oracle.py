"""Whether a result is PyTorch's: its dtype, its shape and its numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.testing import assert_allclose

import ddp

_HALVES = {"float16": 2e-3, "bfloat16": 1.6e-2}  # what rounding may leave


def numbers(x: Any) -> np.ndarray[Any, Any]:
    return np.asarray(x.detach().tolist())


def both(values: Any, dtype: str | None = "float32") -> tuple[ddp.Tensor, Any]:
    """Tensors here and there; None: of the dtype that the values have."""
    import torch

    return ddp.tensor(values, dtype=dtype), torch.tensor(values, dtype=dtype and getattr(torch, dtype))


def agree(ours: Any, theirs: Any, rtol: float = 1e-6, atol: float = 1e-7) -> None:
    """Tensors, tuples of them, or anything that compares. rtol: 0 is exact; else 16-bit floats have their own."""
    if isinstance(theirs, tuple):
        assert isinstance(ours, tuple)
        assert len(ours) == len(theirs)
        for pair in zip(ours, theirs, strict=True):
            agree(*pair, rtol, atol)
    elif hasattr(theirs, "tolist"):
        assert ours.dtype.name == str(theirs.dtype).removeprefix("torch.")
        assert ours.shape == tuple(theirs.shape)
        rtol = rtol and max(rtol, _HALVES.get(ours.dtype.name, 0))
        assert_allclose(numbers(ours), numbers(theirs), rtol, atol if rtol else 0)
    else:
        assert ours == theirs
