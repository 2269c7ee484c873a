"""Connectionist temporal classification: the probability of all paths that spell a target.

A path goes through S = 2L + 1 positions: the L labels of the target, and a blank before, between and after them. It may
skip a blank between labels that differ. The array `paths` has two more columns before the S positions. Paths start in
the second of these two, so that the first step is like all others.

Source: Graves et al. 2006, ICML, "Connectionist Temporal Classification".
"""

from __future__ import annotations

from typing import Any

from ddp.ops.arrays import Array, ForwardResult, upcast
from ddp.ops.indexing import add_flat, positions
from ddp.ops.op import Gradients, Needs, Op, Saved


def _arrive(xp: Any, before: Array, skip: Any) -> tuple[Array, Array]:
    """Moves all paths by one step. Returns log P of each position after the step, (N, S), and shares, (3, N, S).

    P is the probability of the moves alone: the caller multiplies it by the probability of the step's label.
    shares: the parts of P from paths that were at the same position, at the one before, and at the one before that
    before: (N, S + 2), log P of each position before the step; skip: 0 where a path may skip a position, else -inf
    """
    ways = xp.stack([before[:, 2:], before[:, 1:-1], before[:, :-2] + skip])
    top = ways.max(axis=0)
    top = xp.where(top == -xp.inf, 0, top)
    shares = xp.exp(ways - top)
    sums = shares.sum(axis=0)
    nowhere = sums == 0
    sums = xp.where(nowhere, 1, sums)  # log 0 has an infinite derivative: times a gradient of 0, nan
    return xp.where(nowhere, -xp.inf, top + xp.log(sums)), shares / sums


def _depart(xp: Any, arrived: Array, before: Array, skip: Any) -> Array:
    """Moves probabilities one step back: from `arrived` (N, S), after the step, to the result (N, S + 2), before it."""
    parts = arrived * _arrive(xp, before, skip)[1]
    out = xp.zeros(before.shape, parts.dtype)
    out[:, 2:] += parts[0]
    out[:, 1:-1] += parts[1]
    out[:, :-2] += parts[2]
    return out


# z = -log P, P the sum over paths of prod_t e^x_t,n,label(t);  dx = g*(e^x - share of the paths with label c at t)
# The term e^x cancels in the backward of log_softmax. It is in dx because PyTorch has it there.
def _ctc_loss(
    xp: Any,
    x: Array,
    targets: Array,
    blank: int,
    input_lengths: Array,
    target_lengths: Array,
    zero_infinity: bool,
) -> ForwardResult:
    """x: (T, N, C), log P of labels; targets: (N, L); input_lengths, target_lengths: (N,); returns (N,)."""
    upcast_x = upcast(x)
    steps, n, _ = x.shape
    labels = xp.full((n, 2 * targets.shape[1] + 1), blank)
    labels[:, 1::2] = targets
    skip = xp.full(labels.shape, -xp.inf, upcast_x.dtype)
    skip[:, 1:2] = 0
    skip[:, 2:] = xp.where(labels[:, 2:] != labels[:, :-2], 0, -xp.inf)
    flat_index = positions(xp, xp.broadcast_to(labels, (steps, *labels.shape)), 2, x.shape)
    emitted = upcast_x.reshape(-1).take(flat_index)
    paths = xp.full((steps + 1, n, labels.shape[1] + 2), -xp.inf, upcast_x.dtype)
    paths[0, :, 1] = 0
    for step in range(steps):
        paths[step + 1, :, 2:] = _arrive(xp, paths[step], skip)[0] + emitted[step]
    ends = xp.arange(labels.shape[1]) == 2 * target_lengths[:, None]
    last = paths[input_lengths, xp.arange(n)]
    losses = xp.where(ends, -_arrive(xp, last, -xp.inf)[0], 0).sum(axis=1)
    lost = losses == xp.inf
    out = xp.where(lost, 0, losses) if zero_infinity else losses
    derivative = xp.where(lost, 0 if zero_infinity else xp.nan, 1)
    return out.astype(x.dtype), (paths, last, skip, flat_index, ends, input_lengths, derivative)


def _ctc_loss_backward(xp: Any, g: Array, needs: Needs, saved: Saved, residual: Any) -> Gradients:
    paths, last, skip, flat_index, ends, input_lengths, derivative = residual
    x = upcast(saved[0])
    ending = _depart(xp, ends.astype(x.dtype), last, -xp.inf)
    probability = 0
    passed = xp.empty(flat_index.shape, x.dtype)
    for step in reversed(range(len(x))):
        probability = probability + ending * (input_lengths == step + 1)[:, None]
        passed[step] = probability[:, 2:]
        probability = _depart(xp, probability[:, 2:], paths[step], skip)
    dx = xp.exp(x) - add_flat(xp, xp.zeros(x.size, x.dtype), flat_index, passed).reshape(x.shape)
    dx *= (g * derivative)[:, None]
    inside = xp.arange(len(x))[:, None] < input_lengths
    return (xp.where(inside[..., None], dx, 0).astype(g.dtype),)


ctc_loss = Op("ctc_loss", _ctc_loss, _ctc_loss_backward, inputs=("x",), saves=("x",), derived=True)
