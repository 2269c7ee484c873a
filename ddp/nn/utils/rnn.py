"""Sequences of unequal length as one tensor, for recurrent layers and attention."""

from __future__ import annotations

from collections.abc import Sequence

from ddp._tensor.core import Tensor
from ddp._tensor.creation import full
from ddp._tensor.functions import cat, stack
from ddp.errors import ArgumentError, ShapeError

__all__ = ["pad_sequence", "unpad_sequence"]


def pad_sequence(
    sequences: Sequence[Tensor], batch_first: bool = False, padding_value: float = 0.0, padding_side: str = "right"
) -> Tensor:
    """Stacks N tensors (L_i, *), padded with padding_value: (L, N, *), or (N, L, *) if batch_first. L: the largest L_i.

    padding_side: "right" pads after a sequence, "left" before it. Raises: ShapeError unless the sizes after the first
    agree; ArgumentError for another side or no sequence.
    """
    if padding_side not in ("left", "right"):
        raise ArgumentError(f"pad_sequence: padding_side is 'left' or 'right', not {padding_side!r}")
    tensors = list(sequences)
    if not tensors:
        raise ArgumentError("pad_sequence: expected at least one sequence")
    if any(x.ndim == 0 or tuple(x.shape[1:]) != tuple(tensors[0].shape[1:]) for x in tensors):
        shapes = ", ".join(str(tuple(x.shape)) for x in tensors)
        raise ShapeError(f"pad_sequence: sequences of shapes {shapes}: expected (L_i, *) with one *")
    longest = max(x.shape[0] for x in tensors)
    padded = []
    for x in tensors:
        ends = full((longest - x.shape[0], *x.shape[1:]), padding_value, dtype=x.dtype, device=x.device)
        padded.append(cat([x, ends] if padding_side == "right" else [ends, x]))
    return stack(padded, 0 if batch_first else 1)


def unpad_sequence(
    padded_sequences: Tensor, lengths: Tensor | Sequence[int], batch_first: bool = False
) -> list[Tensor]:
    """Splits a batch that pad_sequence has padded on the right into sequences, (L_i, *) each. lengths: (N,).

    Raises: ShapeError unless there is a length for each sequence.
    """
    along = 0 if batch_first else 1
    sizes = [int(n) for n in (lengths.tolist() if isinstance(lengths, Tensor) else lengths)]
    if padded_sequences.ndim < 2 or padded_sequences.shape[along] != len(sizes):
        raise ShapeError(f"unpad_sequence: {len(sizes)} lengths for a batch {tuple(padded_sequences.shape)}")
    return [x[:n] for x, n in zip(padded_sequences.unbind(along), sizes, strict=True)]
