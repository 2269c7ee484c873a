"""Changes of shape, and views, as functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddp._tensor.core import Tensor
from ddp._tensor.indexing import broadcast_shape
from ddp._tensor.spelling import spelled
from ddp.errors import ArgumentError, ShapeError

Dims = int | Sequence[int]


def reshape(input: Tensor, shape: Sequence[int]) -> Tensor:
    """The same elements in another shape; one size may be -1."""
    return input.reshape(shape)


def ravel(input: Tensor) -> Tensor:
    """All dimensions joined into one."""
    return input.ravel()


def flatten(input: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    """Dimensions start_dim to end_dim (inclusive) joined into one."""
    return input.flatten(start_dim, end_dim)


def unflatten(input: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """Dimension `dim` cut into several of these sizes; one may be -1."""
    return input.unflatten(dim, sizes)


def transpose(input: Tensor, dim0: int, dim1: int) -> Tensor:
    """Two dimensions exchanged."""
    return input.transpose(dim0, dim1)


def swapaxes(input: Tensor, axis0: int, axis1: int) -> Tensor:
    """Two dimensions exchanged: transpose under NumPy's name."""
    return input.transpose(axis0, axis1)


def swapdims(input: Tensor, dim0: int, dim1: int) -> Tensor:
    """Two dimensions exchanged: transpose under another name."""
    return input.transpose(dim0, dim1)


def t(input: Tensor) -> Tensor:
    """The transpose of a matrix; vectors stay."""
    return input.t()


def permute(input: Tensor, dims: Sequence[int]) -> Tensor:
    """The dimensions in another order."""
    return input.permute(dims)


def movedim(input: Tensor, source: Dims, destination: Dims) -> Tensor:
    """Dimensions moved to other places; the rest keep their order."""
    return input.movedim(source, destination)


def moveaxis(input: Tensor, source: Dims, destination: Dims) -> Tensor:
    """Dimensions moved to other places: movedim under NumPy's name."""
    return input.movedim(source, destination)


@spelled
def squeeze(input: Tensor, dim: Dims | None = None) -> Tensor:
    """Without dimensions of size 1: all of them, or those of `dim` that are."""
    return input.squeeze(dim)


@spelled
def unsqueeze(input: Tensor, dim: int) -> Tensor:
    """With a new dimension of size 1 at `dim`."""
    return input.unsqueeze(dim)


def broadcast_to(input: Tensor, size: Sequence[int]) -> Tensor:
    """Dimensions of size 1, and new leading ones, repeated without copying."""
    return input.expand(size)


def broadcast_tensors(*tensors: Any) -> tuple[Tensor, ...]:
    """The tensors in the one shape that they broadcast to, without copying. Raises: ShapeError."""
    xs = _given(tensors)
    shape = broadcast_shape("broadcast_tensors", *[x.shape for x in xs])
    return tuple([x.expand(shape) for x in xs])


def broadcast_shapes(*shapes: Any) -> tuple[int, ...]:
    """What these shapes (tuples or numbers) broadcast to. Raises: ShapeError."""
    return broadcast_shape("broadcast_shapes", *[(n,) if isinstance(n, int) else tuple(n) for n in shapes])


def atleast_1d(*tensors: Any) -> Any:
    """With one dimension at least: 0-d becomes (1,). Several tensors give a tuple."""
    return _each(tensors, lambda x: x if x.ndim else x.reshape(1))


def atleast_2d(*tensors: Any) -> Any:
    """With two dimensions at least: (n,) becomes (1, n). Several tensors give a tuple."""
    return _each(tensors, lambda x: x if x.ndim > 1 else x.reshape(1, -1))


def atleast_3d(*tensors: Any) -> Any:
    """With three dimensions at least: (n,) becomes (1, n, 1), (m, n) becomes (m, n, 1). Several give a tuple."""
    return _each(tensors, lambda x: x if x.ndim > 2 else x.unsqueeze(-1) if x.ndim == 2 else x.reshape(1, -1, 1))


def _given(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """Tensors one by one, or as one sequence."""
    return tuple(tensors[0]) if len(tensors) == 1 and not isinstance(tensors[0], Tensor) else tensors


def _each(tensors: tuple[Any, ...], change: Any) -> Any:
    if len(tensors) == 1 and isinstance(tensors[0], Tensor):
        return change(tensors[0])
    return tuple([change(x) for x in _given(tensors)])


def meshgrid(*tensors: Any, indexing: str = "ij") -> tuple[Tensor, ...]:
    """Vectors (n0,), (n1,), ... as coordinates of a grid (n0, n1, ...), without copying; "xy": of (n1, n0, ...).

    Raises: ShapeError for more than one dimension; ArgumentError for another indexing, or no tensor.
    """
    xs: list[Any] = [x.reshape(-1) if x.ndim < 2 else x for x in _given(tensors)]
    if indexing not in ("ij", "xy"):
        raise ArgumentError(f"meshgrid: indexing is 'ij' or 'xy', not {indexing!r}")
    if not xs:
        raise ArgumentError("meshgrid: expected at least one tensor")
    for x in xs:
        if x.ndim > 1:
            raise ShapeError(f"meshgrid: expected vectors, got shape {x.shape}")
    swap = indexing == "xy" and len(xs) > 1
    if swap:
        xs[0], xs[1] = xs[1], xs[0]
    shape = [len(x) for x in xs]
    grids = [x.reshape([-1 if i == j else 1 for j in range(len(xs))]).expand(shape) for i, x in enumerate(xs)]
    if swap:
        grids[0], grids[1] = grids[1], grids[0]
    return tuple(grids)


def split(tensor: Tensor, split_size_or_sections: Dims, dim: int = 0) -> tuple[Tensor, ...]:
    """Stretches of one size along `dim`, the last one shorter if need be, or of the sizes given."""
    return tensor.split(split_size_or_sections, dim)


def split_with_sizes(input: Tensor, split_sizes: Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
    """Stretches of these sizes along `dim`."""
    return input.split_with_sizes(split_sizes, dim)


def chunk(input: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    """At most `chunks` stretches of one size along `dim`; the last one may be shorter."""
    return input.chunk(chunks, dim)


def tensor_split(input: Tensor, indices_or_sections: Dims, dim: int = 0) -> tuple[Tensor, ...]:
    """As many stretches as asked for, sizes differing by one at most; or cut before each of these indices."""
    return input.tensor_split(indices_or_sections, dim)


def unbind(input: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
    """The slices along `dim`, which vanishes."""
    return input.unbind(dim)


def narrow(input: Tensor, dim: int, start: Any, length: int) -> Tensor:
    """`length` elements along `dim`, from `start` on."""
    return input.narrow(dim, start, length)


def select(input: Tensor, dim: int, index: int) -> Tensor:
    """The slice at `index` along `dim`, which vanishes."""
    return input.select(dim, index)


def diagonal(input: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """The diagonal over two dimensions, as a last dimension: a view."""
    return input.diagonal(offset, dim1, dim2)


def as_strided(input: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int = 0) -> Tensor:
    """The elements of a contiguous tensor at these strides (in elements), as a view to read from."""
    return input.as_strided(size, stride, storage_offset)
