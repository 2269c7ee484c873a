"""Resizing a running job: receives and answers requests, and keeps the state of the request in progress.

1. `ddp-launch --resize N --job PID` connects, or a host that the job does without can be reached. If the job cannot be
   resized, the user gets the reason, and the job continues.
2. The agents set a byte that their ranks check after each step. No signal is sent: it would kill a rank that has just
   left its loop. All ranks agree on a step, copy their state to memory or save it on disk, and exit with 75.
3. The job starts again with N ranks, which load that state. When all of them have begun their loop, the resize is done.
4. If they fail before that, the job starts again with as many ranks as before, from the same state. It ends instead if
   its time limit has passed, or a signal has ended it.

Between steps 2 and 3 the state may be in memory alone. A signal that ends the job is postponed in that time: the next
ranks load the state, and then they are asked to stop, which saves it on disk.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress

from launcher import engines
from launcher.diagnosis.failures import duration
from launcher.errors import UsageError, plural
from launcher.job import Job
from launcher.network import Host
from launcher.resize import address, peer
from launcher.supervisor.environment import StateMemory
from launcher.supervisor.rank_table import RankTable
from launcher.supervisor.returning_hosts import ReturningHosts

# How long to wait for the request on a new connection (s): the client sends it at once.
_LIMIT = 0.5
# Maximum length of a request (bytes).
_MAX_REQUEST = 16


class Resizing:
    """The requests to resize one job. One request is handled at a time.

    requested: the job as the user asked for it; environ: of the launcher; say: prints a sentence for the user

    memory: where ranks store their state for the next start
    hosts: probes the hosts that the job could use, but does without
    listener: a socket that becomes readable when a client connects; None if clients cannot connect
    target: the job with the requested number of ranks; None if there is no request
    before: the job as it was; None until the target's ranks are started
    step: the step after which the ranks left their loop
    since: when the launcher learned that a rank leaves its loop (s, job clock); None before that, and once the request
        has been answered
    failure: the sentence that the target's ranks failed, and that the job goes on as before; "" if they have not failed
    postponed: number of the signal that ends the job when ranks have loaded the state; 0: none
    """

    def __init__(
        self,
        requested: Job,
        memory: StateMemory,
        environ: Mapping[str, str],
        say: Callable[[str], None],
    ) -> None:
        self.memory = memory
        self.hosts = ReturningHosts(requested, environ)
        self._environ = environ
        self._say = say
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

    def handle_request(self, job: Job, ranks: RankTable) -> None:
        """Accepts a connection. Begins to resize the job, or answers why it cannot be resized.

        Closes the connection without an answer if the client belongs to another user, or sends no number in time.

        job: as it is now; ranks: its ranks
        """
        assert self.listener is not None
        try:
            client, _ = self.listener.accept()
        except OSError:  # The client has ended, or no file descriptor is free.
            return
        client.settimeout(_LIMIT)
        try:
            n = int(client.recv(_MAX_REQUEST)) if peer(client)[1] == os.geteuid() else None
        except (OSError, ValueError):
            n = None
        if n is None:
            client.close()
            return
        try:
            if self.target is not None:
                raise UsageError(f"the job is about to go on with {plural(self.target.size, 'rank')}: ask when it does")
            if n == job.size:
                raise UsageError(f"the job has {plural(n, 'rank')} already")
            self._begin(job, n, job.hosts, ranks)
            self._client = client
            self.hosts.max_ranks = n
        except UsageError as refusal:
            _answer(client, False, str(refusal))

    def take_hosts(self, job: Job, ranks: RankTable) -> None:
        """Resizes the job onto the hosts that have answered, if it gets more ranks and is not being resized."""
        hosts, n = self.hosts.answered(job.hosts, ranks.max_ranks or 0)
        if n <= job.size or self.target is not None:
            return
        self.hosts.close()
        names = ", ".join(host.name for host in hosts if host not in job.hosts)
        self._say(f"{names} can be reached: the job is resized from {job.size} to {n} ranks")
        try:
            self._begin(job, n, hosts, ranks)
        except UsageError as refusal:
            self._say(str(refusal))
            self.hosts.failed()

    def _begin(self, job: Job, n: int, hosts: tuple[Host, ...], ranks: RankTable) -> None:
        """Asks the ranks to leave their loop, so that the job goes on with `n` ranks on `hosts`.

        Raises: UsageError if the job cannot be resized to them.
        """
        max_ranks = ranks.max_ranks
        if max_ranks is None:
            loop = "the loop of a ddp.checkpoint.Checkpointer, which is what can leave for another number of ranks"
            raise UsageError(f"not all ranks of the job are in {loop}")
        if n > max_ranks:
            raise UsageError(f"micro_batches={max_ranks} is the most ranks that the job can have, not {n}")
        if n < (job.min_ranks or 1):
            raise UsageError(f"--min-ranks {job.min_ranks} is the fewest ranks that the job can have, not {n}")
        target = job.with_ranks(n, hosts)
        engines.choose_engine(engines.resolve_size(target, self._environ), self._environ)
        if self.memory.variable and not self.memory.grow(n):
            raise UsageError(f"the system grants no memory, or no open files, for the state of {n} ranks")
        self.target = target
        ranks.send({"resize": True})

    def left(self, step: int, now: float) -> None:
        """Called when a rank leaves its loop after `step`. Next, it saves its state for the ranks of the next start."""
        if self.since is None:
            self.step = step
            self.since = now

    def go_back(self, why: str) -> Job:
        """Called when the ranks of the target have failed. Returns: the job to start instead, as it was before"""
        assert self.target is not None
        assert self.before is not None
        self.hosts.failed()
        target = plural(self.target.size, "rank")
        self.failure = (
            f"the job did not start with {target}, and goes on with {plural(self.before.size, 'rank')}: {why}"
        )
        return self.before

    def loaded(self, now: float) -> int:
        """Called when all ranks have loaded the state and begun their loop. Answers the client. now: s, job clock

        Returns: the number of the signal that ends the job now; 0: none, or the job is not being resized
        """
        if self.before is None:
            return 0
        assert self.target is not None
        assert self.since is not None
        text = self.failure
        if not text:
            pause = f"training stood still for {duration(now - self.since)}"
            ranks = plural(self.target.size, "rank")
            text = f"resized from {self.before.size} to {ranks} after step {self.step}; {pause}"
            self.hosts.succeeded()
        self.answer(text, done=not self.failure)
        self._say(text)
        return self.postponed

    def answer(self, text: str, done: bool = False) -> None:
        """Ends the request, and answers its client, if any. done: the job has the requested number of ranks"""
        if self._client is not None:
            _answer(self._client, done, text)
        self._client = self.since = self.target = self.before = None
        self.failure = ""

    def close(self) -> None:
        """Called when the job has ended: answers the client, closes the listener, and stops probing hosts."""
        self.answer("the job ended before it could have another number of ranks")
        self.hosts.close()
        if self.listener is not None:
            self.listener.close()


def _answer(client: socket.socket, done: bool, text: str) -> None:
    with suppress(OSError):  # The client has ended.
        client.sendall(json.dumps([done, text]).encode())
        client.shutdown(socket.SHUT_RDWR)  # Processes that were forked meanwhile keep the connection open, too.
    client.close()
