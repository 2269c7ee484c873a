"""Gradient buckets: many small all-reduces cost latency; one large one cannot start before backward has ended.

The first bucket is small, so that communication starts early; the others are as large as the cap allows. Source: Li et
al. 2020, arXiv:2006.15704, §3.2.3 and §4.2.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def plan_buckets(
    nbytes: Sequence[int], cap: int, first: int | None = None, kinds: Sequence[Hashable] | None = None
) -> list[list[int]]:
    """Splits gradients into buckets, in the order in which the buckets are to be launched.

    nbytes: each gradient's size, in the order of the forward pass: backward makes the last one first
    cap: bytes that a bucket holds at most; one gradient that is larger gets a bucket alone
    first: the cap of the first bucket; None: the same
    kinds: gradients of different kinds (dtypes) never share a bucket; None: all are alike
    Returns: the gradients' indices, every one once; `plan_buckets([4, 4, 8], cap=8) == [[2], [1, 0]]`
    """
    plan: list[list[int]] = []
    open_: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = {}
    for index in reversed(range(len(nbytes))):
        kind = None if kinds is None else kinds[index]
        limit = first if first is not None and not plan else cap
        if kind in open_ and filled[kind] + nbytes[index] > limit:
            plan.append(open_.pop(kind))
        if kind not in open_:
            open_[kind], filled[kind] = [], 0
        open_[kind].append(index)
        filled[kind] += nbytes[index]
    # What is still open is complete when its last gradient is: the one of the lowest index.
    return plan + sorted(open_.values(), key=lambda bucket: -bucket[-1])
