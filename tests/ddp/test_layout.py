"""Where gradients lie: a table, and views that are the buckets' own memory."""

from __future__ import annotations

import numpy as np

from ddp._layout import BucketSlice, FlatBuckets, Layout, lay_out

F32, F64 = np.dtype(np.float32), np.dtype(np.float64)


def test_each_gradient_starts_on_a_cache_line() -> None:
    layout = lay_out([[2, 1], [0], [3]], [(3, 5), (17,), (), (0, 4)], [F32, F32, F32, F64])
    assert layout == Layout(
        slices=(
            BucketSlice(bucket=1, start=0, stop=15, shape=(3, 5)),
            BucketSlice(bucket=0, start=16, stop=33, shape=(17,)),
            BucketSlice(bucket=0, start=0, stop=1, shape=()),
            BucketSlice(bucket=2, start=0, stop=0, shape=(0, 4)),
        ),
        buckets=((F32, 48), (F32, 16), (F64, 0)),
    )


def test_views_are_the_buckets_memory() -> None:
    layout = lay_out([[1, 0]], [(2, 2), (3,)], [F32, F32])
    buckets = FlatBuckets(layout, np.zeros)
    buckets.views[1][...] = 1
    buckets.views[0][...] = [[2, 3], [4, 5]]
    assert buckets.buffers[0].tolist() == [1, 1, 1, *[0] * 13, 2, 3, 4, 5, *[0] * 12]
    assert [view.shape for view in buckets.views] == [(2, 2), (3,)]
