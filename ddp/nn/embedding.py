"""Embeddings, bags of embeddings, and one-hot vectors.

On a GPU, an error that depends on the numbers in a tensor is raised by the next call that waits for the GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from ddp._device import on, to_device
from ddp._engine import no_grad
from ddp._tensor.base import apply, copy_if_needed, guarded_function, wrap
from ddp._tensor.core import Tensor
from ddp._tensor.creation import empty, zeros
from ddp.errors import ArgumentError, DtypeError, RangeError, ShapeError, warn_once
from ddp.nn import init
from ddp.nn.module import Layer
from ddp.nn.parameter import Parameter
from ddp.ops import indexing
from ddp.ops.arrays import from_bfloat16

if TYPE_CHECKING:
    from typing_extensions import Self


@guarded_function
def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """weight[input]: the rows of a table. input: integers in [0, V), any shape; weight: (V, D); returns (*input, D).

    padding_idx: a row that gets no gradient. max_norm: looked-up rows with a larger norm (of order `norm_type`) are
    first scaled down to this norm, in place. scale_grad_by_freq: divides the gradient of a row by its number of
    occurrences in input. sparse: accepted; warns once that the gradient is dense.

    Raises: DtypeError, ShapeError; RangeError for a row number or padding_idx out of range, which the message names.
    """
    if sparse:
        warn_once("embedding(sparse=True): the gradient is dense here, with rows of 0; it has the memory of the table")
    if input.device is not weight.device:  # the op runs on the device of the table
        with on(weight.device):
            moved = input.to(weight.device)
            return embedding(moved, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    if input.dtype.kind not in "iu":
        raise DtypeError(f"embedding: input holds row numbers (int64), not {input.dtype}")
    if weight.ndim != 2:
        raise ShapeError(f"embedding: weight {tuple(weight.shape)}: expected (V, D)")
    rows = weight.shape[0]
    index = input.array
    if padding_idx is not None:
        padding_idx = _check_padding_idx("embedding", padding_idx, rows)
    message = "embedding: input {value} is not one of the {limit} rows 0 to {last}"
    index = indexing.check_index(weight.device.xp, index, 0, rows, RangeError, message)
    if max_norm is not None:
        _renormalize(weight, index, max_norm, norm_type)
    if weight.device.type != "cuda":  # on a GPU, check_index has made a copy
        index = copy_if_needed(index, weight)
    out: Tensor = apply(
        indexing.embedding, (weight,), index=index, padding=padding_idx, by_frequency=scale_grad_by_freq
    )
    return out


def _check_padding_idx(name: str, padding_idx: int, rows: int) -> int:
    """Returns padding_idx, counted from the front if it is negative. Raises: RangeError."""
    if not -rows <= padding_idx < rows:
        raise RangeError(f"{name}: padding_idx {padding_idx} is not one of the {rows} rows")
    return padding_idx % rows


def _renormalize(weight: Tensor, index: Any, max_norm: float, norm_type: float) -> None:
    xp = weight.device.xp
    used = xp.unique(index)
    with no_grad():
        long = weight[wrap(used, weight.device)]
        norms = xp.linalg.norm(long.array.astype("float64"), norm_type, axis=1)
        over = norms > max_norm
        if over.any():
            shorter = long.array[over] * (max_norm / (norms[over] + 1e-7))[:, None].astype(weight.dtype)
            weight[wrap(used[over], weight.device)] = wrap(shorter, weight.device)


@guarded_function
def embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """The sum, mean or maximum of the rows weight[input] of each bag; zeros for an empty bag. Returns (B, D).

    input: (B, N), where each row is a bag, or (N,), where bag i begins at offsets[i]; weight: (V, D); offsets: (B,), or
    with `include_last_offset` (B + 1,), ending in N. mode: "sum", "mean" or "max". per_sample_weights: of the input's
    shape; with mode="sum", each row is multiplied by its weight. padding_idx: a row that is left out of the bags. The
    other arguments: see embedding.

    Raises: DtypeError, ShapeError; RangeError for a row number out of range, or for offsets that do not begin with 0,
    descend, exceed N, or with include_last_offset do not end in N; ArgumentError for another mode, or for
    per_sample_weights that do not fit the mode or the input.
    """
    if mode not in ("sum", "mean", "max"):
        raise ArgumentError(f"embedding_bag: mode is 'sum', 'mean' or 'max', not {mode!r}")
    if per_sample_weights is not None and (mode != "sum" or per_sample_weights.shape != input.shape):
        raise ArgumentError(
            f"embedding_bag: per_sample_weights {per_sample_weights.shape} with mode={mode!r}: expected 'sum', and "
            f"the input's shape {input.shape}"
        )
    device = weight.device
    xp = weight.device.xp
    count, bag = _bags(xp, device, input, offsets, include_last_offset)
    index = input.to(device).reshape(-1)
    if padding_idx is not None:
        padding_idx = _check_padding_idx("embedding_bag", padding_idx, weight.shape[0])
        bag = xp.where(index.array == padding_idx, count, bag)  # padding goes to one more bag, which is dropped
    rows = embedding(index, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    sizes = xp.bincount(bag, minlength=count + 1)
    if mode == "max":
        rows = rows.gather(0, wrap(_largest(xp, rows.array, bag, sizes), device))
        bag = xp.flatnonzero(sizes)
    elif per_sample_weights is not None:
        rows = rows * per_sample_weights.reshape(-1, 1)
    out = zeros((count + 1, rows.shape[1]), dtype=rows.dtype, device=device).index_add(0, wrap(bag, device), rows)
    if mode == "mean":
        out = out / wrap(xp.maximum(sizes, 1)[:, None], device)
    return out[:-1]


def _bags(xp: Any, device: Any, input: Tensor, offsets: Tensor | None, include_last: bool) -> tuple[int, Any]:
    """The number of bags, and the bag of each element of the input."""
    if input.ndim == 2 and offsets is None:
        return input.shape[0], xp.repeat(xp.arange(input.shape[0]), input.shape[1])
    if input.ndim != 1 or offsets is None or offsets.ndim != 1 or offsets.array.dtype.kind != "i":
        raise ShapeError(f"embedding_bag: input {input.shape}: expected (B, N) alone, or (N,) and int64 offsets (B,)")
    n = input.shape[0]
    starts = to_device(offsets.array, device)
    lengths = xp.diff(starts, append=n)
    fine = (lengths >= 0).all() & (lengths.sum() == n) & ((lengths[-1:] == 0).any() | (not include_last))
    message = f"embedding_bag: offsets begin with 0, do not descend, and end within the {n} numbers of the input"
    indexing.check_all(xp, fine, RangeError, message)
    # Without the first offset, 0, no bag number is -1. This matters for wrong offsets, which a GPU reports later.
    return starts.size - include_last, xp.searchsorted(starts[1:], xp.arange(n), side="right")


def _largest(xp: Any, rows: Any, bag: Any, sizes: Any) -> Any:
    """Returns the row number of the maximum in each column of each non-empty bag. Of equal maxima, takes the first.

    rows: (N, D); bag: (N,); sizes: the number of rows in each bag
    """
    order = xp.argsort(-from_bfloat16(xp, rows), axis=0, kind="stable")
    order = xp.take_along_axis(order, xp.argsort(bag[order], axis=0, kind="stable"), axis=0)
    return order[(xp.cumsum(sizes) - sizes)[sizes > 0]]


@guarded_function
def one_hot(input: Tensor, num_classes: int = -1) -> Tensor:
    """1 at the class number of each element, 0 elsewhere, int64. input: (...) of int64; result: (..., num_classes).

    num_classes: -1 means the largest class + 1.

    Raises: DtypeError unless int64; RangeError for a class that does not exist; ArgumentError for a num_classes below
    -1, or for -1 and an empty input.
    """
    array = input.array
    xp = input.device.xp
    if array.dtype != "int64":
        raise DtypeError(f"one_hot: expected class numbers of int64, got {array.dtype}")
    if num_classes < 0 and (num_classes != -1 or not array.size):
        raise ArgumentError(f"one_hot: num_classes={num_classes} for shape {array.shape}: expected a number of classes")
    if num_classes == -1:
        num_classes = max(int(array.max()) + 1, 0)
    message = "one_hot: class {value} is not one of the {limit} classes 0 to {last}"
    array = indexing.check_index(xp, array, 0, num_classes, RangeError, message)
    return wrap((array[..., None] == xp.arange(num_classes)).astype("int64"), input.device)


class _Table(Layer, shown="num_embeddings embedding_dim"):
    """The base of Embedding and EmbeddingBag: the table, and the arguments that both have."""

    padding_idx: int | None

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None,
        max_norm: float | None,
        norm_type: float,
        scale_grad_by_freq: bool,
        sparse: bool,
        _weight: Tensor | None,
        device: Any,
        dtype: Any,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        shape = (num_embeddings, embedding_dim)
        if _weight is not None and tuple(_weight.shape) != shape:
            raise ShapeError(f"{name}: weight {tuple(_weight.shape)}: expected {shape}")
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = None if padding_idx is None else _check_padding_idx(name, padding_idx, num_embeddings)
        self.max_norm = max_norm
        self.norm_type = norm_type
        self.scale_grad_by_freq = scale_grad_by_freq
        self.sparse = sparse
        self.weight = Parameter(empty(shape, device=device, dtype=dtype) if _weight is None else _weight)
        if _weight is None:
            self.reset_parameters()

    @classmethod
    def from_pretrained(cls, embeddings: Tensor, freeze: bool = True, *args: Any, **settings: Any) -> Self:
        """Makes a layer that shares the memory of a given table, (V, D). freeze: the table is not trained.

        args, settings: the arguments of the class after `embedding_dim`
        Raises: ShapeError unless two-dimensional; DtypeError unless floating; RangeError for a padding_idx that is not
        a row.
        """
        if embeddings.ndim != 2:
            raise ShapeError(f"{cls.__name__}.from_pretrained: table {tuple(embeddings.shape)}: expected (V, D)")
        make: Any = cls
        layer: Self = make(*embeddings.shape, *args, _weight=embeddings, **settings)
        layer.weight.requires_grad_(not freeze)
        return layer

    def reset_parameters(self) -> None:
        """Draws a new table; the padding row becomes zeros."""
        init.normal_(self.weight)
        if self.padding_idx is not None:
            with no_grad():
                self.weight[self.padding_idx] = 0


class Embedding(_Table):
    """A table of vectors, looked up by number. input: integers, any shape; returns (*input, embedding_dim).

    weight: (num_embeddings, embedding_dim), normally distributed. padding_idx: a row that begins as zeros and gets no
    gradient. max_norm, norm_type, scale_grad_by_freq, sparse: see functional.embedding.

    Raises: RangeError for a padding_idx that is not a row.
    """

    _usual: ClassVar = {
        "padding_idx": None,
        "max_norm": None,
        "norm_type": 2,
        "scale_grad_by_freq": False,
        "sparse": False,
    }

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Tensor | None = None,
        _freeze: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        rows = max_norm, norm_type, scale_grad_by_freq, sparse
        super().__init__(num_embeddings, embedding_dim, padding_idx, *rows, _weight, device, dtype)
        self.weight.requires_grad_(not _freeze)

    def forward(self, input: Tensor) -> Tensor:
        """input: integers in [0, num_embeddings), any shape; returns (*input, embedding_dim)."""
        rows = self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse
        return embedding(input, self.weight, self.padding_idx, *rows)


class EmbeddingBag(_Table):
    """Looks up the vectors of each bag of numbers, and takes their sum, mean or maximum: (B, embedding_dim).

    input: row numbers, (B, N), where each row is a bag; or (N,), where bag i begins at offsets[i].

    weight: (num_embeddings, embedding_dim), normally distributed. The settings: see functional.embedding_bag.

    Raises: RangeError for a padding_idx that is not a row.
    """

    _usual: ClassVar = {
        "max_norm": None,
        "norm_type": 2,
        "scale_grad_by_freq": False,
        "mode": "",
        "padding_idx": None,
    }

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        _weight: Tensor | None = None,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        rows = max_norm, norm_type, scale_grad_by_freq, sparse
        super().__init__(num_embeddings, embedding_dim, padding_idx, *rows, _weight, device, dtype)
        self.mode = mode
        self.include_last_offset = include_last_offset

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """input: (B, N), or (N,) with offsets (B,) or (B + 1,); per_sample_weights: input's shape; returns (B, D)."""
        return embedding_bag(
            input,
            self.weight,
            offsets,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.mode,
            self.sparse,
            per_sample_weights,
            self.include_last_offset,
            self.padding_idx,
        )

    def extra_repr(self) -> str:
        return super().extra_repr().replace(f"mode={self.mode}", f"mode={self.mode!r}")
