"""Attention: masks of both kinds, broadcast; unequal lengths and widths; shared heads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.ddp.cases.table import Case, draws, function

NAME = "scaled_dot_product_attention"


def three(*lead: int, length: int = 4, keys: int = 5, wide: int = 2) -> tuple[tuple[int, ...], ...]:
    return (*lead, length, 3), (*lead, keys, 3), (*lead, keys, wide)


# Options, and shapes of query, key, value and of a mask to add.
PLAIN: dict[str, Any] = {
    "plain": ({}, three(2, 3)),
    "scale": ({"scale": 0.3}, three(2)),
    "equal": ({"is_causal": True}, three(1, 2, keys=4, wide=3)),
    "causal, more queries": ({"is_causal": True}, three(2, length=6)),
    "float mask": ({}, (*three(2, 3), (2, 3, 4, 5))),
    "float mask of keys": ({}, (*three(2, 3), (3, 1, 5))),
    "grouped": ({"enable_gqa": True}, ((2, 4, 4, 3), *three(2, 2)[1:])),
    "grouped, mask": ({"enable_gqa": True}, ((2, 6, 4, 3), *three(2, 3)[1:], (2, 6, 4, 5))),
    "broadcast": ({}, ((2, 3, 4, 3), (1, 3, 5, 3), (2, 1, 5, 2))),
    "empty": ({}, three(0, 2)),
    "empty of queries": ({}, three(2, length=0)),
}


def attentions() -> Iterator[Case]:
    for label, (options, shapes) in PLAIN.items():
        yield Case(NAME, label, function(NAME, **options), draws(*shapes))
    seen = np.random.default_rng(0).random((2, 3, 4, 5)) < 0.6
    seen[..., 0] = True
    for label, mask in {"bool mask": seen, "bool mask broadcast": seen[0, 0]}.items():
        yield Case(NAME, label, function(NAME), (*draws(*three(2, 3)), mask))

    def inside(t: Any, *inputs: Any) -> Any:
        return function(NAME)(t, *[x.transpose(1, 2) for x in inputs])

    yield Case(NAME, "heads inside", inside, draws((2, 4, 3, 2), (2, 5, 3, 2), (2, 5, 3, 2)))
    yield Case(NAME, "large", lambda t, q, k, v: function(NAME)(t, q * 8, k * 8, v), draws(*three(2)))


CASES = list(attentions())
