"""Shapes stay shapes where they are cut and joined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import ddp

torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")

CALLS: dict[str, Callable[[Any], Any]] = {
    "s[1:]": lambda s: s[1:],
    "s[::-1]": lambda s: s[::-1],
    "s[0]": lambda s: s[0],
    "s + tuple": lambda s: s + (1,),
    "tuple + s": lambda s: (1,) + s,
    "s * 2": lambda s: s * 2,
    "2 * s": lambda s: 2 * s,
}


@pytest.mark.parametrize("name", CALLS)
def test_slices_and_sums(name: str) -> None:
    ours, theirs = (CALLS[name](t.zeros(2, 3, 4).shape) for t in (ddp, torch))
    assert ours == theirs
    assert type(ours).__name__ == type(theirs).__name__
    if name != "s[0]":
        assert ours.numel() == theirs.numel()


def test_a_list_is_no_shape() -> None:
    for wrong in (lambda s: s + [1], lambda s: [1] + s):
        with pytest.raises(TypeError):
            wrong(ddp.Size([2]))
