"""Listener of one start of a job: accepts agents that prove that they know its secret, and closes other connections."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Iterator, Sequence

from collectives.handshake import is_proof, nonce, proof
from launcher import network
from launcher.errors import UsageError
from launcher.protocol import Channel, Message, ProtocolError

# Time that a peer has to authenticate itself (s). An agent takes milliseconds.
_LIMIT = 10.0
# Maximum number of connections that may wait to be accepted. All agents of a large job connect at the same moment.
_BACKLOG = 1024
# Maximum number of unauthenticated connections beyond those of the job's own agents. If there is one more, the oldest
# is closed. A large number gives agents on a busy host more time to answer if strangers open many connections.
_STRANGERS = 64
# Errors of `accept` if no file descriptor or memory is free.
_NO_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
# The pause after such an error (s). The connection stays in the queue, so `poll` returns at once: without a pause the
# launcher would use a whole core.
_PAUSE = 0.01


class Listener:
    """Listens on a free port: of the loopback interface, or of all interfaces if the job may have ranks on other hosts.

    remote_hosts: names of other hosts from which agents will connect; agents: number of agents
    address: "ADDRESS:PORT", or several with commas between them, the likeliest first
    secret: of this start of the job; launcher and agents prove to each other that they know it

    Raises: UsageError if all agents are on this machine and 127.0.0.1 cannot be used.
    """

    def __init__(self, remote_hosts: Sequence[str] = (), agents: int = 1) -> None:
        self.secret = nonce()
        self._max_unauthenticated = agents + _STRANGERS
        if remote_hosts:
            self._listener = _listen_on_all_interfaces()
            addresses = [f"[{host}]" if ":" in host else host for host in network.addresses(remote_hosts)]
        else:
            self._listener = _listen_on_loopback()
            addresses = ["127.0.0.1"]
        self._listener.setblocking(False)
        port = self._listener.getsockname()[1]
        self.address = ",".join(f"{host}:{port}" for host in addresses)
        self._unauthenticated: dict[int, _UnauthenticatedPeer] = {}

    def filenos(self) -> Iterator[int]:
        """The file descriptors to wait for."""
        yield self._listener.fileno()
        yield from self._unauthenticated

    @property
    def deadline(self) -> float:
        """The time at which to call `drop_silent` next (monotonic, s); inf if no peer is unauthenticated."""
        return min((peer.deadline for peer in self._unauthenticated.values()), default=float("inf"))

    def serve(self, fileno: int) -> tuple[Channel, Message] | None:
        """Handles an event on `fileno`.

        Returns: if an agent has just authenticated itself, its connection and what it has sent; else None
        """
        if fileno == self._listener.fileno():
            self._accept()
            return None
        peer = self._unauthenticated.get(fileno)
        if peer is None:
            return None  # It has just been dropped.
        try:
            messages = peer.channel.receive()
        except ProtocolError:
            messages = None
        for message in messages or []:
            peer.received |= message
        if messages is not None and "answer" not in peer.received:
            return None  # The handshake is not complete yet.
        del self._unauthenticated[fileno]
        if messages is None or not is_proof(peer.received["answer"], self.secret.encode(), "agent", peer.challenge):
            peer.channel.close()
            return None
        self._max_unauthenticated -= 1
        peer.channel.trusted = True
        answer = proof(self.secret.encode(), "launcher", str(peer.received.get("challenge")))
        peer.channel.send({"answer": answer})
        return peer.channel, peer.received

    def drop_silent(self, now: float) -> None:
        """Closes the connections of peers that have not authenticated themselves in time. now: monotonic, s"""
        for fileno, peer in list(self._unauthenticated.items()):
            if peer.deadline <= now:
                self._drop(fileno)

    def close(self) -> None:
        self._listener.close()
        self.drop_silent(float("inf"))

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in _NO_RESOURCES:
                time.sleep(_PAUSE)
            return  # Otherwise the peer has already closed the connection.
        if len(self._unauthenticated) >= self._max_unauthenticated:
            self._drop(next(iter(self._unauthenticated)))
        peer = _UnauthenticatedPeer(Channel(sock, trusted=False))
        self._unauthenticated[sock.fileno()] = peer
        peer.channel.send({"challenge": peer.challenge})

    def _drop(self, fileno: int) -> None:
        self._unauthenticated.pop(fileno).channel.close()


def _listen_on_loopback() -> socket.socket:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("127.0.0.1", 1))  # Sends nothing, but fails if there is no route.
        return socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise UsageError(f"127.0.0.1 cannot be used ({reason}): is the interface lo up? (ip link set lo up)") from None


def _listen_on_all_interfaces() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=_BACKLOG)


class _UnauthenticatedPeer:
    """A connection whose other side has not yet proved that it is one of the job's agents."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.challenge = nonce()
        self.deadline = time.monotonic() + _LIMIT
        self.received: Message = {}
