"""Embeddings, and classes as one-hot vectors."""

from __future__ import annotations

from typing import Any, ClassVar

from ddp._device import on
from ddp._engine import no_grad
from ddp._tensor.base import apply, copy_if_needed, guarded_function, wrap
from ddp._tensor.core import Tensor
from ddp._tensor.creation import empty
from ddp._warnings import warn_once
from ddp.errors import ArgumentError, DtypeError, RangeError, ShapeError
from ddp.nn import init
from ddp.nn.module import Layer
from ddp.nn.parameter import Parameter
from ddp.ops import indexing


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

    padding_idx: a row that gets no gradient. max_norm: rows that are used and longer, by the norm of `norm_type`, are
    shortened in place first. scale_grad_by_freq: a row's gradient is divided by how often it occurs in the input.

    sparse: says once that the gradient is dense all the same.

    Raises: DtypeError, ShapeError; RangeError naming the first number out of range.
    """
    if sparse:
        warn_once("embedding(sparse=True): the gradient is dense here, with rows of 0; it has the memory of the table")
    if input.device is not weight.device:  # the op runs where the table is
        with on(weight.device):
            moved = input.to(weight.device)
            return embedding(moved, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    if input.dtype.kind not in "iu":
        raise DtypeError(f"embedding: input holds row numbers (int64), not {input.dtype}")
    if weight.ndim != 2:
        raise ShapeError(f"embedding: weight {tuple(weight.shape)}: expected (V, D)")
    rows, index = weight.shape[0], input.array
    if padding_idx is not None:
        padding_idx = _check_padding_idx("embedding", padding_idx, rows)
    message = "embedding: input {value} is not one of the {limit} rows 0 to {last}"
    index = indexing.check_index(weight.device.xp, index, 0, rows, RangeError, message)
    if max_norm is not None:
        _renormalize(weight, index, max_norm, norm_type)
    if weight.device.type != "cuda":  # on a GPU it is a new array already
        index = copy_if_needed(index, weight)
    out: Tensor = apply(
        indexing.embedding, (weight,), index=index, padding=padding_idx, by_frequency=scale_grad_by_freq
    )
    return out


def _check_padding_idx(name: str, padding_idx: int, rows: int) -> int:
    """padding_idx counted from the front. Raises: RangeError."""
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
def one_hot(input: Tensor, num_classes: int = -1) -> Tensor:
    """1 at the class number of each element, 0 elsewhere, int64. input: (...) of int64; result: (..., num_classes).

    num_classes: -1 takes the largest class + 1.

    Raises: DtypeError; RangeError for a class that does not exist; ArgumentError if the number cannot be inferred.
    """
    array, xp = input.array, input.device.xp
    if array.dtype != "int64":
        raise DtypeError(f"one_hot: expected class numbers of int64, got {array.dtype}")
    if num_classes < 0 and (num_classes != -1 or not array.size):
        raise ArgumentError(f"one_hot: num_classes={num_classes} for shape {array.shape}: expected a number of classes")
    if num_classes == -1:
        num_classes = max(int(array.max()) + 1, 0)
    message = "one_hot: class {value} is not one of the {limit} classes 0 to {last}"
    array = indexing.check_index(xp, array, 0, num_classes, RangeError, message)
    return wrap((array[..., None] == xp.arange(num_classes)).astype("int64"), input.device)


class Embedding(Layer, shown="num_embeddings embedding_dim"):
    """A table of vectors, looked up by number. input: integers, any shape; returns (*input, embedding_dim).

    weight: (num_embeddings, embedding_dim), normally distributed. padding_idx: a row that begins as zeros and gets no
    gradient. max_norm, norm_type, scale_grad_by_freq, sparse: see functional.embedding.

    Raises: RangeError for a padding_idx that is no row.
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
        super().__init__()
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = None if padding_idx is None else _check_padding_idx("Embedding", padding_idx, num_embeddings)
        self.max_norm = max_norm
        self.norm_type = norm_type
        self.scale_grad_by_freq = scale_grad_by_freq
        self.sparse = sparse
        shape = (num_embeddings, embedding_dim)
        if _weight is not None and tuple(_weight.shape) != shape:
            raise ShapeError(f"Embedding: weight {tuple(_weight.shape)}: expected {shape}")
        table = empty(shape, device=device, dtype=dtype) if _weight is None else _weight
        self.weight = Parameter(table, requires_grad=not _freeze)
        if _weight is None:
            self.reset_parameters()

    @classmethod
    def from_pretrained(
        cls,
        embeddings: Tensor,
        freeze: bool = True,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Embedding:
        """A layer on a given table, (V, D), whose memory it shares; `freeze`: not trained. Raises: ShapeError."""
        if embeddings.ndim != 2:
            raise ShapeError(f"Embedding.from_pretrained: table {tuple(embeddings.shape)}: expected (V, D)")
        rows, columns = embeddings.shape
        options = (padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
        return cls(rows, columns, *options, _weight=embeddings, _freeze=freeze)

    def reset_parameters(self) -> None:
        """Draws a new table; the padding row becomes zeros."""
        init.normal_(self.weight)
        if self.padding_idx is not None:
            with no_grad():
                self.weight[self.padding_idx] = 0

    def forward(self, input: Tensor) -> Tensor:
        """input: integers in [0, num_embeddings), any shape; returns (*input, embedding_dim)."""
        return embedding(
            input, self.weight, self.padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse
        )
