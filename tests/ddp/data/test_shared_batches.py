"""What lies between two processes, tried in one: lines, batches in shared memory, parcels, seeds."""

from __future__ import annotations

import os
import socket
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ddp
from ddp.data.fetching import mix_seed
from ddp.data.payload import Payload, load_payload
from ddp.data.shared_batches import _HELD, BatchReader, BatchWriter, WorkerConnection
from ddp.errors import ArgumentError
from tests.ddp.data.samples import Squares


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    pair = socket.socketpair()
    yield pair
    for end in pair:
        end.close()


def test_messages_of_any_length_in_both_directions(ends: Any) -> None:
    here, there = map(WorkerConnection, ends)
    messages = [b"", b"x", os.urandom(100_000), os.urandom(3_000_000), b"end"]

    def other() -> None:
        for message in messages:
            there.send(message)
        received.extend(there.receive() for _ in messages)

    received: list[bytes] = []
    thread = threading.Thread(target=other)
    thread.start()
    for message in messages:  # both send first: neither waits for the other to read
        here.send(message)
    assert [here.receive() for _ in messages] == messages
    thread.join(20)
    assert received == messages


def test_descriptors_go_along(ends: Any, tmp_path: Path) -> None:
    here, there = map(WorkerConnection, ends)
    (tmp_path / "a").write_text("hello")
    with open(tmp_path / "a") as file:
        here.send(b"first", file.fileno())
        here.send(b"second")
    assert [there.receive(), there.receive()] == [b"first", b"second"]
    with os.fdopen(there.descriptors.popleft()) as file:
        assert file.read() == "hello"


def test_no_limit_is_so_short_that_there_is_none(ends: Any) -> None:
    WorkerConnection(ends[0], timeout=1e-9)
    assert ends[0].getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16) != bytes(16)


def test_a_line_that_is_silent_or_closed(ends: Any) -> None:
    connection = WorkerConnection(ends[0], timeout=0.05)
    assert not connection.ready()
    with pytest.raises(TimeoutError):
        connection.receive()
    ends[1].close()
    assert connection.ready()
    with pytest.raises(EOFError):
        connection.receive()
    with pytest.raises(OSError, match="Broken pipe"):
        connection.send(b"x")


class Pipe:
    """A worker's batches and their consumer, without the processes."""

    def __init__(self) -> None:
        self.outgoing, self.incoming = BatchWriter(), BatchReader()
        self.blocks: list[str] = []

    def __call__(self, make: Any) -> Any:
        self.outgoing.give_back(self.incoming.returned())
        self.outgoing.begin()
        sent = self.outgoing.pack(make(self.outgoing.empty))
        self.blocks.append(sent.token)
        self.incoming.forget(self.outgoing.dropped)
        self.outgoing.dropped.clear()
        fd = os.dup(self.outgoing.new.fileno()) if sent.new else -1
        if sent.new:
            self.outgoing.new.close()
        return self.incoming.unpack(sent, fd)


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


def test_batches_of_all_sizes() -> None:
    pipe = Pipe()
    for n in [3, 0, 100_000, 5, 99_999, 300_000, 1]:
        assert pipe(filled(n, n)).tolist() == [n] * n
        mixture = pipe(lambda empty, n=n: [filled(1, n)(empty), filled(2, 50_000)(empty), np.arange(n), "x" * n])
        assert [len(each) for each in mixture] == [n, 50_000, n, n]
        assert mixture[0].tolist() == [1] * n
        assert mixture[1].tolist() == [2] * 50_000
        assert mixture[2].tolist() == list(range(n))


@pytest.mark.parametrize(
    "dtype", ["bool", "uint8", "int64", "float16", "float64", "complex64", "datetime64[ns]", ">i4"]
)
def test_arrays_of_every_dtype(dtype: str) -> None:
    array = np.arange(6).astype(dtype).reshape(2, 3)
    got = Pipe()(
        lambda empty: (array, array[:, ::-1], array[0, 0], array.astype(ddp.bfloat16) if dtype == "bool" else 0)
    )
    assert got[0].dtype == array.dtype
    np.testing.assert_array_equal(got[0], array)
    np.testing.assert_array_equal(got[1], array[:, ::-1])
    assert got[2] == array[0, 0]


def test_arrays_that_are_pickled_after_all() -> None:
    record = np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")])
    objects = np.array([{"a": 1}, None], object)
    masked = np.ma.masked_array([1, 2], [True, False])
    got = Pipe()(lambda empty: (record, objects, masked, ddp.ones(2, requires_grad=True)))
    assert got[0] == record
    assert list(got[1]) == list(objects)
    assert got[2].mask.tolist() == [True, False]
    assert got[3].requires_grad


def test_a_batch_that_failed_leaves_its_block() -> None:
    pipe = Pipe()
    pipe(filled(1, 10))
    for _ in range(5):
        with pytest.raises(ZeroDivisionError):
            pipe(lambda empty: [empty((10,), np.dtype(np.float32)), 1 / 0])
    pipe(filled(1, 10))
    assert len(set(pipe.blocks)) <= 2


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


def written(content: Any, before: Payload | None = None) -> Payload:
    payload = Payload(content)
    payload.write(before)
    return payload


def copy_of(payload: Payload) -> Any:
    return load_payload(payload.fileno(), payload.layout)


def test_a_parcel_has_copies_that_are_everybodys_own() -> None:
    big = np.arange(10_000.0)
    payload = written([big, big[:3], ddp.from_numpy(big), "text", big.reshape(100, 100).T])
    one, other = copy_of(payload), copy_of(payload)
    one[0][0] = -1
    assert [each[0][0] for each in (one, other)] == [-1, 0]
    assert big[0] == 0
    assert other[2].tolist() == big.tolist()
    np.testing.assert_array_equal(other[4], big.reshape(100, 100).T)


def test_a_read_only_array_stays_so() -> None:
    big = np.arange(10_000)
    big.flags.writeable = False
    assert not copy_of(written(big)).flags.writeable


def test_a_parcel_is_written_when_it_has_changed() -> None:
    dataset = Squares(3)
    dataset.big = np.arange(10_000)  # type: ignore[attr-defined]
    first = written(dataset)
    assert written(dataset, first).fileno() == first.fileno()
    dataset.big[77] = 0  # type: ignore[attr-defined]
    second = written(dataset, first)
    assert second.fileno() != first.fileno()
    assert copy_of(second).big[77] == 0
    assert copy_of(first).big[77] == 77
    dataset.big.view(np.uint8)[-1] ^= 1  # type: ignore[attr-defined]
    third = written(dataset, second)
    assert copy_of(third).big[-1] == dataset.big[-1] != copy_of(second).big[-1]  # type: ignore[attr-defined]
    dataset.reads.append(1)
    assert written(dataset, second).fileno() != second.fileno()


def test_files_that_are_mapped_are_mapped_again(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(100_000).reshape(1000, 100))
    mapped = np.load(tmp_path / "a.npy", mmap_mode="r")
    payload = written([mapped, mapped[3:7], mapped[:, 1]])
    assert payload.layout.pickled < 10_000  # of which the column, which lies in no one piece
    whole, part, column = copy_of(payload)
    assert type(whole) is np.memmap
    np.testing.assert_array_equal(whole, mapped)
    np.testing.assert_array_equal(part, mapped[3:7])
    np.testing.assert_array_equal(column, mapped[:, 1])


def test_a_parcel_says_why_it_cannot_be_sent() -> None:
    with pytest.raises(ArgumentError, match="lambda") as caught:
        Payload([lambda: 0])
    assert caught.value.__cause__ is not None


def test_seeds_are_far_apart() -> None:
    found = {mix_seed(a, b, c) for a in range(10) for b in range(10) for c in range(10)}
    assert len(found) == 1000
    assert mix_seed(1, 2, 3) == mix_seed(1, 2, 3)
    assert all(0 <= seed < 2**63 for seed in found)
    differing = [(mix_seed(7, k) ^ mix_seed(7, k + 1)).bit_count() for k in range(100)]
    assert 25 < sum(differing) / 100 < 38  # half of the bits
