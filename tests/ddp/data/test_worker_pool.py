"""A worker that fails is one error, which says who, where and why; nothing waits for it."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import re
import signal
import sys
import threading
import time
import traceback
from typing import Any
from urllib.error import HTTPError

import pytest

from ddp.data import DataLoader, fork_server
from ddp.data.shared_memory import Payload
from ddp.errors import ArgumentError, DtypeError, WorkerError
from tests.conftest import wait_until
from tests.ddp.data import samples
from tests.ddp.data.samples import Failing, Squares, Whoami


def until_it_fails(loader: DataLoader) -> tuple[list[Any], WorkerError]:
    got = []
    iterator = iter(loader)
    with pytest.raises(WorkerError) as caught:
        got.extend(batch.tolist() for batch in iterator)
    assert list(iterator) == []  # there is one error, and then the iteration is over
    return got, caught.value


@pytest.mark.parametrize(("workers", "kind"), [(1, FileNotFoundError), (2, KeyError)])
def test_a_worker_that_raises(workers: int, kind: type[Exception]) -> None:
    got, error = until_it_fails(DataLoader(Failing("raise", kind), batch_size=2, num_workers=workers))
    assert got == [[0, 1], [2, 3]]  # what comes before it in the order
    assert isinstance(error, kind)
    lines = str(error).splitlines()
    where = f"{kind.__name__} in DataLoader worker {2 % workers} of {workers}, batch 2, index 5: "
    assert lines[0] == where + str(kind("sample five is rotten"))
    assert any("samples.py" in line and "__getitem__" in line for line in lines)
    assert not any("ddp/data/" in line and "tests" not in line for line in lines)
    assert error.__cause__ is None
    assert error.__suppress_context__ or error.__context__ is None


@pytest.mark.parametrize("workers", [0, 1])
def test_an_exception_that_ends_loops_ends_none(workers: int) -> None:
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(DataLoader(Failing("raise", StopIteration), batch_size=8, num_workers=workers))


def test_an_error_whose_message_fails() -> None:
    _, error = until_it_fails(DataLoader(Failing("raise", samples.Mute), batch_size=8, num_workers=1))
    assert "index 5: (its message cannot be shown)" in error.args[0]


@pytest.mark.parametrize(
    ("make", "attributes"),
    [
        (samples.http_error, {"code": 404, "filename": "http://x/a.jpg"}),
        (samples.client_error, {"response": {"code": 7}, "code": 7}),
        (samples.dictlike_error, {"info": {}}),
        (samples.syntax_error, {"filename": "a.json", "lineno": 3}),
        (samples.decode_error, {"object": b"\xff", "start": 0}),
    ],
)
def test_errors_of_classes_with_methods_of_their_own(make: Any, attributes: dict[str, Any]) -> None:
    expected = make()
    _, error = until_it_fails(DataLoader(samples.Raising(make), num_workers=1))
    assert isinstance(error, type(expected))
    for name, value in attributes.items():
        assert getattr(error, name) == value
    assert not hasattr(error, "no_such_attribute")
    shown = "".join(traceback.format_exception(error))
    assert f"{type(expected).__name__} in DataLoader worker 0 of 1, batch 0, index 0: " in shown
    assert "in __getitem__" in shown
    assert repr(error).startswith("WorkerError(")
    for again in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert (type(again), str(again)) == (WorkerError, str(error))


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (samples.RaisingStream(samples.http_error), {}),
        (Squares(4), {"worker_init_fn": samples.raise_http_error}),
        (Squares(4), {"collate_fn": samples.raise_http_error}),
    ],
)
def test_an_error_with_attributes_wherever_it_is_raised(dataset: Any, options: Any) -> None:
    _, error = until_it_fails(DataLoader(dataset, num_workers=1, **options))
    assert isinstance(error, HTTPError)
    assert error.code == 404
    assert "HTTPError in DataLoader worker 0 of 1, batch 0" in "".join(traceback.format_exception(error))


def test_collating_names_the_batch() -> None:
    loader = DataLoader(samples.Mixed(), batch_size=2, sampler=[6, 1], num_workers=1, collate_fn=samples.broken)
    with pytest.raises(ZeroDivisionError, match=r"batch 0, indices \[6, 1\]"):
        next(iter(loader))
    with pytest.raises(DtypeError, match=r"worker 0 of 1, batch 0, indices \[0, 1, 2, 3, 4, 5, ...\]"):
        next(iter(DataLoader(samples.Objects(9), batch_size=9, num_workers=1)))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("kill", r"worker 0 of 2 \(pid \d+\) was killed by SIGKILL; the kernel kills so"),
        ("exit", "has ended with exit code 7"),
    ],
)
def test_a_worker_that_dies(how: str, said: str) -> None:
    start = time.monotonic()
    got, error = until_it_fails(DataLoader(Failing(how), batch_size=2, num_workers=2))
    assert got == [[0, 1], [2, 3]]
    assert re.search(said, str(error))
    assert time.monotonic() - start < 10


def test_a_worker_that_takes_too_long() -> None:
    got, error = until_it_fails(DataLoader(Failing("hang"), batch_size=5, num_workers=1, timeout=0.5))
    assert got == [[0, 1, 2, 3, 4]]
    assert str(error) == "DataLoader worker 0 of 1 took longer than timeout=0.5 s for a batch"


def test_a_worker_that_cannot_begin() -> None:
    _, error = until_it_fails(DataLoader(Squares(4), num_workers=2, worker_init_fn=samples.refuse))
    assert "worker 0 will not begin" in str(error)


def test_what_cannot_be_sent() -> None:
    with pytest.raises(ArgumentError, match=r"cannot be sent to a worker process: .*no lambdas"):
        iter(DataLoader(Squares(4), num_workers=1, collate_fn=lambda batch: batch))


def test_a_persistent_worker_that_dies_between_passes_is_replaced() -> None:
    loader = DataLoader(Whoami(), batch_size=1, num_workers=1, persistent_workers=True)
    iterator = iter(loader)
    pid = next(iterator)[0, 1].item()
    del iterator  # two batches are still to come
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match="SIGKILL"):
        list(loader)
    assert len(list(loader)) == 8


def test_a_server_that_was_killed_is_replaced() -> None:
    iterator = iter(DataLoader(Squares(10**6), batch_size=1, num_workers=1))
    next(iterator)
    server = fork_server.fork_server(()).pid
    os.kill(server, signal.SIGKILL)
    with pytest.raises(WorkerError, match="has gone"):
        list(iterator)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(server, 0)  # as another part of the program may, whose children it waits for
    assert len(list(DataLoader(Whoami(), batch_size=1, num_workers=1))) == 8
    assert fork_server.fork_server(()).pid != server


@pytest.mark.parametrize("added", [[], ["/" * 10**6]], ids=["read", "written"])
def test_a_server_that_is_killed_while_it_should_fork(added: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end is noticed when a pid is read, or while the path of imports is written, which is longer than a buffer."""
    server = fork_server.fork_server(fork_server.modules_of(Squares)).pid
    monkeypatch.setattr(sys, "path", sys.path + added)
    os.kill(server, signal.SIGSTOP)
    threading.Timer(0.3, os.kill, (server, signal.SIGKILL)).start()
    with pytest.raises(WorkerError, match="the fork server of worker processes has ended"):
        iter(DataLoader(Squares(4), num_workers=2))


def test_a_process_that_ignores_that_its_pool_was_closed_is_killed() -> None:
    loader = DataLoader(Failing("hang"), batch_size=5, num_workers=2)
    server = fork_server.fork_server(()).pid
    earlier = set(children(server))  # of other tests, which are about to end
    iterator = iter(loader)
    next(iterator)
    mine = set(children(server)) - earlier
    assert len(mine) == 2
    del iterator
    wait_until(lambda: not mine.intersection(children(server)))


def test_processes_whose_pids_an_interrupted_pool_has_not_read_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    server = fork_server.fork_server(fork_server.modules_of(Squares)).pid
    earlier = set(children(server))
    mine: set[int] = set()

    def interrupted(payload: Payload) -> None:
        while len(mine) < 2:
            mine.update(set(children(server)) - earlier)
        for pid in mine:
            os.kill(pid, signal.SIGSTOP)
        raise KeyboardInterrupt

    monkeypatch.setattr(Payload, "write", interrupted)
    with contextlib.suppress(KeyboardInterrupt):
        iter(DataLoader(Squares(4), num_workers=2))
    wait_until(lambda: not mine.intersection(children(server)))


def children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(word) for word in file.read().split()]


def test_a_long_error_meets_long_tasks() -> None:
    loader = DataLoader(samples.LongIndices(400_000), batch_size=100_000, num_workers=1, prefetch_factor=3)
    with pytest.raises(ValueError, match="99997, 99998, 99999]"):
        next(iter(loader))
