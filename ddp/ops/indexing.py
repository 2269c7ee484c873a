"""Indexing, gather and scatter, embedding, and the checks of indices."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ddp.ops.arrays import Array, ForwardResult, Ints, array_function, shape_of, unbroadcast, upcast, where_or_zero
from ddp.ops.op import Gradients, Needs, Op, Saved

# Indexing: backward adds each gradient to the element that was read; an element may be read more than once.

Places = tuple[Any, ...]  # one entry per axis, an array or slice(None); a mask is one entry for all of its axes


# z = x[index], a view: index has integers, slices, None and Ellipsis;  dx = g at index, 0 elsewhere
def _getitem(xp: Any, x: Array, index: Any) -> ForwardResult:
    return x[index], (x.shape, index)


def _getitem_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    shape, index = residual
    dx = xp.zeros(shape, g.dtype)
    dx[index] = g
    return (dx,)


getitem = Op("getitem", _getitem, _getitem_backward, inputs=("x",), view=True)


# z = x, but v at x[steps[0]][steps[1]]..;  dx = g, but 0 there;  dv = g there, summed to the shape of v
def _setitem(xp: Any, x: Array, v: Any, steps: tuple[Any, ...], within: bool = False) -> ForwardResult:
    # within: writes to x itself and returns it, which saves in-place operations two passes over x.
    out = x if within else x.copy()
    assign(xp, _stepped(out, steps), steps[-1], v)
    return out, (steps, shape_of(v))


def _setitem_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    steps, shape = residual
    dx = dv = None
    if needs[0]:
        dx = xp.array(g)  # a 0-d gradient may be a NumPy scalar, which cannot be written to
        assign(xp, _stepped(dx, steps), steps[-1], 0)
    if needs[1]:
        dv = unbroadcast(_stepped(g, steps)[steps[-1]], shape)
    return dx, dv


@array_function
def assign(xp: Any, x: Array, step: Any, v: Any) -> None:
    """x[step] = v."""
    x[step] = v


def _stepped(x: Array, steps: tuple[Any, ...]) -> Array:
    """Applies all steps except the last. Returns `x`, or a view of it."""
    for step in steps[:-1]:
        x = x[step]
    return x


setitem = Op("setitem", _setitem, _setitem_backward, inputs=("x", "v"), supports_bfloat16=True)


# z = x[places];  dx = g added up at places
def _index(xp: Any, x: Array, places: Places) -> ForwardResult:
    axes = [i for i, place in enumerate(places) if not isinstance(place, slice)]
    if len(axes) == 1 and places[axes[0]].dtype.kind != "b" and x.size:
        # x[places], but faster. take() would not check the index of an empty array.
        return x.take(places[axes[0]], axis=axes[0]), (x.shape, places)
    return x[places], (x.shape, places)


def _index_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    return (scatter_to_zeros(xp, g, *residual),)


index = Op("index", _index, _index_backward, inputs=("x",), supports_bfloat16=True)


# z[..i..] = x[..index[..i..]..] along axis `dim`;  dx = g added up at index
def _gather(xp: Any, x: Array, index: Array, dim: int, distinct: bool = False) -> ForwardResult:
    # distinct: index names no element twice, for example because it sorts x.
    flat_index = positions(xp, index, dim, x.shape)
    return x.reshape(-1).take(flat_index), (x.shape, flat_index, distinct or index.shape[dim] == 1)


def _gather_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    shape, flat_index, distinct = residual
    dx = xp.zeros(math.prod(shape), g.dtype)
    if distinct:
        dx[flat_index] = g
    else:
        dx = add_flat(xp, dx, flat_index, g)
    return (dx.reshape(shape),)


gather = Op("gather", _gather, _gather_backward, inputs=("x",), supports_bfloat16=True)


def positions(xp: Any, index: Array, dim: int, shape: Ints) -> Array:
    """For each element that `gather` reads with `index` along `dim`: its position in a flattened array of `shape`.

    index: not negative; its axes except `dim` are no longer than those of `shape`. Returns a new int64 array of the
    shape of index.
    """
    flat_index = xp.multiply(index, math.prod(shape[dim + 1 :]), dtype="int64")
    base: Any = None
    for i, n in enumerate(index.shape):
        if i != dim:
            axis = (xp.arange(n) * math.prod(shape[i + 1 :])).reshape([-1 if i == j else 1 for j in range(index.ndim)])
            base = axis if base is None else base + axis
    if base is not None:
        flat_index += base
    return flat_index


@array_function
def add_flat(xp: Any, x: Array, flat_index: Array, g: Array) -> Array:
    """Adds each element of `g` to the vector `x` at flat_index, in place if possible, and returns the result.

    flat_index: of the shape of g, 0 <= flat_index < len(x)
    """
    sums, terms = map(upcast, (x, g))
    xp.add.at(sums, flat_index.reshape(-1), terms.reshape(-1))
    return sums.astype(x.dtype, copy=False)


def flat(places: Places, shape: Ints) -> Array:
    """For each element at `places`: its position in a flattened array of `shape`.

    places: an index array (int) for each axis; negative indices count from the end
    """
    flat_index: Any = 0
    for i, (place, n) in enumerate(zip(places, shape, strict=True)):
        step = place.astype("int64", copy=False)
        flat_index = flat_index + (step + (step < 0) * n) * math.prod(shape[i + 1 :])
    return flat_index


def scatter_to_zeros(xp: Any, g: Array, shape: Ints, places: Places) -> Array:
    """Zeros of `shape`, with each element of `g` added where x[places] reads it. g: of the shape of x[places]."""
    axes = [i for i, place in enumerate(places) if not isinstance(place, slice)]
    if len(axes) == 1 and places[axes[0]].dtype.kind == "b":  # a mask selects an element at most once
        dx = xp.zeros(shape, g.dtype)
        dx[places] = g
        return dx
    arrays = xp.broadcast_arrays(*[places[i] for i in axes])
    index_ndim = arrays[0].ndim
    # The dimensions of the index arrays start in g at the first array's axis; at 0 if a slice is between the arrays.
    first = axes[0] if axes[-1] - axes[0] == len(axes) - 1 else 0
    sliced_axes = [i for i in range(len(shape)) if i not in axes]
    order = [*range(first, first + index_ndim), *range(first), *range(first + index_ndim, g.ndim)]
    sizes = tuple(shape[i] for i in axes)
    sliced_sizes = tuple(shape[i] for i in sliced_axes)
    rows = g.transpose(order).reshape(arrays[0].size, math.prod(sliced_sizes))
    sums = add_rows(xp, math.prod(sizes), flat(arrays, sizes).reshape(-1), rows).reshape(sizes + sliced_sizes)
    back = [0] * len(shape)
    for position, axis in enumerate((*axes, *sliced_axes)):
        back[axis] = position
    return sums.transpose(back)


def add_rows(xp: Any, length: int, row_index: Array, g: Array, out: Array | None = None) -> Array:
    """Zeros (length, D), with row i of `g` (N, D) added at row row_index[i]. row_index: (N,), 0 <= row_index < length.

    out: memory for the result, (length, D), or None. Used only if it is C-contiguous and has the dtype of the sums
    """
    rows = upcast(g)
    if out is None or out.dtype != rows.dtype or not out.flags.c_contiguous:
        out = xp.empty((length, g.shape[1]), rows.dtype)
    out[...] = 0
    if g.size:
        add_rows_into(xp, row_index, rows, out)
    return out.astype(g.dtype, copy=False)


def _by_element(xp: Any, row_index: Array, g: Array, out: Array) -> None:
    width = g.shape[1]
    if width > 1:
        row_index = (row_index[:, None] * width + xp.arange(width)).reshape(-1)
    xp.add.at(out.reshape(-1), row_index, g.reshape(-1))


@array_function
def add_rows_into(xp: Any, row_index: Array, g: Array, out: Array) -> None:
    """Adds row i of `g` (N, D) to out[row_index[i]]. out: zeros (M, D), C-contiguous."""
    # add.at adds single elements: 0.47 ms for 2048 rows of 128 elements into 1000 rows. The code below takes 0.30 ms.
    # It sorts the rows by index. Then it adds every second row of each index to the row before it, and repeats this
    # until one row of each index is left. Narrow rows are not worth a sort.
    n, width = g.shape
    if width < 64 or n < 64:
        _by_element(xp, row_index, g, out)
        return
    if len(out) <= 1 << 16:
        row_index = row_index.astype(xp.uint16)  # NumPy sorts 16-bit integers by radix
    order = row_index.argsort(kind="stable")
    row_index = row_index[order]
    first = xp.empty(n, bool)
    first[0] = True
    xp.not_equal(row_index[1:], row_index[:-1], out=first[1:])
    starts = xp.flatnonzero(first)
    rank = xp.arange(n) - xp.repeat(starts, xp.diff(xp.append(starts, n)))
    rows = xp.arange(n)
    sums = g[order]
    while True:
        odd = xp.flatnonzero(rank & 1)
        if not odd.size:
            break
        sums[rows[odd - 1]] += sums[rows[odd]]
        even = xp.flatnonzero((rank & 1) == 0)
        rows = rows[even]
        rank = rank[even] >> 1
    out[row_index[starts]] = sums[starts]


# Embedding: looks up rows of a table by number. Backward adds up the gradients of each row of the table.


# z = w[index];  dw = g added up at index, 0 at padding; by_frequency: each row divided by its count in index
def _embedding(xp: Any, w: Array, index: Array, padding: int | None, by_frequency: bool) -> ForwardResult:
    """w: (V, D), index: any shape, 0 <= index < V."""
    return xp.take(w, index, axis=0), (w.shape, index, padding, by_frequency)


def _embedding_backward(
    xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any, grad_outs: Saved = (None,)
) -> Gradients:
    shape, index, padding, by_frequency = residual
    row_index = index.reshape(-1)
    rows = g.reshape(index.size, shape[1])
    if by_frequency:
        rows = rows / xp.bincount(row_index, minlength=shape[0])[row_index][:, None].astype(g.dtype)
    dw = add_rows(xp, shape[0], row_index, rows, grad_outs[0])
    if padding is not None:
        dw[padding] = 0
    return (dw,)


embedding = Op("embedding", _embedding, _embedding_backward, inputs=("w",), grad_out=True)


# Writing by index: x with values written to, or added at, some places. Overwritten elements get a gradient of 0.
#
# `within`: writes to x itself and returns it, which saves in-place operations two passes over x.


def _writing(write: Callable[..., Any]) -> Callable[..., ForwardResult]:
    """Makes a forward from `write(xp, out, v, ...) -> residual`: `out` is a copy of x, or x itself."""

    def forward(xp: Any, x: Array, v: Any, within: bool = False, **parameters: Any) -> ForwardResult:
        out = x if within else x.copy()
        return out, write(xp, out, v, **parameters)

    return forward


# z = x with v added at places;  dx = g;  dv = g at places, summed to the shape of v
def _index_add(xp: Any, out: Array, v: Any, places: Places) -> Any:
    shape = out[places].shape
    out += scatter_to_zeros(xp, xp.broadcast_to(xp.asarray(v, out.dtype), shape), out.shape, places)
    return places, shape_of(v)


def _index_add_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    places, shape = residual
    return g if needs[0] else None, unbroadcast(g[places], shape) if needs[1] else None


index_add = Op("index_add", _writing(_index_add), _index_add_backward, inputs=("x", "v"))


# z = x, but v[..i..] at [..index[..i..]..] along axis `dim`;  dx = g, but 0 there;  dv = g there
def _scatter(xp: Any, out: Array, v: Any, index: Array, dim: int) -> Any:
    flat_index = positions(xp, index, dim, out.shape)
    flat = out.reshape(-1)
    flat[flat_index] = _crop(v, index)
    _store(out, flat)
    return flat_index, shape_of(v)


def _scatter_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    flat_index, shape = residual
    dx = dv = None
    if needs[0]:
        dx = xp.array(g, order="C")
        dx.reshape(-1)[flat_index] = 0
    if needs[1]:
        dv = _uncrop(xp, g.reshape(-1).take(flat_index), shape)
    return dx, dv


def _store(out: Array, flat: Array) -> None:
    """Copies `flat`, which is `out` as a vector, back into `out`, unless `flat` is a view of `out`."""
    if not out.flags.c_contiguous:
        out[...] = flat.reshape(out.shape)


def _crop(v: Any, index: Array) -> Any:
    """The part of `v` that `index` covers; if `v` is a number, `v`."""
    return v[tuple(map(slice, index.shape))] if shape_of(v) else v


def _uncrop(xp: Any, g: Array, shape: Ints) -> Array:
    if g.shape == shape:
        return g
    out = xp.zeros(shape, g.dtype)
    out[tuple(map(slice, g.shape))] = g
    return out


scatter = Op("scatter", _writing(_scatter), _scatter_backward, inputs=("x", "v"), supports_bfloat16=True)


# z = x with v[..i..] added at [..index[..i..]..] along axis `dim`;  dx = g;  dv = g there
def _scatter_add(xp: Any, out: Array, v: Array, index: Array, dim: int) -> Any:
    flat_index = positions(xp, index, dim, out.shape)
    flat = out.reshape(-1)
    sums = add_flat(xp, flat, flat_index, _crop(v, index))
    if sums is flat:
        _store(out, flat)
    else:
        out[...] = sums.reshape(out.shape)
    return flat_index, v.shape


def _scatter_add_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    flat_index, shape = residual
    return g if needs[0] else None, _uncrop(xp, g.reshape(-1).take(flat_index), shape) if needs[1] else None


scatter_add = Op("scatter_add", _writing(_scatter_add), _scatter_add_backward, inputs=("x", "v"))


# z = x, but v where `mask` (both broadcast to x);  dx = g, but 0 there;  dv = g there, summed to the shape of v
def _masked_fill(xp: Any, out: Array, v: Any, mask: Array) -> Any:
    xp.copyto(out, v, casting="unsafe", where=mask)
    return mask, shape_of(v)


def _masked_fill_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    mask, shape = residual
    dx = where_or_zero(xp, ~mask, g) if needs[0] else None
    return dx, unbroadcast(where_or_zero(xp, mask, g), shape) if needs[1] else None


masked_fill = Op(
    "masked_fill", _writing(_masked_fill), _masked_fill_backward, inputs=("x", "v"), supports_bfloat16=True
)


# Checks of all elements of an array. On the CPU they raise at once; on a GPU, the next call that waits for it raises.


@array_function
def check_all(xp: Any, fine: Array, error: type[Exception], message: str) -> None:
    """Raises `error` if any of `fine` (bool) is False; on a GPU, at the next call that waits for it."""
    if not fine.all():
        raise error(message)


@array_function
def check_index(xp: Any, index: Array, low: int, high: int, error: type[Exception], message: str) -> Array:
    """Checks that all of `index` (integers) are from `low` to high - 1, and returns it.

    On a GPU it returns a new int64 array, in which `high` is added to negative indices.
    message: a format with {value}, {limit} (high) and {last} (high - 1).

    Raises: `error` for an index out of range; on a GPU, at the next call that waits for it.
    """
    if (wrong := first_outside(index, low, high)) is not None:
        raise error(message.format(value=wrong, limit=high, last=high - 1))
    return index


def first_outside(index: Array, low: int, high: int) -> int | None:
    """The first of `index` (integers) that is not from `low` to high - 1; None if all are."""
    # Read as unsigned, a negative number is larger than any size: one pass instead of two.
    if index.size == 0 or (
        index.view(f"u{index.itemsize}").max() < high if low == 0 else index.min() >= low and index.max() < high
    ):
        return None
    return int(index[(index < low) | (index >= high)].reshape(-1)[0])


@array_function
def check_targets(
    xp: Any, target: Array, ignored: int, classes: int, error: type[Exception], message: str
) -> tuple[Array, Array | None]:
    """Checks that `target` (int64) has class numbers from 0 to classes - 1, or `ignored`.

    Returns: the targets, and a mask (bool) of those that are not ignored. On the CPU the mask is None if none is
    ignored. On a GPU the ignored targets are replaced by 0, and there is always a mask.
    message: a format with {value}, {limit}, {last}.

    Raises: `error` for any other target; on a GPU, at the next call that waits for it.
    """
    # Read as unsigned, a negative number is huge: one pass finds targets that are negative or too large.
    if not target.size or (target.view("uint64").max() < classes and not 0 <= ignored < classes):
        return target, None
    keep = target != ignored
    wrong = keep & ((target < 0) | (target >= classes))
    if wrong.any():
        raise error(message.format(value=int(target[wrong][0]), limit=classes, last=classes - 1))
    return target, None if keep.all() else keep
