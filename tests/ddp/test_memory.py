"""Memory of backward beside PyTorch's: what the benchmark measures, held as a bound."""

from __future__ import annotations

import pytest

from benchmarks.train_step import start


def peak(library: str) -> int:
    with start("deep", library) as pool:
        return int(pool.request("first")[0])


@pytest.mark.long  # two processes, one of which loads PyTorch
def test_a_deep_network_takes_no_more_than_pytorch() -> None:
    pytest.importorskip("torch", reason="PyTorch is the oracle here")
    assert peak("ddp") <= 1.1 * peak("torch")
