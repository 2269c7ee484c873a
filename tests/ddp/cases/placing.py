"""Writing by index: copies, and in place on the result of an op."""

from __future__ import annotations

from collections.abc import Iterator

from tests.ddp.cases.table import Case, draw

INDEX = [[0, 2, 1, 1], [2, 0, 2, 0]]


def placing() -> Iterator[Case]:
    x = draw(3, 4)
    v = draw(2, 4, seed=1)
    for label, fn in {
        "tensor": lambda t, x, v: x.scatter(0, t.tensor(INDEX), v),
        "smaller": lambda t, x, v: t.scatter(x, 1, t.tensor([[3], [0]]), v[:, :1]),
        "in place": lambda t, x, v: (x * 2).scatter_(0, t.tensor(INDEX), v),
        "number": lambda t, x, v: x.scatter(1, t.tensor([[0, 3]]), 5.0) * v[0],
    }.items():
        yield Case("scatter", label, fn, (x, v))
    yield Case("scatter", "empty", lambda t, x: x.scatter(0, t.zeros(0, 3, dtype=t.int64), x), (draw(0, 3),))
    for op, kind in (("scatter", "scatter"), ("scatter_add", "scatter_add"), ("scatter", "scatter_")):
        for label, at, source in (("number into a vector", (3,), ()), ("vector into a number", (), (1,))):
            yield Case(
                op,
                f"{kind}: {label}",
                lambda t, x, v, kind=kind: getattr(x * 1, kind)(0, t.zeros((1 - x.ndim) * (1,), dtype=t.int64), v),
                (draw(*at), draw(*source, seed=1)),
            )
    repeated = [[0, 1, 1, 2], [0, 1, 0, 0]]
    for label, fn in {
        "tensor": lambda t, x, v: t.scatter_add(x, 0, t.tensor(repeated), v),
        "in place": lambda t, x, v: (x * 2).scatter_add_(1, t.tensor(repeated), v),
    }.items():
        yield Case("scatter_add", label, fn, (x, v))
    yield Case("scatter_add", "empty", lambda t, x: x.scatter_add(0, t.zeros(0, 3, dtype=t.int64), x), (draw(0, 3),))
    for label, fn in {
        "rows": lambda t, x, v: t.index_add(x, 0, t.tensor([1, 1]), v),
        "alpha": lambda t, x, v: x.index_add(0, t.tensor([2, 0]), v, alpha=3),
        "columns": lambda t, x, v: (
            x.index_add(1, t.tensor([3, 0, 3]), v.reshape(-1)[:6].reshape(2, 3).new_ones(3, 3)) * v[0]
        ),
        "in place": lambda t, x, v: (x * 2).index_add_(0, t.tensor([1, 1]), v),
        "put": lambda t, x, v: x.index_put((t.tensor([1, 1]),), v, accumulate=True),
        "put broadcast": lambda t, x, v: x.index_put(
            (t.tensor([[1], [1]]), t.tensor([0, 2])), v[:, :1], accumulate=True
        ),
        "mask": lambda t, x, v: x.index_put((x > 0,), v[0, 0], accumulate=True),
    }.items():
        yield Case("index_add", label, fn, (x, v))
    yield Case("index_add", "empty", lambda t, x, v: x.index_add(1, t.tensor([0, 0]), v), (draw(0, 3), draw(0, 2)))
    for label, fn in {
        "row": lambda t, x, v: _set(x * 2, 1, v[0]),
        "broadcast": lambda t, x, v: _set(x * 2, (slice(None), slice(1, 3)), v[0, :2]),
        "number": lambda t, x, v: _set(x * 2, (0,), 3.0) * v[0],
        "list": lambda t, x, v: _set(x * 2, ([2, 0],), v),
        "view and list": lambda t, x, v: _set(x * 2, (0, [3, 1]), v[0, 1:3]),
        "mask": lambda t, x, v: _set(x * 2, (x > 0,), v[0, 0]),
        "to a constant": lambda t, x, v: _set(t.zeros(3, 4, dtype=x.dtype), 1, v[0]) * x,
        "index_put": lambda t, x, v: t.index_put(x, (t.tensor([0, 2]),), v),
        "index_copy": lambda t, x, v: t.index_copy(x, 0, t.tensor([2, 0]), v),
        "index_fill": lambda t, x, v: t.index_fill(x, 1, t.tensor([0, -1]), 2.5) * v[0],
        "index_fill tensor": lambda t, x, v: x.index_fill(1, t.tensor([0, 2]), v[0, 0]),
        "masked_scatter": lambda t, x, v: t.masked_scatter(x, t.tensor([[True], [False], [True]]), v),
    }.items():
        yield Case("setitem", label, fn, (x, v))
    yield Case("setitem", "empty", lambda t, x, v: _set(x * 2, (slice(0, 0),), v), (draw(3, 4), draw(0, 4)))
    yield Case("setitem", "0-d", lambda t, x, v: _set(x * 2, (...,), v), (draw(), draw(seed=1)))
    yield Case("setitem", "0-d mask", lambda t, x, v: t.masked_scatter(x, t.tensor(True), v), (draw(), draw(2)))
    for label, fn in {
        "number": lambda t, x, v: t.masked_fill(x, x > 0, -1.5) * v[0],
        "tensor": lambda t, x, v: x.masked_fill(x > 0, v[0, 0]),
        "broadcast mask": lambda t, x, v: x.masked_fill(t.tensor([True, False, True, False]), 0.0) * v[0],
        "broadcast self": lambda t, x, v: x.masked_fill(t.tensor([[[True]], [[False]]]), v[1, 1]),
        "in place": lambda t, x, v: (x * 2).masked_fill_(t.tensor([True, False, True, False]), v[0, 0]),
        "infinite": lambda t, x, v: (
            t.softmax(x.masked_fill(t.tensor([True, False, True, False]), float("-inf")), 1) * v[0]
        ),
    }.items():
        yield Case("masked_fill", label, fn, (x, v))
    yield Case("masked_fill", "empty", lambda t, x: x.masked_fill(x > 0, 1.0), (draw(0, 3),))
    yield Case("masked_fill", "0-d", lambda t, x: x.masked_fill(t.tensor(True), 1.0), (draw(),))


def _set(x, index, value):
    x[index] = value
    return x


CASES = list(placing())
