"""Attention: masks of both kinds, broadcast; unequal lengths and widths; shared heads."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.ddp.cases.table import Case, draw, function

NAME = "scaled_dot_product_attention"


attend = functools.partial(function, NAME)


def three(*lead: int, length: int = 4, keys: int = 5, depth: int = 3, wide: int = 2) -> tuple[Any, ...]:
    return (draw(*lead, length, depth), draw(*lead, keys, depth, seed=1), draw(*lead, keys, wide, seed=2))


def attentions() -> Iterator[Case]:
    seen = np.random.default_rng(0).random((2, 3, 4, 5)) < 0.6
    seen[..., 0] = True
    yield Case(NAME, "plain", attend(), three(2, 3))
    yield Case(NAME, "scale", attend(scale=0.3), three(2))
    yield Case(NAME, "equal", attend(is_causal=True), three(1, 2, length=4, keys=4, wide=3))
    yield Case(NAME, "causal, more queries", attend(is_causal=True), three(2, length=6))
    yield Case(NAME, "bool mask", attend(), (*three(2, 3), seen))
    yield Case(NAME, "bool mask broadcast", attend(), (*three(2, 3), seen[0, 0]))
    yield Case(NAME, "float mask", attend(), (*three(2, 3), draw(2, 3, 4, 5, seed=3)))
    yield Case(NAME, "float mask of keys", attend(), (*three(2, 3), draw(3, 1, 5, seed=3)))
    yield Case(NAME, "grouped", attend(enable_gqa=True), (draw(2, 4, 4, 3), *three(2, 2)[1:]))
    yield Case(
        NAME, "grouped, mask", attend(enable_gqa=True), (draw(2, 6, 4, 3), *three(2, 3)[1:], draw(2, 6, 4, 5, seed=3))
    )
    yield Case(NAME, "broadcast", attend(), (draw(2, 3, 4, 3), draw(1, 3, 5, 3, seed=1), draw(2, 1, 5, 2, seed=2)))
    yield Case(
        NAME,
        "heads inside",
        lambda t, q, k, v: t.nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        ),
        (draw(2, 4, 3, 2), draw(2, 5, 3, 2, seed=1), draw(2, 5, 3, 2, seed=2)),
    )
    yield Case(NAME, "large", lambda t, q, k, v: attend()(t, q * 8, k * 8, v), three(2))
    yield Case(NAME, "empty", attend(), three(0, 2))
    yield Case(NAME, "empty of queries", attend(), three(2, length=0))


CASES = list(attentions())
