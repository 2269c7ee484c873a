"""Channels carry descriptors beside the message: who sends may forget, and what is never read is nobody's."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import queue
import resource
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import ddp
import ddp.multiprocessing as mp
from ddp import nn
from ddp._block import block_of
from ddp.data.shared_memory import Block, Lease
from ddp.errors import GraphError, SharingError
from ddp.multiprocessing import pickling
from tests.ddp.multiprocessing.children import labelled
from tests.ddp.multiprocessing.counting import all_descriptors, descriptors, mappings


@pytest.fixture
def pipe() -> Iterator[tuple[Any, Any]]:
    """A one-way pipe within this process: its receiving and its sending end. Nothing is left of what it carried."""
    gc.collect()  # what other tests left in cycles is not to go meanwhile
    before = all_descriptors()
    mapped = mappings()
    reader, writer = mp.Pipe(duplex=False)
    yield reader, writer
    reader.close()
    writer.close()
    assert not all_descriptors() - before  # those of other tests' threads may have gone
    assert mappings() == mapped


def test_a_tensor_is_shared_from_then_on(pipe: Any) -> None:
    reader, writer = pipe
    x = ddp.arange(6.0).reshape(2, 3)
    view = x[1]
    writer.send({"row": view, "number": 3})
    assert x.is_shared(), "what it is a view of moves along"
    got = reader.recv()
    got["row"].fill_(9)
    assert x.tolist() == [[0, 1, 2], [9, 9, 9]]
    assert got["number"] == 3


def test_the_sender_may_forget_and_close(pipe: Any) -> None:
    reader, writer = pipe
    before = descriptors()
    writer.send(ddp.full((100_000,), 4.0))
    writer.close()
    assert descriptors() <= before, "it lies in the socket alone"
    assert reader.recv().sum().item() == 400_000
    with pytest.raises(EOFError):
        reader.recv()


def test_classes_and_flags_travel(pipe: Any) -> None:
    reader, writer = pipe
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[0].bias.requires_grad_(False)
    writer.send([labelled("mine"), model])
    label, net = reader.recv()
    assert (type(label).__name__, label.label, label.tolist()) == ("Labelled", "mine", [1, 2])
    assert isinstance(net[0].weight, nn.Parameter)
    assert [p.requires_grad for p in net.parameters()] == [True, False, True, True]
    assert list(net.state_dict()) == list(model.state_dict())
    assert all(p.is_shared() for p in model.parameters()), "the model that was sent is shared too"


def test_layouts_travel(pipe: Any) -> None:
    reader, writer = pipe
    sent = [
        ddp.arange(6, dtype=ddp.bfloat16).reshape(2, 3).t(),
        ddp.arange(3.0).expand(2, 3),
        ddp.zeros(0, 2),
        ddp.tensor(1.5, dtype=ddp.float64, requires_grad=True),
    ]
    writer.send(sent)
    for got, expected in zip(reader.recv(), sent, strict=True):
        assert (got.dtype, got.shape, got.stride()) == (expected.dtype, expected.shape, expected.stride())
        assert got.requires_grad == expected.requires_grad
        assert got.tolist() == expected.tolist()
        assert got.array.flags.writeable == expected.array.flags.writeable


def test_what_is_on_loan_is_copied(pipe: Any) -> None:
    """A batch of a DataLoader lies in memory that will hold another one."""
    reader, writer = pipe
    block = Block.create(1 << 16)
    numbers = block.array("float32", 100)
    numbers[:] = 5
    loan = Lease()
    returned = weakref.finalize(loan, list)
    lent = Block.adopt(os.dup(block.fileno()), block.token, block.nbytes)
    x = ddp.from_numpy(lent.array("float32", 4, 16, keep=loan))
    del loan, lent
    assert not x.is_shared()
    writer.send(x)
    assert x.is_shared()
    assert not returned.alive
    numbers[:] = 6
    assert reader.recv().tolist() == x.tolist() == [5] * 4
    assert block_of(x.array)[0].nbytes == 64, "no more is copied than the tensor"


@contextlib.contextmanager
def limit_of_files(limit: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_more_descriptors_than_one_call_takes(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickling, "_SMALL", -1)
    reader, writer = pipe
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 4096:
        pytest.skip("too few file descriptors")
    with limit_of_files(4096):
        for n in (252, 253, 254, 600):
            writer.send([ddp.full((1,), float(i)) for i in range(n)])
            assert [x.item() for x in reader.recv()] == list(range(n))


def test_what_was_received_is_not_inherited(pipe: Any) -> None:
    reader, writer = pipe
    writer.post(b"", [writer.fileno()])
    packed = reader.take()
    assert [os.get_inheritable(fd) for fd in packed.fd_owners] == [False]
    packed.close()


def test_a_receiver_with_too_many_files_open_says_so(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickling, "_SMALL", -1)
    reader, writer = pipe
    writer.send([ddp.ones(1) for _ in range(20)])
    writer.send("next")
    before = all_descriptors()
    message = r"20 file descriptors, of which this process could take \d+: .*ulimit"
    with limit_of_files(len(before) + 8), pytest.raises(SharingError, match=message):
        reader.recv()
    assert not all_descriptors() - before
    assert reader.recv() == "next", "the pipe stays whole"


def test_bytes_and_endings(pipe: Any) -> None:
    reader, writer = pipe
    writer.send_bytes(b"abc")
    assert reader.poll(1)
    assert reader.recv_bytes() == b"abc"
    assert not reader.poll()
    writer.send(ddp.ones(2))
    assert len(reader.recv_bytes()) > 0, "the descriptor beside them is closed"
    with pytest.raises(OSError, match="write-only"):
        writer.recv()
    with pytest.raises(OSError, match="read-only"):
        reader.send(1)
    writer._socket.sendall(b"half")
    writer.close()
    with pytest.raises(OSError, match="end of file during message"):
        reader.recv()
    reader.close()
    with pytest.raises(OSError, match="closed"):
        reader.recv()


@pytest.mark.parametrize("make", [mp.Pipe, multiprocessing.Pipe])
def test_an_end_of_a_pipe_can_be_sent(make: Any) -> None:
    reader, writer = make()
    near, far = mp.Pipe()
    writer.send(far)
    far.close()
    with reader, writer, near, reader.recv() as got:
        got.send(ddp.ones(2))
        assert near.recv().tolist() == [1, 1]


def test_the_result_of_an_op_is_refused(pipe: Any) -> None:
    with pytest.raises(GraphError, match="sending the result of an op"):
        pipe[1].send(ddp.ones(2, requires_grad=True) * 2)


def test_others_pipes_take_copies() -> None:
    before = descriptors()
    reader, writer = multiprocessing.Pipe(duplex=False)
    with reader, writer:
        writer.send((ddp.ones(3), nn.Parameter(ddp.ones(3)).share_memory_()))
        copies = reader.recv()
    assert [type(copy) for copy in copies] == [ddp.Tensor, nn.Parameter]
    assert [copy.tolist() for copy in copies] == [[1, 1, 1]] * 2
    assert not any(copy.is_shared() for copy in copies)
    assert descriptors() <= before


def test_what_comes_home_is_found(pipe: Any) -> None:
    reader, writer = pipe
    x = ddp.ones(3)
    writer.send(x)
    assert np.shares_memory(reader.recv().array, x.array)


@pytest.fixture(params=["Queue", "JoinableQueue"])
def made(request: pytest.FixtureRequest) -> Iterator[Any]:
    before = descriptors()
    it = getattr(mp, request.param)(2)
    yield it
    it.close()
    it.join_thread()
    assert descriptors() <= before  # those of other tests' threads may have gone


def test_a_queue_keeps_its_order_and_its_bounds(made: Any) -> None:
    x = ddp.ones(3)
    made.put(x)
    made.put([ddp.zeros(2), "text"], timeout=1)
    with pytest.raises(queue.Full):
        made.put(3, timeout=0.01)
    assert made.qsize() == 2
    got = made.get()
    got.fill_(4)
    assert x.tolist() == [4, 4, 4]
    assert made.get(timeout=10)[1] == "text"
    for wait in ({"block": False}, {"timeout": 0.01}):
        with pytest.raises(queue.Empty):
            made.get(**wait)
    made.close()
    for call in (made.get, lambda: made.put(1)):
        with pytest.raises(ValueError, match="is closed"):
            call()


def test_start_methods() -> None:
    assert mp.get_all_start_methods() == ["spawn", "forkserver", "fork"]
    context = mp.get_context("forkserver")
    assert context.get_start_method() == "forkserver"
    assert mp.get_start_method() == "spawn"
    with pytest.raises(RuntimeError, match="already been set"):
        mp.set_start_method("fork")
    with pytest.raises(ValueError, match="'thread': expected one of spawn"):
        mp.get_context("thread")
    try:
        mp.set_start_method("fork", force=True)
        assert mp.get_start_method() == "fork"
    finally:
        mp.set_start_method("spawn", force=True)
