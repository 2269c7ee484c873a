"""The workers of one loader, as the process sees them that consumes their batches.

Each has a line of its own, on which it answers its tasks in their order: so no lock, no queue and no thread stands
between a batch and its consumer, and a line that closes says that its worker has died.
"""

from __future__ import annotations

import pickle
import signal
import socket
import weakref
from collections.abc import Sequence
from typing import Any

from ddp.data.loading import _nursery, _script
from ddp.data.loading._line import Line
from ddp.data.loading._nursery import Nursery
from ddp.data.loading._packing import Incoming
from ddp.data.loading._parcel import Parcel
from ddp.data.loading._worker import Answer, Begin, Failure, Task
from ddp.errors import WorkerError


class Crew:
    """`count` workers, each with a copy of what is in the parcel. They end when this is closed, or forgotten.

    before: the parcel of an earlier crew, whose memory is taken again if it holds the same
    timeout: seconds that a batch may take; 0: as long as it takes
    fresh: forked by a server of their own, which is started for them

    Raises: ArgumentError if they need a script that has no file; WorkerError if they cannot be started.
    """

    def __init__(self, parcel: Parcel, before: Parcel | None, count: int, timeout: float, fresh: bool) -> None:
        script = _script.current() if parcel.needs_script else None
        self._parcel = parcel
        self._sent = False
        self._timeout = timeout
        self._nursery = Nursery() if fresh else _nursery.nursery()
        self._number, ends = self._nursery.start(count, script)
        parcel.write(before)  # while they are forked
        self._lines = [Line(end, timeout) for end in ends]
        self._incoming = [Incoming() for _ in ends]
        self._owed = [0] * count  # answers that are still to come
        self._end = weakref.finalize(self, _end, self._nursery, fresh, self._number, ends)

    def __len__(self) -> int:
        return len(self._lines)

    def begin(self, seeds: Sequence[int], states: Sequence[Any], skipped: Sequence[list[int]]) -> None:
        """A pass begins: what is left of the one before is thrown away.

        seeds: of each worker. states, skipped: where a stream goes on, see `Begin`
        """
        for worker, owed in enumerate(self._owed):
            for _ in range(owed):
                answer = self.receive(worker)
                if answer.batch is not None:
                    self.unpacked(worker, answer)  # gives its block back
        for worker in range(len(self)):
            begin = Begin(worker, len(self), seeds[worker], self._parcel.layout, states[worker], skipped[worker])
            self._send(worker, begin, -1 if self._sent else self._parcel.fileno())
        self._sent = True

    def ask(self, worker: int, seed: int, indices: Any) -> None:
        """Gives a worker a task. indices: None for the next batch of a stream."""
        self._owed[worker] += 1
        self._send(worker, Task(seed, indices, self._incoming[worker].returned()))

    def _send(self, worker: int, message: Begin | Task, fd: int = -1) -> None:
        try:
            self._lines[worker].send(pickle.dumps(message, 5), fd)
        except OSError:
            pass  # it has died, or is about to: the answer that does not come says so

    def receive(self, worker: int) -> Answer:
        """A worker's next answer. Raises: WorkerError if it died, or takes longer than the time limit."""
        try:
            payload = self._lines[worker].receive()
        except TimeoutError:
            raise WorkerError(
                f"DataLoader worker {worker} of {len(self)} took longer than timeout={self._timeout:g} s for a batch"
            ) from None
        except (EOFError, OSError):
            raise WorkerError(self._obituary(worker)) from None
        self._owed[worker] -= 1
        answer: Answer = pickle.loads(payload)
        self._incoming[worker].forget(answer.dropped)
        return answer

    def ready(self, worker: int) -> bool:
        """Whether `receive` need not wait."""
        return self._lines[worker].ready()

    def unpacked(self, worker: int, answer: Answer) -> Any:
        """The batch of an answer that has one."""
        assert answer.batch is not None
        fd = self._lines[worker].descriptors.popleft() if answer.batch.new else -1
        return self._incoming[worker].unpack(answer.batch, fd)

    def _obituary(self, worker: int) -> str:
        pid, status = self._nursery.fate(self._number, worker)
        who = f"DataLoader worker {worker} of {len(self)}" + (f" (pid {pid})" if pid else "")
        if status is None:
            return f"{who} has gone: its line is closed"
        code = -(status & 0x7F) if status & 0x7F else status >> 8
        if code >= 0:
            return f"{who} has ended with exit code {code}"
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        hint = {
            "SIGKILL": "; the kernel kills so, too, where memory runs out",
            "SIGBUS": "; so it ends where memory, or a file that is mapped, cannot be had",
        }.get(name, "")
        return f"{who} was killed by {name}{hint}"

    def close(self) -> None:
        """Ends the workers: those that are in the middle of a batch when they have made it, or after two seconds."""
        self._end()


def _end(nursery: Nursery, fresh: bool, crew: int, ends: Sequence[socket.socket]) -> None:
    for end in ends:
        end.close()
    if nursery.forked():
        return  # this is a child that the consumer forked: they are not its workers
    nursery.end(crew)
    if fresh:
        nursery.close()


def raised(failure: Failure, worker: int, count: int, batch: int) -> WorkerError:
    """The error of a worker's exception: of its class, too, where such a class can be made."""
    at = "" if failure.at is None else f", {failure.at}"
    message = (
        f"{failure.name} in DataLoader worker {worker} of {count}, batch {batch}{at}: {failure.text}\n\n"
        f"In the worker:\n{failure.trace.rstrip()}"
    )
    try:
        kind = pickle.loads(failure.kind) if failure.kind is not None else WorkerError
        mixes = issubclass(kind, Exception) and not issubclass(WorkerError, kind)
        if mixes and not issubclass(kind, StopIteration | StopAsyncIteration):  # which would end the user's loop
            body: dict[str, Any] = {
                "__init__": lambda self, text: Exception.__init__(self, text),
                "__str__": lambda self: message,
            }
            body["__module__"], body["__reduce__"] = WorkerError.__module__, lambda self: (WorkerError, (message,))
            made = type("WorkerError", (WorkerError, kind), body)
            return made(message)
    except Exception:  # a class that is not here, or does not mix with another: the message tells all the same
        pass
    return WorkerError(message)
