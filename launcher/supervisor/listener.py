"""Listener of a job: accepts agents that prove to know its secret, and closes the connections of all others."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Iterator, Sequence

from launcher.errors import UsageError
from launcher.protocol import Channel, Message, ProtocolError, is_proof, nonce, proof

# An agent answers within milliseconds; a silent peer is dropped after so many seconds.
_LIMIT = 10.0
# All agents of a large job call at once.
_BACKLOG = 1024
# Unauthenticated peers beyond the job's own agents. One more drops the oldest, and the more of them there are, the
# longer agents of a busy host have to answer in a flood of connections.
_SPARE = 64
# No file for one more connection: the caller waits, and would keep the launcher busy meanwhile (s).
_FULL, _REST = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM), 0.01


class Listener:
    """Listens on a free port: on the loopback, or on all networks if the job has ranks on other hosts.

    remote_hosts: names of other hosts from which agents will call; agents: how many will
    address: "ADDRESS:PORT", or several with commas between them, the likeliest first
    secret: of this job, for its agents alone

    Raises: UsageError if this machine has no 127.0.0.1.
    """

    def __init__(self, remote_hosts: Sequence[str] = (), agents: int = 1) -> None:
        self.secret = nonce()
        self._room = agents + _SPARE
        if remote_hosts:
            from launcher import network

            self._listener = _everywhere()
            addresses = [f"[{each}]" if ":" in each else each for each in network.addresses(remote_hosts)]
        else:
            self._listener = _here()
            addresses = ["127.0.0.1"]
        self._listener.setblocking(False)
        port = self._listener.getsockname()[1]
        self.address = ",".join(f"{each}:{port}" for each in addresses)
        self._unauthenticated: dict[int, _UnauthenticatedPeer] = {}

    def filenos(self) -> Iterator[int]:
        """What to wait for."""
        yield self._listener.fileno()
        yield from self._unauthenticated

    @property
    def deadline(self) -> float:
        """When `drop_silent` has something to do."""
        return min((peer.until for peer in self._unauthenticated.values()), default=float("inf"))

    def serve(self, fileno: int) -> tuple[Channel, Message] | None:
        """Handles an event on `fileno`; returns an agent that has authenticated itself, and its first message."""
        if fileno == self._listener.fileno():
            self._accept()
            return None
        peer = self._unauthenticated.get(fileno)
        if peer is None:
            return None  # it has just been dropped
        try:
            messages = peer.channel.receive()
        except ProtocolError:
            messages = None
        for message in messages or []:
            peer.received |= message
        if messages is not None and "answer" not in peer.received:
            return None  # not done yet
        del self._unauthenticated[fileno]
        if messages is None or not is_proof(peer.received["answer"], self.secret, "agent", peer.challenge):
            peer.channel.close()
            return None
        self._room -= 1
        peer.channel.trusted = True
        peer.channel.send({"answer": proof(self.secret, "launcher", str(peer.received.get("challenge")))})
        return peer.channel, peer.received

    def drop_silent(self, now: float) -> None:
        """Closes the connections of peers that have sent nothing for too long."""
        for fileno, peer in list(self._unauthenticated.items()):
            if peer.until <= now:
                self._drop(fileno)

    def close(self) -> None:
        self._listener.close()
        self.drop_silent(float("inf"))

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in _FULL:
                time.sleep(_REST)
            return  # else the caller has gone again
        if len(self._unauthenticated) >= self._room:
            self._drop(next(iter(self._unauthenticated)))
        peer = _UnauthenticatedPeer(Channel(sock, trusted=False))
        self._unauthenticated[sock.fileno()] = peer
        peer.channel.send({"challenge": peer.challenge})

    def _drop(self, fileno: int) -> None:
        self._unauthenticated.pop(fileno).channel.close()


def _here() -> socket.socket:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
            way.connect(("127.0.0.1", 1))  # sends nothing, but fails where no way leads there
        return socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise UsageError(f"127.0.0.1 cannot be used ({why}): is the interface lo up? (ip link set lo up)") from None


def _everywhere() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=_BACKLOG)


class _UnauthenticatedPeer:
    """A connection that has not yet proved to be one of the job's agents."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.challenge = nonce()
        self.until = time.monotonic() + _LIMIT
        self.received: Message = {}
