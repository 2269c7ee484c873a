"""Embeddings: rows that occur twice. What padding and frequency make is no derivative: see nn/test_embedding.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.ddp.cases.table import Case, draw


def look(t: Any, w: Any, i: Any) -> Any:
    return t.nn.functional.embedding(i, w)


def embeddings() -> Iterator[Case]:
    index = np.array([[1, 0, 4], [1, 1, 2]])
    yield Case("embedding", "matrix", look, (draw(5, 3), index))
    yield Case("embedding", "int32", look, (draw(5, 3), index.astype(np.int32)))
    yield Case("embedding", "one", look, (draw(5, 3), np.array(4)))
    yield Case("embedding", "many", look, (draw(9, 64), np.arange(200).reshape(20, 10) ** 2 % 9))
    yield Case("embedding", "empty", look, (draw(5, 3), np.zeros((0, 2), np.int64)))


CASES = list(embeddings())
