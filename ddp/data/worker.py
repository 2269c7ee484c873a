"""What runs in a worker process: it takes tasks in order, and sends one result for each.

A worker ends when its connection is closed, because its consumer has died or needs it no more, or with the fork server
that started it.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from ddp.data.fetching import BatchMaker, FetchConfig, FetchResult, WorkerInfo, seed_generators, set_worker_info
from ddp.data.payload import PayloadLayout, load_payload
from ddp.data.shared_batches import BatchWriter, PackedBatch
from ddp.multiprocessing.connections import SharingConnection


class StartPass(NamedTuple):
    """A pass begins. The descriptor of the payload comes along with the first.

    state: of a stream's dataset, to go on from; skipped: where it has none, the seeds of batches that are left out
    """

    id: int
    workers: int
    seed: int
    layout: PayloadLayout
    state: Any = None
    skipped: Sequence[int] = ()


class FetchTask(NamedTuple):
    """One batch. returned: blocks that may be used again; indices: None for the next of a stream."""

    seed: int
    indices: Any
    returned: list[str]


class WorkerFailure(NamedTuple):
    """An exception. kind: its class, pickled, None if it cannot be; at: the index that was read."""

    kind: bytes | None
    name: str
    text: str
    trace: str
    at: str | None


_LONG = 4096  # bytes of a result; a longer one, of a long error or state, goes as a file in memory

script_failure: WorkerFailure | None = None  # why the server could not import the user's script


def run(connection: SharingConnection, needs_script: bool) -> None:
    """Serves tasks until the connection is closed, and ends the process.

    needs_script: the payload has objects that the user's script defines
    """
    worker = _Worker(connection, script_failure if needs_script else None)
    try:
        while True:
            received = connection.take()
            worker.serve(pickle.loads(received.data), received.fd_owners)
    except (EOFError, OSError):
        pass  # the consumer has closed the connection, or died
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):
            pass  # there is no such stream, its reader has gone, or the script has closed it
    os._exit(0)  # exit handlers are the server's, and threads of the dataset need not be waited for


def describe_failure(error: BaseException, at: Any = None) -> WorkerFailure:
    """An exception as it is sent to the consumer. at: what was being read"""
    try:
        kind = pickle.dumps(type(error))
    except Exception:  # a class that was made in a function
        kind = None
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith("ddp.data."):
        trace = trace.tb_next  # begins in the user's code
    shown = "".join(traceback.format_exception(type(error), error, trace or error.__traceback__))
    try:
        text = str(error)
    except Exception:  # a broken __str__ must not hide the error
        text = "(its message cannot be shown)"
    return WorkerFailure(kind, type(error).__name__, text, shown, _shown(at))


def _shown(at: Any) -> str | None:
    if isinstance(at, list):
        few = [repr(index) for index in at[:8]]
        return f"indices [{', '.join(few)}{', …' if len(at) > 8 else ''}]"
    return at if at is None or isinstance(at, str) else f"index {at!r}"


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    seed_generators(seed)
    yield


class _Worker:
    def __init__(self, connection: SharingConnection, failure: WorkerFailure | None) -> None:
        self._connection, self._failure = connection, failure
        self._writer = BatchWriter()
        self._maker: BatchMaker | None = None

    def serve(self, message: StartPass | FetchTask, fds: list[int]) -> None:
        if isinstance(message, StartPass):
            self._start_pass(message, fds)
            return
        self._writer.give_back(message.returned)
        result = self._fetch(message)
        dropped, self._writer.dropped[:] = list(self._writer.dropped), []
        sent = pickle.dumps(result._replace(dropped=dropped), 5)
        block = self._writer.new if isinstance(result.batch, PackedBatch) and result.batch.new else None
        self._post(sent, [] if block is None else [block.fileno()])
        if block is not None:
            block.close()

    def _post(self, sent: bytes, fds: list[int]) -> None:
        if len(sent) <= _LONG:
            self._connection.post(sent, fds)
            return
        # The consumer reads nothing while it sends a long task: each would wait for the other for ever.
        with open(os.memfd_create("ddp-result"), "w+b") as file:
            file.write(sent)
            file.flush()
            self._connection.post(b"", [file.fileno(), *fds])

    def _start_pass(self, start: StartPass, fds: list[int]) -> None:
        """Prepares a pass. What fails is the result of its first task."""
        if self._failure is not None:
            return
        try:
            first = self._maker is None
            if first:
                self._config = FetchConfig(*load_payload(fds[0], start.layout))
                os.close(fds[0])
                self._maker = BatchMaker(self._config, self._writer.empty)
            set_worker_info(WorkerInfo(start.id, start.workers, start.seed, self._config.dataset))
            seed_generators(start.seed)
            if first and self._config.initialize is not None:
                self._config.initialize(start.id)
            assert self._maker is not None
            self._maker.start_pass(start.state, start.skipped, _seeded)
        except BaseException as error:
            self._failure = describe_failure(error)

    def _fetch(self, task: FetchTask) -> FetchResult:
        if self._failure is not None:
            return FetchResult(None, failure=self._failure)
        maker = self._maker
        assert maker is not None
        try:
            seed_generators(task.seed)
            self._writer.begin()
            result = maker.make(task.indices)
            if not result.end:
                return result._replace(batch=self._writer.pack(result.batch))
            self._writer.abandon()
            return result
        except BaseException as error:
            self._writer.abandon()
            return FetchResult(None, failure=describe_failure(error, maker.at))
