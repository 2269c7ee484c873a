"""An index out of range on a GPU: nothing waits for it, nothing else is written to, and whoever waits next is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import ddp
from ddp.errors import ArgumentError, RangeError, ShapeError
from tests.gpu import on_both

F = ddp.nn.functional


def on_gpu(*values: Any, **options: Any) -> Any:
    return ddp.tensor(values, device="cuda", **options)


def table() -> Any:
    return ddp.arange(12.0, device="cuda").reshape(4, 3)


WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "index": (lambda: table()[on_gpu(0, 4)], RangeError, r"x\[index\]: index 4 is out of range for 4 elements"),
    "gather": (lambda: table().gather(1, on_gpu([0, 3])), RangeError, "gather: index 3 is out of range for 3 elements"),
    "take": (lambda: table().take(on_gpu(12)), RangeError, "take: index 12"),
    "index_select": (lambda: table().index_select(0, on_gpu(-1)), RangeError, "index_select: index -1"),
    "embedding": (lambda: F.embedding(on_gpu(7), table()), RangeError, "input 7 is not one of the 4 rows 0 to 3"),
    "cross entropy": (
        lambda: F.cross_entropy(table(), on_gpu(0, 1, 2, 3)),
        RangeError,
        "cross_entropy: target 3 is not one of the 3 classes 0 to 2",
    ),
    "bernoulli": (lambda: table().bernoulli(), ArgumentError, r"bernoulli: a probability is outside \[0, 1\]"),
    "normal": (lambda: ddp.normal(table(), -table()), ArgumentError, "normal: std is negative"),
    "one_hot": (lambda: F.one_hot(on_gpu(0, 3), 3), RangeError, "one_hot: class 3 is not one of the 3 classes 0 to 2"),
    "variance": (lambda: F.gaussian_nll_loss(table(), table(), -table()), ArgumentError, "var has a negative entry"),
    "repeat_interleave": (
        lambda: ddp.repeat_interleave(table(), on_gpu(1, 2, 0, 1), 0, output_size=9),
        ArgumentError,
        "output_size is 9, but the repeats add up to 4",
    ),
    "masked_scatter": (
        lambda: table().masked_scatter(table() > 2, on_gpu(1.0, 2.0)),
        ShapeError,
        "more places than the 2 elements",
    ),
}


@on_both
@pytest.mark.parametrize("name", WRONG)
def test_it_is_told_when_the_host_waits(name: str, gpu: Any) -> None:
    run, error, message = WRONG[name]
    with gpu.no_waits():
        y = run()
    with pytest.raises(error, match=message) as told:
        y.sum().item()
    assert "CUDA_LAUNCH_BLOCKING=1" in str(told.value)
    assert table().sum().item() == 66.0  # and told once, of a device that goes on


def test_the_op_itself_where_every_op_waits(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    x = table()
    with pytest.raises(RangeError, match=r"index 9 is out of range for 4 elements\.$"):
        x[on_gpu(9)]
