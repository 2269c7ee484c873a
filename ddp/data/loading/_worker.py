"""What runs in a worker process: it takes tasks in order, and answers each of them once.

Its consumer has died, or wants no more of it, when the line is closed: then it ends, and so it does with the fork
server that started it.
"""

from __future__ import annotations

import os
import pickle
import socket
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NamedTuple

from ddp.data.loading import _information
from ddp.data.loading._fetching import Content, Fetcher, StreamFetcher
from ddp.data.loading._information import WorkerInfo
from ddp.data.loading._line import Line
from ddp.data.loading._packing import Batch, Outgoing
from ddp.data.loading._parcel import Layout, unpacked
from ddp.data.loading._seeds import sow


class Begin(NamedTuple):
    """A pass begins; the parcel comes along with the first.

    state: of a stream's dataset, to go on from; skipped: where it has none, the seeds of batches that are left out
    """

    id: int
    workers: int
    seed: int
    layout: Layout
    state: Any = None
    skipped: Sequence[int] = ()


class Task(NamedTuple):
    """One batch. returned: blocks that may be used again; indices: None for the next of a stream."""

    seed: int
    indices: Any
    returned: list[str]


class Failure(NamedTuple):
    """An exception. kind: its class, pickled, None if it cannot be; at: the index that was read."""

    kind: bytes | None
    name: str
    text: str
    trace: str
    at: str | None


class Answer(NamedTuple):
    """To a task; neither batch nor failure: the stream is at its end.

    state: the dataset's own, after this batch; last: this is known to be the last one
    """

    batch: Batch | None
    failure: Failure | None
    dropped: list[str]
    state: Any = None
    last: bool = False


def run(end: socket.socket, broken: Failure | None) -> None:
    """Answers tasks until the line is closed. broken: why the script could not be imported."""
    line = Line(end)
    worker = _Worker(line, broken)
    try:
        while True:
            worker.answer(pickle.loads(line.receive()))
    except (EOFError, OSError):
        pass  # the consumer has closed the line, or died


def failure(error: BaseException, at: Any = None) -> Failure:
    """What the consumer is told of an exception."""
    try:
        kind = pickle.dumps(type(error))
    except Exception:  # a class that was made in a function
        kind = None
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith("ddp.data.loading."):
        trace = trace.tb_next  # begins in the user's code, or where he called what raised
    shown = "".join(traceback.format_exception(type(error), error, trace or error.__traceback__))
    try:
        text = str(error)
    except Exception:  # a broken __str__ must not hide the error
        text = "(its message cannot be shown)"
    return Failure(kind, type(error).__name__, text, shown, _shown(at))


def _shown(at: Any) -> str | None:
    if isinstance(at, list):
        few = [repr(index) for index in at[:8]]
        return f"indices [{', '.join(few)}{', …' if len(at) > 8 else ''}]"
    return at if at is None or isinstance(at, str) else f"index {at!r}"


class _Worker:
    def __init__(self, line: Line, broken: Failure | None) -> None:
        self._line, self._failed = line, broken
        self._out = Outgoing()
        self._content: Content | None = None
        self._fetcher: Any = None
        self._stateful = False

    def answer(self, message: Begin | Task) -> None:
        if isinstance(message, Begin):
            self._begin(message)
            return
        self._out.give_back(message.returned)
        made = self._made(message)
        dropped, self._out.dropped[:] = list(self._out.dropped), []
        answer = pickle.dumps(made._replace(dropped=dropped), 5)
        if made.batch is None or not made.batch.new:
            self._line.send(answer)
            return
        block = self._out.new
        assert block is not None
        self._line.send(answer, block.fileno())
        block.close()

    def _begin(self, begin: Begin) -> None:
        """Gets ready for a pass; what goes wrong is the answer to its first task."""
        if self._failed is not None:
            return
        try:
            first = self._content is None
            if self._content is None:
                fd = self._line.descriptors.popleft()
                self._content = Content(*unpacked(fd, begin.layout))
                os.close(fd)
            content = self._content
            _information.become(WorkerInfo(begin.id, begin.workers, begin.seed, content.dataset))
            sow(begin.seed)
            if first and content.initialize is not None:
                content.initialize(begin.id)
            if not content.stream:
                batched = content.size is not None
                self._fetcher = Fetcher(content.dataset, content.collate, batched, self._out.empty)
                return
            self._stateful = hasattr(content.dataset, "state_dict")
            if begin.state is not None:
                content.dataset.load_state_dict(begin.state)
            self._fetcher = StreamFetcher(
                content.dataset, content.collate, content.size, content.drop_last, self._out.empty
            )
            try:
                for seed in begin.skipped:
                    sow(seed)
                    self._fetcher.skip()
            except StopIteration:
                pass  # the stream is shorter than it was: its end is told when a batch is asked for
        except BaseException as error:
            self._failed = failure(error)

    def _made(self, task: Task) -> Answer:
        if self._failed is not None:
            return Answer(None, self._failed, [])
        try:
            sow(task.seed)
            self._out.begin()
            if task.indices is not None:
                return Answer(self._out.pack(self._fetcher.fetch(task.indices)), None, [])
            try:
                batch = self._fetcher.fetch()
            except StopIteration:
                self._out.abandon()
                return Answer(None, None, [])
            assert self._content is not None
            state = self._content.dataset.state_dict() if self._stateful else None
            return Answer(self._out.pack(batch), None, [], state, self._fetcher.over)
        except BaseException as error:
            self._out.abandon()
            return Answer(None, failure(error, self._fetcher.at), [])


def finish() -> None:
    """The end of the process: what was printed is written, exit handlers are the server's and do not run."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):
            pass  # there is no such stream, nobody reads it any more, or the script has closed it
    os._exit(0)
