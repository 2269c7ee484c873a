"""The embedding layer."""

from __future__ import annotations

from typing import Any

from ddp._engine import no_grad
from ddp._tensor.core import Tensor
from ddp._tensor.creation import empty
from ddp.errors import ArgumentError, ShapeError
from ddp.nn import functional, init
from ddp.nn._module import Module, Parameter
from ddp.nn.functional._embedding import _padding


class Embedding(Module):
    """A table of vectors, looked up by number. input: integers, any shape; returns (*input, embedding_dim).

    weight: (num_embeddings, embedding_dim), normally distributed. padding_idx: a row that begins as zeros and gets no
    gradient. max_norm, norm_type, scale_grad_by_freq: see functional.embedding.

    Raises: RangeError for a padding_idx that is no row; ArgumentError for `sparse`, which is not supported.
    """

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
        if sparse:
            raise ArgumentError("Embedding: sparse gradients are not supported here; leave sparse=False")
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = None if padding_idx is None else _padding("Embedding", padding_idx, num_embeddings)
        self.max_norm = max_norm
        self.norm_type = norm_type
        self.scale_grad_by_freq = scale_grad_by_freq
        self.sparse = sparse
        if _weight is None:
            table = empty(num_embeddings, embedding_dim, device=device, dtype=dtype)
            self.weight = Parameter(table, requires_grad=not _freeze)
            self.reset_parameters()
        else:
            if tuple(_weight.shape) != (num_embeddings, embedding_dim):
                raise ShapeError(
                    f"Embedding: weight {tuple(_weight.shape)}: expected {(num_embeddings, embedding_dim)}"
                )
            self.weight = Parameter(_weight, requires_grad=not _freeze)

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
        """Draws the table anew; the padding row becomes zeros."""
        init.normal_(self.weight)
        if self.padding_idx is not None:
            with no_grad():
                self.weight[self.padding_idx] = 0

    def forward(self, input: Tensor) -> Tensor:
        """input: integers in [0, num_embeddings), any shape; returns (*input, embedding_dim)."""
        return functional.embedding(
            input, self.weight, self.padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse
        )

    def extra_repr(self) -> str:
        text = f"{self.num_embeddings}, {self.embedding_dim}"
        if self.padding_idx is not None:
            text += f", padding_idx={self.padding_idx}"
        if self.max_norm is not None:
            text += f", max_norm={self.max_norm}"
        if self.norm_type != 2:
            text += f", norm_type={self.norm_type}"
        if self.scale_grad_by_freq:
            text += f", scale_grad_by_freq={self.scale_grad_by_freq}"
        return text
