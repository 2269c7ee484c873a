"""Indexing."""

from __future__ import annotations

from collections.abc import Iterator

from tests.ddp.cases.table import Case, draw


def indexing() -> Iterator[Case]:
    x = (draw(2, 3, 4),)
    for label, fn in {
        "row": lambda t, x: x[1],
        "element": lambda t, x: x[1, 2, 3],
        "negative": lambda t, x: x[-1, :, -2],
        "slice": lambda t, x: x[:, 1:, ::2],
        "ellipsis": lambda t, x: x[..., 0],
        "new axis": lambda t, x: x[:, None, 1],
        "empty": lambda t, x: x[:, 2:1],
        "narrow": lambda t, x: t.narrow(x, 1, -2, 1),
        "select": lambda t, x: x.select(2, -1),
    }.items():
        yield Case("getitem", label, fn, x)
    yield Case("getitem", "0-d", lambda t, x: x[...], (draw(),))
    for label, fn in {
        "list": lambda t, x: x[:, [0, 2, 0]],
        "tensor": lambda t, x: x[t.tensor([1, 1, 0])],
        "two tensors": lambda t, x: x[t.tensor([1, 0, 1]), t.tensor([2, 0, 2])],
        "all tensors": lambda t, x: x[t.tensor([1, 1]), t.tensor([[0], [2]]), [3, 3]],
        "apart": lambda t, x: x[t.tensor([1, 0]), :, t.tensor([3, 3])],
        "after a view": lambda t, x: x[:, 1:, None, [1, 1, -4]],
        "mask": lambda t, x: x[x > 0],
        "mask and list": lambda t, x: x[[0, 1], :, [True, False, True, False]],
        "nothing": lambda t, x: x[:, []],
        "index_select": lambda t, x: t.index_select(x, 1, t.tensor([2, 2, 0])),
        "masked_select": lambda t, x: t.masked_select(x, t.tensor([True, False, True, True])),
        "take": lambda t, x: t.take(x, t.tensor([[0, -1], [5, 5]])),
        "repeat_interleave": lambda t, x: x.repeat_interleave(t.tensor([2, 0, 1]), dim=1),
    }.items():
        yield Case("index", label, fn, x)
    # As many rows, and as wide, as it takes to sort and add them pair by pair.
    yield Case("index", "rows", lambda t, x: x[t.arange(90) ** 2 % 7], (draw(7, 64),))
    yield Case("index", "empty", lambda t, x: x[:, [0, 1]], (draw(0, 3),))


def gathering() -> Iterator[Case]:
    where = [[0, 2, 1], [2, 2, 0]]
    yield Case("gather", "rows", lambda t, x: x.gather(0, t.tensor(where)), (draw(3, 3),))
    yield Case("gather", "columns", lambda t, x: t.gather(x, 1, t.tensor(where)), (draw(2, 4),))
    yield Case("gather", "smaller", lambda t, x: t.gather(x, -1, t.tensor([[1, 1]])), (draw(2, 4),))
    for label, fn in {
        "take_along_dim": lambda t, x: t.take_along_dim(x, t.tensor([[[1], [0]], [[-1], [2]]]), dim=1),
        "take_along_dim flat": lambda t, x: x.take_along_dim(t.tensor([[0, 5, 5]])),
        "sort": lambda t, x: t.sort(x, dim=1)[0],
        "sort descending": lambda t, x: x.sort(descending=True).values,
        "topk": lambda t, x: t.topk(x, 2, dim=1).values,
        "kthvalue": lambda t, x: t.kthvalue(x, 2).values,
    }.items():
        yield Case("gather", label, fn, (draw(2, 3, 4),))
    yield Case("gather", "vector of a number", lambda t, x: t.gather(x, 0, t.tensor([0, 0])), (draw(),))
    yield Case("gather", "number of a number", lambda t, x: x.gather(-1, t.tensor(0)), (draw(),))
    yield Case("gather", "empty", lambda t, x: x.sort(0)[0], (draw(2, 0),))
    yield Case("reshape", "sort 0-d", lambda t, x: x.sort()[0], (draw(),))


CASES = [*indexing(), *gathering()]
