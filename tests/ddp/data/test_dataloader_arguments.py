"""What a DataLoader takes."""

from __future__ import annotations

from typing import Any

import pytest

from ddp.data import DataLoader
from ddp.errors import ArgumentError
from tests.ddp.data.samples import Squares, Stream

BAD = [
    ({"batch_size": 0}, "batch_size"),
    ({"batch_size": 1.5}, "batch_size"),
    ({"batch_size": None, "drop_last": True}, "drop_last"),
    ({"sampler": [1], "shuffle": True}, "shuffle"),
    ({"batch_sampler": [[1]], "batch_size": 2}, "batch_sampler"),
    ({"num_workers": -1}, "num_workers"),
    ({"timeout": -1}, "timeout"),
    ({"timeout": 1}, "timeout"),
    ({"prefetch_factor": 2}, "prefetch_factor"),
    ({"num_workers": 1, "prefetch_factor": 0}, "prefetch_factor"),
    ({"persistent_workers": True}, "persistent_workers"),
    ({"num_workers": True}, "num_workers"),
    ({"num_workers": 1, "timeout": float("nan")}, "timeout"),
    ({"multiprocessing_context": "fork"}, "MPI, CUDA"),
    ({"multiprocessing_context": "thread"}, "'thread'"),
]


@pytest.mark.parametrize(("options", "said"), BAD, ids=str)
def test_what_excludes_each_other_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        DataLoader(Squares(4), **options)


@pytest.mark.parametrize("options", [{"shuffle": True}, {"sampler": [1]}, {"batch_sampler": [[1]]}], ids=str)
def test_a_stream_has_its_own_order(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="IterableDataset"):
        DataLoader(Stream(4), **options)
