"""Resizing a running job: receives and answers requests, and keeps the state of the one in progress.

1. `ddp-launch --resize N --job PID` connects. If the job cannot be resized, it gets the reason, and the job continues.
2. The agents set a byte that their ranks check after each step. No signal is sent: it would kill a rank that has just
   left its loop. All ranks agree on a step, copy their state to memory or save it on disk, and exit with 75.
3. The job starts again with N ranks, which load that state. When all of them have begun their loop, it is resized.
4. If they fail before that, the job starts again with as many ranks as before, from the same state.

Between 2 and 3 the state may be in memory alone. A signal that ends the job is postponed in that time: the next ranks
load the state, and then they are asked to stop, which saves it on disk.
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

# How long to wait for the request on a new connection (s): the client sends it at once.
_LIMIT = 0.5
# Bytes of the longest request.
_MAX_REQUEST = 16


def with_ranks(job: Job, n: int, hosts: tuple[Host, ...] | None = None) -> Job:
    """The job with `n` ranks, without options for ranks that it no longer has.

    hosts: to start ranks on; None: as before
    Raises: UsageError if such a job is invalid.
    """
    shown = None if job.ranks is None else tuple(rank for rank in job.ranks if rank < n) or None
    debug_rank = job.debug_rank if job.debug_rank < n else 0
    return replace(job, n=n, hosts=job.hosts if hosts is None else hosts, ranks=shown, debug_rank=debug_rank)


class Resizing:
    """The requests to resize one job. One request is handled at a time.

    memory: in which ranks store their state for the next start
    listener: a socket that becomes readable when a client connects; None if no client can
    target: the job with the requested number of ranks; None if there is no request
    before: the job as it was; None until the target's ranks are started
    step: the step after which the ranks left their loop
    since: when the first of them left it (s, job clock); None if none has left, or the next ranks have loaded the state
    failure: why the target's ranks failed, and the job was started as before; "" if they have not failed
    postponed: number of the signal that ends the job when ranks have loaded the state; 0: none
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
        except OSError:  # Another job of this process has the address.
            self.listener.close()
            self.listener = None

    def receive(self) -> int | None:
        """Accepts a connection. Returns: the requested number of ranks, for which the caller must set `target` or call
        `answer`; None if there is nothing to do
        """
        assert self.listener is not None
        try:
            client, _ = self.listener.accept()
        except OSError:  # The client has ended, or no file descriptor is free.
            return None
        client.settimeout(_LIMIT)
        try:
            number = int(client.recv(_MAX_REQUEST)) if peer(client)[1] == os.geteuid() else None
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
        """Notes that the ranks of the target have failed. Returns: the job to start instead, as it was before"""
        assert self.target is not None
        assert self.before is not None
        self.failure = (
            f"the job did not start with {_ranks(self.target)}, and goes on with {_ranks(self.before)}: {why}"
        )
        return self.before

    def complete(self, now: float) -> str:
        """All ranks have loaded the state: answers the client. Returns: the answer. now: s, job clock"""
        assert self.target is not None
        assert self.before is not None
        assert self.since is not None
        pause = f"training stood still for {duration(now - self.since)}"
        resized = f"resized from {self.before.size} to {_ranks(self.target)} after step {self.step}; {pause}"
        text = self.failure or resized
        self.answer(text, done=not self.failure)
        return text

    def answer(self, text: str, done: bool = False) -> None:
        """Answers the client, and ends its request. done: the job has the requested number of ranks"""
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
    with suppress(OSError):  # The client has ended.
        client.sendall(json.dumps([done, text]).encode())
        client.shutdown(socket.SHUT_RDWR)  # Processes that were forked meanwhile keep the connection open, too.
    client.close()
