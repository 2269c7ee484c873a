"""What runs in a worker process: it takes tasks in order, and sends one result for each.

A worker ends when its connection is closed, because its consumer has died or needs it no more, or with the fork server
that started it.
"""

from __future__ import annotations

import os
import pickle
import socket
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NamedTuple

from ddp.data.fetching import FetchConfig, Fetcher, StreamFetcher, WorkerInfo, seed_generators, set_worker_info
from ddp.data.payload import PayloadLayout, load_payload
from ddp.data.shared_batches import BatchWriter, PackedBatch, WorkerConnection


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


class FetchResult(NamedTuple):
    """The result of a task. Neither batch nor failure: the stream is at its end.

    state: the dataset's own, after this batch; last: this is known to be the last one
    """

    batch: PackedBatch | None
    failure: WorkerFailure | None
    dropped: list[str]
    state: Any = None
    last: bool = False


script_failure: WorkerFailure | None = None  # why the server could not import the user's script


def run(end: socket.socket, needs_script: bool) -> None:
    """Serves tasks until the connection is closed, and ends the process.

    needs_script: the payload has objects that the user's script defines
    """
    connection = WorkerConnection(end)
    worker = _Worker(connection, script_failure if needs_script else None)
    try:
        while True:
            worker.serve(pickle.loads(connection.receive()))
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


class _Worker:
    def __init__(self, connection: WorkerConnection, failure: WorkerFailure | None) -> None:
        self._connection, self._failure = connection, failure
        self._writer = BatchWriter()
        self._config: FetchConfig | None = None
        self._fetcher: Any = None
        self._stateful = False

    def serve(self, message: StartPass | FetchTask) -> None:
        if isinstance(message, StartPass):
            self._start_pass(message)
            return
        self._writer.give_back(message.returned)
        result = self._fetch(message)
        dropped, self._writer.dropped[:] = list(self._writer.dropped), []
        sent = pickle.dumps(result._replace(dropped=dropped), 5)
        if result.batch is None or not result.batch.new:
            self._connection.send(sent)
            return
        block = self._writer.new
        assert block is not None
        self._connection.send(sent, block.fileno())
        block.close()

    def _start_pass(self, start: StartPass) -> None:
        """Prepares a pass. What fails is the result of its first task."""
        if self._failure is not None:
            return
        try:
            first = self._config is None
            if self._config is None:
                fd = self._connection.descriptors.popleft()
                self._config = FetchConfig(*load_payload(fd, start.layout))
                os.close(fd)
            config = self._config
            set_worker_info(WorkerInfo(start.id, start.workers, start.seed, config.dataset))
            seed_generators(start.seed)
            if first and config.initialize is not None:
                config.initialize(start.id)
            if not config.stream:
                batched = config.size is not None
                self._fetcher = Fetcher(config.dataset, config.collate, batched, self._writer.empty)
                return
            self._stateful = hasattr(config.dataset, "state_dict")
            if start.state is not None:
                config.dataset.load_state_dict(start.state)
            self._fetcher = StreamFetcher(
                config.dataset, config.collate, config.size, config.drop_last, self._writer.empty
            )
            try:
                for seed in start.skipped:
                    seed_generators(seed)
                    self._fetcher.skip()
            except StopIteration:
                pass  # the stream is shorter than it was: its end is told when a batch is asked for
        except BaseException as error:
            self._failure = describe_failure(error)

    def _fetch(self, task: FetchTask) -> FetchResult:
        if self._failure is not None:
            return FetchResult(None, self._failure, [])
        try:
            seed_generators(task.seed)
            self._writer.begin()
            if task.indices is not None:
                return FetchResult(self._writer.pack(self._fetcher.fetch(task.indices)), None, [])
            try:
                batch = self._fetcher.fetch()
            except StopIteration:
                self._writer.abandon()
                return FetchResult(None, None, [])
            assert self._config is not None
            state = self._config.dataset.state_dict() if self._stateful else None
            return FetchResult(self._writer.pack(batch), None, [], state, self._fetcher.over)
        except BaseException as error:
            self._writer.abandon()
            return FetchResult(None, describe_failure(error, self._fetcher.at), [])
