"""What benchmarks/dataloader.py says can be wrong: who is called, and with what."""

from __future__ import annotations

import pytest

from benchmarks.dataloader import Samples, loaders, rate, start


@pytest.mark.parametrize("matter", ["samples", "tensors"])
def test_contestants_read_the_same(matter: str) -> None:
    pytest.importorskip("torch")
    dataset = Samples(48, 10)
    read = {}
    for name, make in loaders(matter, dataset, 4, 0).items():
        batches = list(make())
        assert [tuple(x.shape) for x, _ in batches] == [(4, 48), (4, 48), (2, 48)]
        read[name] = sorted(
            (label, float(x[0])) for xs, labels in batches for x, label in zip(xs, labels.tolist(), strict=True)
        )
        assert rate(make) > 0
    assert len(read) == 2
    assert len({str(each) for each in read.values()}) == 1


def test_a_start_is_timed() -> None:
    pytest.importorskip("torch")
    implementations = loaders("start", Samples(48, 10), 4, 1)
    assert list(implementations) == ["ours", "PyTorch, fork", "PyTorch, forkserver", "PyTorch, spawn"]
    assert 0 < start(implementations["ours"]) < 30
