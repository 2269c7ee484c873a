"""The workers of one loader, from the side of the process that consumes their batches.

Each worker has a connection of its own, on which it sends the results of its tasks in their order. So no lock, queue or
thread stands between a batch and its consumer, and a connection that is closed means that its worker has died.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from ddp.data.fetching import FetchResult, StartPass, WorkerFailure
from ddp.data.fork_server import WorkerProcess, end_workers, fork_server, worker_environment
from ddp.data.shared_memory import BatchReader, PackedBatch, Payload
from ddp.data.worker import FetchTask
from ddp.errors import WorkerError
from ddp.multiprocessing.connections import SharingConnection, make_pipe
from ddp.multiprocessing.pickling import SentFd


class WorkerPool:
    """`count` workers, each with a copy of the payload's content. They end when this object is closed or freed.

    modules: names of the modules that the fork server imports for them
    timeout: the longest wait for a batch, in seconds; 0: no limit

    Raises: ArgumentError if they need a script that has no file; WorkerError if they cannot be started; SharingError if
    the system provides no memory for the payload.
    """

    def __init__(self, payload: Payload, modules: Iterable[str], count: int, timeout: float) -> None:
        server = fork_server({*modules, "__main__"} if payload.needs_script else modules)
        environ = worker_environment()
        block = payload.allocate()
        self._timeout = timeout
        self._connections: list[SharingConnection] = []
        self._processes: list[WorkerProcess] = []
        self._end = weakref.finalize(self, _end, self._connections, self._processes, os.getpid())
        for number in range(count):
            ours, child_end = make_pipe()
            self._connections.append(ours)
            args = (child_end, number, count, (SentFd(block), payload.layout), payload.needs_script, environ)
            with child_end:
                self._processes.append(WorkerProcess(server, args))
        payload.write()  # at the same time, the server forks the workers
        for process in self._processes:
            process.wait_for_start()
        self._readers = [BatchReader() for _ in range(count)]
        self._pending = [0] * count  # results that are still to come

    def __len__(self) -> int:
        return len(self._processes)

    def start_pass(self, starts: Sequence[StartPass]) -> None:
        """Begins a pass in each worker. First waits for the remaining batches of the previous pass, and drops them.

        Raises: WorkerError if a worker dies before it has sent such a batch, or takes longer than the time limit.
        """
        for worker, pending in enumerate(self._pending):
            for _ in range(pending):
                self._take(worker)  # unpacks the batch; dropping it returns its block to the worker
        for worker, start in enumerate(starts):
            self._send(worker, start)

    def request(self, worker: int, number: int, seed: int, indices: Any) -> None:
        """Requests batch `number` from a worker. indices: of the samples in it; None: the next batch of a stream."""
        self._pending[worker] += 1
        self._send(worker, FetchTask(number, seed, indices, self._readers[worker].returned()))

    def _send(self, worker: int, message: StartPass | FetchTask) -> None:
        with contextlib.suppress(OSError):  # it has died, or is dying: `receive` will raise
            self._connections[worker].post(pickle.dumps(message, 5), [])

    def receive(self, worker: int) -> FetchResult:
        """Waits for the result of a worker's oldest task, and returns it.

        Raises: WorkerError if the worker raised an exception, died, or does not send it within the time limit.
        """
        result = self._take(worker)
        if result.failure is not None:
            raise _worker_error(result.failure)
        return result

    def _take(self, worker: int) -> FetchResult:
        connection = self._connections[worker]
        try:
            if self._timeout and not connection.poll(self._timeout):
                who = f"DataLoader worker {worker} of {len(self)}"
                raise WorkerError(f"{who} took longer than timeout={self._timeout:g} s for a batch")
            received = connection.take()
        except (EOFError, OSError):
            raise WorkerError(self._death(worker)) from None
        self._pending[worker] -= 1
        data = received.data
        fds = list(received.fd_owners)
        if not data:  # a long result comes as a file
            with open(fds.pop(0), "rb") as file:
                file.seek(0)
                data = file.read()
        result: FetchResult = pickle.loads(data)
        if isinstance(result.batch, PackedBatch):
            return result._replace(batch=self._readers[worker].unpack(result.batch, *fds))
        return result

    def ready(self, worker: int) -> bool:
        """Whether `receive` would return without waiting."""
        return self._connections[worker].poll(0)

    def _death(self, worker: int) -> str:
        process = self._processes[worker]
        code = process.wait(1.0)  # its connection is closed, so it is ending
        who = f"DataLoader worker {worker} of {len(self)} (pid {process.pid})"
        if code is None or code == 255:  # 255 may mean that the fork server has died
            return f"{who} has gone: its connection is closed"
        if code >= 0:
            return f"{who} has ended with exit code {code}"
        killed = code == -signal.SIGKILL
        hint = "; the kernel kills so, too, where memory runs out" if killed else ""
        return f"{who} was killed by {signal.Signals(-code).name}{hint}"

    def close(self) -> None:
        """Ends the workers, but does not wait. A busy worker ends after its batch, or is killed after two seconds."""
        self._end()


def _end(connections: Sequence[SharingConnection], processes: list[WorkerProcess], owner: int) -> None:
    for connection in connections:
        connection.close()
    if os.getpid() == owner:  # not in a child that the consumer forked: the workers are not the child's
        end_workers(processes)


def _worker_error(failure: WorkerFailure) -> WorkerError:
    """Makes an error with the attributes of a worker's exception, and if possible with its class as a second base."""
    error = WorkerError(failure.message)
    with contextlib.suppress(Exception):  # the class cannot be imported, or cannot be a second base
        cls = pickle.loads(failure.pickled_class)
        # A StopIteration would end the user's loop.
        if issubclass(cls, Exception) and not issubclass(cls, WorkerError | StopIteration | StopAsyncIteration):
            names = {"__module__": WorkerError.__module__}
            error = type("WorkerError", (_RaisedInWorker, cls), names)(failure.message)
    for name, pickled in failure.attributes.items():
        with contextlib.suppress(Exception):  # it cannot be unpickled here, or is read-only
            object.__setattr__(error, name, pickle.loads(pickled))
    if isinstance(error, SyntaxError):
        error.msg = failure.message  # a traceback shows `msg`
    return error


class _RaisedInWorker(WorkerError):
    """The first base of an error whose second base is the class of a worker's exception.

    Methods of that class may need attributes that were not sent. So the class's methods that initialize, show or copy
    an error are replaced by the methods below.
    """

    __init__ = Exception.__init__
    __str__ = Exception.__str__
    __repr__ = Exception.__repr__
    __getattribute__ = Exception.__getattribute__
    __getattr__ = Exception.__getattribute__  # raises the AttributeError of the failed look-up

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return WorkerError, (str(self),)
