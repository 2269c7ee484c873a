"""What a loader shares with its workers, tried in one process: batches, and the dataset."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import ddp
from ddp.data.shared_memory import _HELD, BatchReader, BatchWriter, Payload, load_payload
from ddp.errors import ArgumentError


class Pipe:
    """A worker's batches and their consumer, without the processes."""

    def __init__(self) -> None:
        self.outgoing = BatchWriter()
        self.incoming = BatchReader()
        self.blocks: list[int | None] = []

    def __call__(self, make: Any) -> Any:
        self.outgoing.begin(self.incoming.returned())
        sent, fds = self.outgoing.pack(make(self.outgoing.empty))
        self.blocks.append(sent.slot)
        return self.incoming.unpack(sent, *fds)


def filled(value: float, n: int) -> Any:
    def make(empty: Any) -> Any:
        array = empty((n,), np.dtype(np.float32))
        array[:] = value
        return ddp.from_numpy(array)

    return make


def test_blocks_are_used_again() -> None:
    pipe = Pipe()
    for k in range(20):
        batch = pipe(filled(k, 1000))
        assert batch.tolist() == [k] * 1000
    assert len(set(pipe.blocks)) == 2  # the consumer has one while the next is written


def test_what_the_consumer_keeps_is_not_written_to() -> None:
    pipe = Pipe()
    kept = [pipe(filled(k, 100))[k:] for k in range(2 * _HELD)]
    assert [view.tolist() for view in kept] == [[k] * (100 - k) for k in range(2 * _HELD)]
    assert len(set(pipe.blocks)) == _HELD + 1  # and beyond that, copies


def test_a_batch_that_failed_leaves_its_block() -> None:
    pipe = Pipe()
    pipe(filled(1, 10))
    for _ in range(5):
        with pytest.raises(ZeroDivisionError):
            pipe(lambda empty: [empty((10,), np.dtype(np.float32)), 1 / 0])
    pipe(filled(1, 10))
    assert len(set(pipe.blocks)) <= 2


def test_batches_of_all_sizes() -> None:
    pipe = Pipe()
    for n in [3, 0, 100_000, 5, 99_999, 300_000, 1]:
        assert pipe(filled(n, n)).tolist() == [n] * n
        expected = [[1] * n, [2] * 50_000, [*range(n)]]
        *arrays, text = pipe(lambda empty, n=n: [filled(1, n)(empty), filled(2, 50_000)(empty), np.arange(n), "x" * n])
        assert [array.tolist() for array in arrays] == expected
        assert len(text) == n


@pytest.mark.parametrize("dtype", ["bool", "float16", "complex64", "datetime64[ns]", ">i4", ddp.bfloat16])
def test_arrays_of_every_dtype(dtype: Any) -> None:
    array = np.arange(6).astype(dtype).reshape(2, 3)
    sent = array, array[:, ::-1], array[0, 0]
    for got, expected in zip(Pipe()(lambda empty: sent), sent, strict=True):
        assert got.dtype == expected.dtype
        assert_array_equal(got, expected)


def test_memory_goes_with_the_batch() -> None:
    pipe = Pipe()
    batch = pipe(filled(1, 10))
    gone = weakref.ref(batch.array.base)
    view = batch[2:]
    del batch
    assert gone() is not None
    assert pipe.incoming.returned() == []
    del view
    assert pipe.incoming.returned() == pipe.blocks


def copies(content: Any, count: int = 1) -> list[Any]:
    payload = Payload(content)
    block = payload.allocate()
    payload.write()
    return [load_payload(os.dup(block.fileno()), payload.layout) for _ in range(count)]


def test_a_payload_is_written_when_it_has_changed() -> None:
    big = np.arange(10_000)

    def last(payload: Payload, block: Any) -> int:
        return load_payload(os.dup(block.fileno()), payload.layout)[0][-1]

    first, same = Payload([big]), Payload([big])
    block = first.allocate()
    first.write()
    assert same.share_memory_of(first)
    assert same.allocate() is block
    big[-1] = -1
    changed = Payload([big])
    assert not changed.share_memory_of(same)
    other = changed.allocate()
    assert other is not block
    changed.write()
    assert (last(first, block), last(changed, other)) == (9_999, -1)


def test_a_payload_has_copies_that_are_everybodys_own() -> None:
    big = np.arange(10_000.0)
    turned = big.reshape(100, 100).T
    one, other = copies([big, big[:3], ddp.from_numpy(big), "text", turned], 2)
    one[0][0] = -1
    assert (one[0][0], other[0][0], big[0]) == (-1, 0, 0)
    assert other[2].tolist() == big.tolist()
    assert_array_equal(other[4], turned)


def test_files_that_are_mapped_are_mapped_again(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(100_000).reshape(1000, 100))
    mapped = np.load(tmp_path / "a.npy", mmap_mode="r")
    content = [mapped, mapped[3:7], mapped[:, 1]]
    assert Payload(content).layout[0] < 10_000  # of which the column, which lies in no one piece
    [again] = copies(content)
    assert type(again[0]) is np.memmap
    for array, expected in zip(again, content, strict=True):
        assert_array_equal(array, expected)


def test_a_payload_says_why_it_cannot_be_sent() -> None:
    with pytest.raises(ArgumentError, match="lambda") as caught:
        Payload([lambda: 0])
    assert caught.value.__cause__ is not None
