"""PMI server: lets MPICH's ranks find each other where no mpiexec has started them.

Rank 0 runs this file as a process of its own, because a rank inside MPI_Init holds the interpreter lock. Every rank
opens two connections. On "control" it learns who is missing, when all have come, and later who has died. The other,
"pmi", is handed to MPI, which speaks PMI-1 on it. `ddp-launch` uses `KeyValueSpace` alone, over inherited sockets.

Both sides prove that they know the job's secret before anything else is read. The process ends when all ranks have
left, or rank 0 has ended. It needs nothing but the standard library.
"""

from __future__ import annotations

import hmac
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable

BANNER = "ddp-pmi-1"
CONTROL, PMI = "control", "pmi"
#: Seconds that a connection has to prove itself.
HANDSHAKE = 10.0
_STRANGERS = 64  # unauthenticated connections; more than that, and the oldest is closed
_LINE = 1 << 16  # bytes; no message is longer, and none before the proof is longer than _HELLO
_HELLO = 512
_LINGER = 2.0  # s; how long the process outlives rank 0, for ranks that end with an error
_LOOK = 0.5  # s; how often to see whether rank 0 lives, where the kernel cannot tell (no pidfd)


def nonce() -> str:
    """A random number, good for one challenge."""
    return os.urandom(16).hex()


def proof(secret: bytes, *words: str) -> str:
    """What only a process that knows the secret can say to these words."""
    return hmac.digest(secret, " ".join(words).encode(), "sha256").hex()


class KeyValueSpace:
    """Answers what the ranks' MPICH asks by PMI-1, one text line a message: a key-value space and a barrier.

    size: number of ranks; keys: what the space holds from the beginning
    """

    def __init__(self, size: int, keys: dict[str, str] | None = None) -> None:
        self._size = size
        self._keys = dict(keys or {})
        # MPICH names its shared-memory file after it: two jobs of one name on a host would share that.
        self._name = f"ddp_{os.getpid()}_{nonce()}"
        self._barrier: list[Callable[[str], None]] = []
        self._dead: int | None = None

    def answer(self, line: str, send: Callable[[str], None]) -> None:
        """Answers one line of a rank by `send`; a barrier's answer comes when all ranks have entered it."""
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
            found = "rc=-1 msg=key_not_found" if value is None else f"rc=0 msg=success value={value}"
            send(f"cmd=get_result {found}")
        elif command in _REPLIES:
            send(_REPLIES[command].format(size=self._size, name=self._name))
        elif command != "abort":  # spawning processes and naming ports are not supported
            send(f"cmd={command}_result rc=-1 msg=not_supported")

    def rank_died(self, rank: int) -> None:
        """Ends the ranks that wait in MPI_Init for one that has died: MPI ends its process on this answer."""
        self._dead = rank
        if self._barrier:
            said = f"collectives: rank {rank} ended while other ranks wait for it in MPI"
            print(said, file=sys.stderr, flush=True)
        self._leave_barrier("rc=-1 msg=a_rank_has_ended")

    def _leave_barrier(self, result: str) -> None:
        waiting, self._barrier = self._barrier, []
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


class _Peer:
    """One connection. role: "" until it has proved itself."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.nonce = nonce()
        self.until = time.monotonic() + HANDSHAKE
        self.role = ""
        self.rank = -1
        self.read = bytearray()

    def send(self, line: str) -> None:
        try:
            self.sock.sendall(line.encode() + b"\n")
        except OSError:
            pass  # it has gone, which the next read tells


class Server:
    """Serves one job of `size` ranks on a listening socket until all have left, or `parent` has ended."""

    def __init__(self, listener: socket.socket, secret: bytes, size: int, parent: int) -> None:
        self._listener = listener
        self._secret = secret
        self._size = size
        self._parent = parent
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._strangers: list[_Peer] = []
        self._control: dict[int, _Peer] = {}
        self._pmi: dict[int, _Peer] = {}
        self._gone: set[int] = set()
        self._complete = False
        self._space = KeyValueSpace(size)

    def serve(self) -> None:
        """Returns when the job is over."""
        pidfd = -1
        if hasattr(os, "pidfd_open"):
            try:
                pidfd = os.pidfd_open(self._parent)
                self._selector.register(pidfd, selectors.EVENT_READ)
            except OSError:
                pass  # an old kernel or a sandbox; or it has ended already
        until = float("inf")
        now = time.monotonic()
        while now < until and not (self._complete and len(self._gone) == self._size):
            for key, _ in self._selector.select(_LOOK):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fd != pidfd and key.data.sock.fileno() >= 0:  # not closed meanwhile
                    self._receive(key.data)
            now = time.monotonic()
            if until == float("inf") and os.getppid() != self._parent:
                # A restarted job must not meet this server. MPI in the other ranks may, on its way out.
                until = now + _LINGER
                self._selector.unregister(self._listener)
                self._listener.close()
                if pidfd >= 0:
                    self._selector.unregister(pidfd)
            for stranger in [each for each in self._strangers if each.until < now]:
                self._close(stranger)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            # The caller has gone again; or there is no descriptor left: strangers hold them all.
            if self._strangers:
                self._close(self._strangers[0])
            return
        if sock.family == socket.AF_UNIX and peer_uid(sock) != os.geteuid():
            sock.close()
            return
        sock.settimeout(HANDSHAKE)
        if len(self._strangers) >= _STRANGERS:
            self._close(self._strangers[0])
        peer = _Peer(sock)
        self._strangers.append(peer)
        self._selector.register(sock, selectors.EVENT_READ, peer)
        peer.send(f"{BANNER} {peer.nonce}")

    def _receive(self, peer: _Peer) -> None:
        try:
            data = peer.sock.recv(_LINE)
        except OSError:
            data = b""
        peer.read += data
        if not data or len(peer.read) > (_LINE if peer.role else _HELLO):
            self._close(peer)
            return
        while b"\n" in peer.read and peer.sock.fileno() >= 0:
            line, _, rest = peer.read.partition(b"\n")
            peer.read = rest
            text = line.decode(errors="replace")
            if not peer.role:
                self._greet(peer, text)
            elif peer.role == PMI:
                self._space.answer(text, peer.send)
            elif text == "left":
                self._gone.add(peer.rank)

    def _greet(self, peer: _Peer, line: str) -> None:
        role, rank, theirs, answer = [*line.split(" "), "", "", "", ""][:4]
        expected = proof(self._secret, "rank", role, rank, theirs, peer.nonce)
        if not hmac.compare_digest(answer.encode(), expected.encode()):
            self._close(peer)
            return
        self._strangers.remove(peer)
        peer.role, peer.rank = role, int(rank)
        ranks = self._control if role == CONTROL else self._pmi
        said = proof(self._secret, "server", theirs)
        if peer.rank in ranks or peer.rank in self._gone:
            peer.send(f"{said} taken")
            peer.role = "taken"
            self._close(peer)
            return
        ranks[peer.rank] = peer
        peer.send(f"{said} welcome")
        if role == CONTROL:
            self._complete = len(self._control) == self._size
            self._tell("go" if self._complete else self._missing())

    def _missing(self) -> str:
        return "missing " + " ".join(str(rank) for rank in range(self._size) if rank not in self._control)

    def _tell(self, line: str) -> None:
        for peer in list(self._control.values()):
            peer.send(line)

    def _close(self, peer: _Peer) -> None:
        self._selector.unregister(peer.sock)
        peer.sock.close()
        if peer in self._strangers:
            self._strangers.remove(peer)
        if peer.role != CONTROL:
            return
        if not self._complete:
            del self._control[peer.rank]
            self._tell(self._missing())
        elif peer.rank not in self._gone:
            self._gone.add(peer.rank)
            self._tell(f"died {peer.rank}")
            self._space.rank_died(peer.rank)


def peer_uid(sock: socket.socket) -> int:
    """The user at the other end of a Unix socket, as the kernel knows it."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(credentials[4:8], sys.byteorder)


def main() -> None:
    """Arguments: the listening descriptor, the number of ranks, rank 0's pid; the secret comes on stdin."""
    # The job's signals are for the ranks; this process ends with rank 0.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    descriptor, size, parent = map(int, sys.argv[1:])
    with socket.socket(fileno=descriptor) as listener:
        Server(listener, sys.stdin.buffer.read(), size, parent).serve()


if __name__ == "__main__":
    main()
