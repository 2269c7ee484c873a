"""Indexing."""

from __future__ import annotations

from collections.abc import Iterator

from tests.ddp.cases.table import Case, draw, spaced


def indexing() -> Iterator[Case]:
    for label, fn in {
        "row": lambda t, x: x[1],
        "element": lambda t, x: x[1, 2, 3],
        "negative": lambda t, x: x[-1, :, -2],
        "slice": lambda t, x: x[:, 1:, ::2],
        "ellipsis": lambda t, x: x[..., 0],
        "new axis": lambda t, x: x[:, None, 1],
        "empty": lambda t, x: x[:, 2:1],
        "list": lambda t, x: x[:, [0, 2, 0]],
        "tensor": lambda t, x: x[t.tensor([1, 1, 0])],
        "two tensors": lambda t, x: x[t.tensor([1, 0, 1]), t.tensor([2, 0, 2])],
        "apart": lambda t, x: x[t.tensor([1, 0]), :, t.tensor([3, 3])],
        "mask": lambda t, x: x[x > 0],
        "row mask": lambda t, x: x[t.tensor([True, False])],
        "0-d tensor": lambda t, x: x[t.tensor(1)],
        "twice": lambda t, x: x[1][0],
    }.items():
        yield Case("getitem", label, fn, (draw(2, 3, 4),))
    yield Case("getitem", "non-contiguous", lambda t, x: x[0, 1:], (spaced(2, 3, 4),))
    yield Case("getitem", "0-d", lambda t, x: x[...], (draw(),))
    for keepdim in (False, True):
        yield Case("gather", f"max {keepdim}", lambda t, x, k=keepdim: t.max(x, 1, keepdim=k)[0], (draw(2, 3, 4),))
    yield Case("gather", "min", lambda t, x: t.min(x, -1)[0], (spaced(2, 3, 4),))
    yield Case("gather", "empty", lambda t, x: t.max(x, 1)[0], (draw(0, 3),))


CASES = list(indexing())
