"""Connectionist temporal classification: a loss for labels whose positions in a sequence are not known.

On a GPU, the error for a label that does not exist is raised by the next call that waits for the GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ddp._device import to_device
from ddp._tensor.base import apply, guarded_function, wrap
from ddp._tensor.core import Tensor
from ddp._tensor.operands import floating
from ddp.errors import RangeError, ShapeError
from ddp.nn.loss import _Loss, _positional, _reduce_losses
from ddp.ops import ctc, indexing


@guarded_function
@_positional("")
def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """-log of the probability that the labels of T steps, with repeats and then blanks removed, are the target.

    log_probs: (T, N, C) from log_softmax, or (T, C); targets: int64, (N, L), or (sum(target_lengths),) one after
    another. input_lengths, target_lengths: (N,) tensors or sequences, or a number for (T, C). reduction: "mean" first
    divides each loss by the length of its target. zero_infinity: the loss of a target that is too long for its input is
    0, not infinity.

    As in PyTorch, log_probs gets the gradient of the logits. Backward of log_softmax passes it on unchanged.

    Raises: ShapeError for shapes or lengths that do not fit, or targets that are not integers; RangeError for a label
    or a blank that does not exist; ArgumentError for another reduction.
    Source: Graves et al. 2006, ICML, "Connectionist Temporal Classification".
    """
    single = log_probs.ndim == 2
    x: Any = log_probs.unsqueeze(1) if single else log_probs
    if x.ndim != 3 or not targets.ndim or targets.array.dtype.kind != "i":
        raise ShapeError(
            f"ctc_loss: log_probs {log_probs.shape}, targets {targets.shape}: expected (T, N, C), and int64 (N, L)"
        )
    device = x.device
    xp = x.device.xp
    (steps, n, classes) = x.shape
    if not 0 <= blank < classes:
        raise RangeError(f"ctc_loss: blank {blank} is not one of the {classes} labels")
    times = _lengths("input_lengths", input_lengths, n, steps)
    sizes = _lengths("target_lengths", target_lengths, n, targets.shape[-1])
    lengths = xp.asarray(sizes)
    used = xp.arange(targets.shape[1] if targets.ndim == 2 else sizes.max(initial=0)) < lengths[:, None]
    if targets.shape not in (used.shape, (sizes.sum(),)):
        raise ShapeError(f"ctc_loss: targets {targets.shape} for {n} inputs with targets of {sizes.tolist()} labels")
    labels = to_device(targets.array, device)
    if labels.ndim == 1 and labels.size:  # pads each target to a row of labels; the padding is not used
        starts = np.cumsum(sizes) - sizes
        rows = np.minimum(starts[:, None] + np.arange(used.shape[1]), labels.size - 1)
        labels = labels[xp.asarray(rows)]
    table = xp.where(used, labels, blank) if labels.size else xp.full(used.shape, blank)
    message = "ctc_loss: target {value} is not one of the {limit} labels 0 to {last}"
    table = indexing.check_index(xp, table, 0, classes, RangeError, message)
    settings = {"blank": blank, "zero_infinity": zero_infinity, "input_lengths": xp.asarray(times)}
    sample_losses = apply(ctc.ctc_loss, (floating(x),), targets=table, target_lengths=lengths, **settings)
    if reduction == "mean":
        sample_losses = sample_losses / wrap(xp.maximum(lengths, 1), device)
    return sample_losses.squeeze(0) if single and reduction == "none" else _reduce_losses(sample_losses, reduction)


def _lengths(name: str, given: Any, n: int, limit: int) -> Any:
    """Copies lengths to the host. Raises: ShapeError unless there are n lengths, each from 0 to the limit."""
    lengths = np.asarray(given.tolist() if isinstance(given, Tensor) else given, np.int64).reshape(-1)
    if lengths.shape != (n,) or not ((lengths >= 0) & (lengths <= limit)).all():
        raise ShapeError(f"ctc_loss: {name} {lengths.tolist()}: expected {n} lengths of 0 to {limit}")
    return lengths


class CTCLoss(_Loss, function=ctc_loss, inputs=4):
    """-log of the probability that the labels of T steps, with repeats and then blanks removed, are the target.

    log_probs: (T, N, C) or (T, C); targets: (N, L) or (sum(target_lengths),). Raises when called: see
    functional.ctc_loss.
    """

    def extra_repr(self) -> str:
        return ""
