"""PMI server: lets MPICH's ranks find each other if no mpiexec has started them.

Rank 0 runs this file as a separate process, because a rank inside MPI_Init holds the GIL. Every rank opens two
connections. On "control" the server reports which ranks are missing, that all have joined, and later which have died.
The other connection, "pmi", is passed to MPI, which speaks PMI-1 on it. `ddp-launch` uses only `KeyValueSpace`, over
inherited sockets.

Both sides prove that they have the job's secret before anything else is read. The process ends when all ranks have
left, or 2 s after rank 0 has ended. This module imports little, because the launcher loads it too.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    # With -I the folder of this package is not on the path. It is added last, to shadow no standard module.
    sys.path.append(__file__.rpartition("/collectives/")[0])

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable

from collectives.handshake import is_proof, nonce, proof

BANNER = "ddp-pmi-1"
CONTROL = "control"
PMI = "pmi"
# The time within which a peer must prove that it is a rank (s).
_HANDSHAKE = 10.0
# Largest number of unauthenticated connections. One more makes the server drop the oldest. Ranks answer within
# milliseconds, so they get in even if strangers hold all connections. A rank that was dropped connects again.
_UNAUTHENTICATED = 64
# Bytes of the longest message.
_LINE = 1 << 16
# Bytes of the longest message of a peer that has not authenticated itself.
_HELLO = 512
# How long the server runs on after rank 0 has ended (s): other ranks may still use it while they exit.
_LINGER = 2.0
# Interval at which the server checks whether rank 0 is alive (s).
_POLL = 0.2


class KeyValueSpace:
    """Answers PMI-1 requests of the ranks' MPICH for a key-value space and a barrier. A message is one line of text.

    size: number of ranks; keys: the initial contents
    """

    def __init__(self, size: int, keys: dict[str, str] | None = None) -> None:
        self._size = size
        self._keys = dict(keys or {})
        # MPICH names its shared-memory file after this. Two jobs with the same name on one host would share the file.
        self._name = f"ddp_{os.getpid()}_{os.urandom(16).hex()}"
        self._barrier: list[Callable[[str], None]] = []
        self._dead: int | None = None

    def answer(self, line: str, send: Callable[[str], None]) -> None:
        """Answers one line of a rank through `send`; a barrier is answered when all ranks have entered it."""
        fields = dict(word.partition("=")[::2] for word in line.split(" "))
        command = fields.get("cmd", "")
        if command == "barrier_in":
            self._barrier.append(send)
            if self._dead is not None:
                self.rank_died(self._dead)
            elif len(self._barrier) == self._size:
                self._leave_barrier("rc=0")
        elif command == "put":
            self._keys[fields.get("key", "")] = line.partition(" value=")[2].strip()
            send("cmd=put_result rc=0 msg=success")
        elif command == "get":
            value = self._keys.get(fields.get("key", ""))
            result = "rc=-1 msg=key_not_found" if value is None else f"rc=0 msg=success value={value}"
            send(f"cmd=get_result {result}")
        elif command in _REPLIES:
            send(_REPLIES[command].format(size=self._size, name=self._name))
        elif command != "abort":  # Spawning processes and naming ports are not supported.
            send(f"cmd={command}_result rc=-1 msg=not_supported")

    def rank_died(self, rank: int) -> None:
        """Answers the ranks that wait in a PMI barrier with an error. With this answer, MPI ends their processes."""
        self._dead = rank
        if self._barrier:
            print(f"collectives: rank {rank} ended while other ranks wait for it in MPI", file=sys.stderr, flush=True)
        self._leave_barrier("rc=-1 msg=a_rank_has_ended")

    def _leave_barrier(self, result: str) -> None:
        waiting = self._barrier
        self._barrier = []
        for send in waiting:
            send(f"cmd=barrier_out {result}")


FINALIZED = "cmd=finalize_ack rc=0"
_REPLIES = {
    "init": "cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=1",
    "get_maxes": "cmd=maxes rc=0 kvsname_max=256 keylen_max=64 vallen_max=1024",
    "get_appnum": "cmd=appnum rc=0 appnum=0",
    "get_my_kvsname": "cmd=my_kvsname rc=0 kvsname={name}",
    "get_universe_size": "cmd=universe_size rc=0 size={size}",
    "finalize": FINALIZED,
}


class Server:
    """Serves one job of `size` ranks on a listening socket until all have left, or `parent` has ended.

    Each connection has a thread of its own.
    """

    def __init__(self, listener: socket.socket, secret: bytes, size: int, parent: int) -> None:
        self._listener = listener
        self._secret = secret
        self._size = size
        self._parent = parent
        self._lock = threading.Lock()  # Held to change the attributes below, and to send to ranks.
        self._ranks: dict[str, dict[int, socket.socket]] = {CONTROL: {}, PMI: {}}
        self._departed: set[int] = set()
        self._complete = False
        self._space = KeyValueSpace(size)
        self._unauthenticated: dict[socket.socket, None] = {}  # An ordered set, the oldest first.
        self._over = threading.Event()

    def serve(self) -> None:
        """Serves the ranks, and returns when the job is over."""
        threading.Thread(target=self._accept, daemon=True).start()
        while not self._over.wait(_POLL):
            if os.getppid() != self._parent:
                # A restarted job must not find this server; MPI in the other ranks may still use it while they exit.
                self._listener.shutdown(socket.SHUT_RDWR)  # Otherwise the other thread accepts one more connection.
                self._listener.close()
                time.sleep(_LINGER)
                return

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return
                time.sleep(_POLL)  # The peer has disconnected, or no descriptor is free.
                continue
            with self._lock:
                if len(self._unauthenticated) >= _UNAUTHENTICATED:
                    self._drop(next(iter(self._unauthenticated)))
                self._unauthenticated[sock] = None
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _drop(self, sock: socket.socket) -> None:
        """Ends an unauthenticated connection. The thread that serves it notices that, and closes the socket."""
        del self._unauthenticated[sock]
        with contextlib.suppress(OSError):  # The other side has closed it.
            sock.shutdown(socket.SHUT_RDWR)

    def _serve(self, sock: socket.socket) -> None:
        with sock, sock.makefile("rb") as lines, contextlib.suppress(OSError, ValueError):
            try:
                role, rank = self._authenticate(sock)
            finally:
                with self._lock:
                    self._unauthenticated.pop(sock, None)
            try:
                while line := lines.readline(_LINE).decode(errors="replace").rstrip("\n"):
                    with self._lock:
                        if role == PMI:
                            self._space.answer(line, lambda answer: _send(sock, answer))
                        else:
                            self._leave(rank)
            finally:
                if role == CONTROL:
                    with self._lock:
                        self._disconnected(rank)

    def _authenticate(self, sock: socket.socket) -> tuple[str, int]:
        """The role and rank of the peer. Raises: ValueError, OSError if it is not a rank of this job."""
        challenge = nonce()
        _send(sock, f"{BANNER} {challenge}")
        role, number, rank_nonce, answer = read_line(sock, _HANDSHAKE).split()
        if not is_proof(answer, self._secret, "rank", role, number, rank_nonce, challenge):
            raise ValueError("another secret")
        rank = int(number)
        ranks = self._ranks[role]
        with self._lock:
            if sock not in self._unauthenticated:
                raise ValueError("too late")
            del self._unauthenticated[sock]
            sock.settimeout(None)
            taken = rank in ranks or rank in self._departed
            _send(sock, f"{proof(self._secret, 'server', rank_nonce)} {'taken' if taken else 'welcome'}")
            if taken:
                raise ValueError("taken")
            ranks[rank] = sock
            if role == CONTROL:
                self._complete = len(ranks) == self._size
                self._notify("go" if self._complete else self._missing())
        return role, rank

    def _missing(self) -> str:
        return "missing " + " ".join(str(rank) for rank in range(self._size) if rank not in self._ranks[CONTROL])

    def _notify(self, line: str) -> None:
        for sock in self._ranks[CONTROL].values():
            _send(sock, line)

    def _leave(self, rank: int) -> None:
        self._departed.add(rank)
        if self._complete and len(self._departed) == self._size:
            self._over.set()

    def _disconnected(self, rank: int) -> None:
        del self._ranks[CONTROL][rank]
        if not self._complete:
            self._notify(self._missing())
        elif rank not in self._departed:
            self._notify(f"died {rank}")
            self._space.rank_died(rank)
            self._leave(rank)


def read_line(sock: socket.socket, seconds: float) -> str:
    """The next line, without its end. Read byte by byte, because the bytes after the line are for MPI.

    Raises: TimeoutError if the line is not complete within `seconds`, even if some bytes arrive; ValueError if it is
    too long, or the connection ends; OSError if the connection breaks.
    """
    line = b""
    deadline = time.monotonic() + seconds
    while not line.endswith(b"\n"):
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        byte = sock.recv(1)
        if not byte or len(line) > _HELLO:
            raise ValueError("no answer of ours")
        line += byte
    return line[:-1].decode("ascii")


def _send(sock: socket.socket, line: str) -> None:
    with contextlib.suppress(OSError):  # The connection is closed; the next read finds out.
        sock.sendall(line.encode() + b"\n")


def main() -> None:
    """Runs the server. Arguments: the listening descriptor, the number of ranks, rank 0's pid. stdin: the secret"""
    # The job's signals are meant for the ranks; this process ends with rank 0.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    descriptor, size, parent = map(int, sys.argv[1:])
    with socket.socket(fileno=descriptor) as listener:
        Server(listener, sys.stdin.buffer.read(), size, parent).serve()


if __name__ == "__main__":
    main()
