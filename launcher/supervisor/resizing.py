"""Another number of ranks for a running job: who asks for it, and how far it has come.

1. `ddp-launch --resize N --job PID` connects. What cannot be is refused, and the job goes on untouched.
2. The agents set a byte that their ranks look at after each step. No signal is sent, since a rank that has just left
   its loop would die of it. All ranks agree on a step, leave their state in memory, or on disk, and exit with 75.
3. The job starts with N ranks, which go on from there. When all of them are in their loop, it is done.
4. If they fail before that, the job starts again with the number that it had, from the same state.

From the moment on at which the first rank leaves its state, that may be in memory alone. A signal that ends the job is
kept until ranks have the state again, and then they save it on disk as they stop.
"""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from dataclasses import replace

from launcher.diagnosis.failures import duration
from launcher.job import Job
from launcher.network import Host
from launcher.resize import address, peer
from launcher.supervisor.environment import StateMemory

# A request follows its connection at once (s).
_LIMIT = 0.5
_LONGEST = 16  # bytes of a request


def with_ranks(job: Job, n: int, hosts: tuple[Host, ...] | None = None) -> Job:
    """The job with `n` ranks, of which others may be shown, or have the standard input. Raises: UsageError

    hosts: on which; None: as before
    """
    shown = None if job.ranks is None else tuple(rank for rank in job.ranks if rank < n) or None
    debug_rank = job.debug_rank if job.debug_rank < n else 0
    return replace(job, n=n, hosts=job.hosts if hosts is None else hosts, ranks=shown, debug_rank=debug_rank)


class Resizing:
    """The requests for another number of ranks of one job, one at a time.

    memory: in which ranks leave their state
    listener: what to wait for; None if nobody can ask
    target: the job that is asked for, or that is started; None: nothing is
    before: the job as it was, from the moment on at which the target's ranks are started
    step, since: after which ranks leave their state, and since when (the job's clock); None: they have not begun to, or
    other ranks have it
    failure: why the target's ranks failed, and the job is started as it was; "" while that has not happened
    postponed: the signal by which the job is to end as soon as ranks have its state; 0: none
    """

    def __init__(self, memory: StateMemory) -> None:
        self.memory = memory
        self.target: Job | None = None
        self.before: Job | None = None
        self.failure = ""
        self.postponed = 0
        self.step = 0
        self.since: float | None = None
        self._client: socket.socket | None = None
        self.listener: socket.socket | None = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self.listener.bind(address(os.getpid()))
            self.listener.listen()
            self.listener.setblocking(False)
        except OSError:  # this process has another job, or another process that name: nobody can ask then
            self.listener.close()
            self.listener = None

    def receive(self) -> int | None:
        """Takes a connection; the number of ranks that is asked for, None if there is nothing to do.

        What follows for that number is a target, or `answer`.
        """
        assert self.listener is not None
        try:
            client, _ = self.listener.accept()
        except OSError:  # it has gone again, or there is no file for it
            return None
        client.settimeout(_LIMIT)
        try:
            number = int(client.recv(_LONGEST)) if peer(client)[1] == os.geteuid() else None
        except (OSError, ValueError):
            number = None
        if number is None:
            client.close()
        elif self.target is not None:
            _answer(client, False, f"the job is about to go on with {self.target.size} ranks: ask when it does")
            number = None
        else:
            self._client = client
        return number

    def go_back(self, why: str) -> Job:
        """The ranks of the target have failed: the job to start, which is the one before."""
        assert self.target is not None
        assert self.before is not None
        self.failure = (
            f"the job did not start with {_ranks(self.target)}, and goes on with {_ranks(self.before)}: {why}"
        )
        return self.before

    def finish(self, now: float) -> str:
        """The ranks have the state: the sentence for it, which who asked gets, too. now: of the job's clock (s)"""
        assert self.target is not None
        assert self.before is not None
        assert self.since is not None
        stood = f"training stood still for {duration(now - self.since)}"
        resized = f"resized from {self.before.size} to {_ranks(self.target)} after step {self.step}; {stood}"
        text = self.failure or resized
        self.answer(text, done=not self.failure)
        return text

    def answer(self, text: str, done: bool = False) -> None:
        """Answers who asked, and forgets the request. done: the job has the ranks that were asked for"""
        if self._client is not None:
            _answer(self._client, done, text)
        self._client = self.since = self.target = self.before = None
        self.failure = ""

    def close(self) -> None:
        """The job has ended."""
        self.answer("the job ended before it could have another number of ranks")
        if self.listener is not None:
            self.listener.close()


def _ranks(job: Job) -> str:
    return f"{job.size} rank{'s' * (job.size != 1)}"


def _answer(client: socket.socket, done: bool, text: str) -> None:
    with suppress(OSError):  # it did not wait
        client.sendall(json.dumps([done, text]).encode())
        client.shutdown(socket.SHUT_RDWR)  # processes that were forked meanwhile have it open, too
    client.close()
