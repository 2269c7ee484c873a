"""Protocol between launcher and agents: JSON lines on a TCP socket, after both sides have authenticated each other.

Each side proves that it holds the job's secret without sending it. A stranger who finds the port can therefore send
neither messages to the launcher nor commands to a rank. Bytes that ranks wrote travel as text with `surrogateescape`.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import time

from collectives.handshake import is_proof, nonce, proof
from launcher.errors import StartError

TYPE_CHECKING = False  # Not from `typing`, whose import would cost every agent 0.3 to 0.5 MB.
if TYPE_CHECKING:
    from typing import Any

#: Variable of an agent's environment: the addresses on which the launcher listens.
ADDRESS = "DDP_LAUNCH_ADDRESS"
#: Variable of an agent's environment: the secret of the job.
SECRET = "DDP_LAUNCH_SECRET"
#: Variables of an agent's environment: the launcher's host and pid. If an agent runs on that host, and that pid is one
#: of its ancestors, it runs below the launcher's reaper.
LAUNCHER_HOST = "DDP_LAUNCH_HOST"
LAUNCHER_PID = "DDP_LAUNCH_PID"
#: Variable of an agent's environment: how many files a rank on the launcher's host may open (soft limit). The launcher
#: has raised its own limit, which the engine and these agents inherit.
FILES = "DDP_LAUNCH_FILES"

#: A peer that sends more bytes than this, before it has proved that it knows the secret, is disconnected.
UNAUTHENTICATED_LIMIT = 4096
_CHUNK = 1 << 16

Message = dict[str, "Any"]


class ProtocolError(Exception):
    """The other side does not speak this protocol."""


def to_text(data: bytes) -> str:
    """Bytes as a text that JSON can carry."""
    return data.decode("utf-8", "surrogateescape")


def to_bytes(text: str) -> bytes:
    """Undoes `to_text`. If the text has a surrogate that `to_text` never makes, escapes all surrogates (\\ud800)."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace")


def type_and_value(message: Message) -> tuple[str, Any]:
    """The type of a message, which is its first key, and the value of that key.

    >>> type_and_value({"end": 0, "deserted": False})
    ('end', 0)
    """
    return next(iter(message.items()), ("", None))


class Channel:
    """One end of the connection: sends and receives whole messages on a nonblocking socket.

    trusted: False in the launcher while the agent is not authenticated: it may send UNAUTHENTICATED_LIMIT bytes at most
    """

    def __init__(self, sock: socket.socket, trusted: bool) -> None:
        sock.setblocking(False)
        # Send small messages at once: an exit status must not wait for other data.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = sock
        self.trusted = trusted
        self._in = bytearray()
        self._allowed = UNAUTHENTICATED_LIMIT
        self._out = bytearray()

    def fileno(self) -> int:
        return self.socket.fileno()

    @property
    def backlog(self) -> int:
        """Bytes that wait to be sent."""
        return len(self._out)

    def send(self, message: Message) -> None:
        """Queues a message, and sends as much as the socket takes now; `flush` sends the rest."""
        self._out += json.dumps(message, separators=(",", ":")).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Sends as much as the socket takes now. Does not report a closed connection: `receive` does."""
        while self._out:
            try:
                sent = self.socket.send(self._out[:_CHUNK])
            except BlockingIOError:
                return
            except OSError:
                self._out.clear()
                return
            del self._out[:sent]

    def unacknowledged(self) -> float:
        """Seconds since the other machine last acknowledged data; 0.0 if it has acknowledged all data and probes.

        A machine also acknowledges data for a process that is stopped, so a large number means that the network or the
        machine is down.
        """
        info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 60)  # struct tcp_info of linux/tcp.h
        # While the other side has no room for more data, only probes are sent.
        unanswered_probes = info[3]
        unacknowledged_packets = int.from_bytes(info[24:28], sys.byteorder)
        last_ack = int.from_bytes(info[56:60], sys.byteorder)  # ms ago
        return last_ack / 1000 if unacknowledged_packets or unanswered_probes > 1 else 0.0

    def receive(self) -> list[Message] | None:
        """The messages that are complete now; None once the connection is closed or lost.

        Raises: ProtocolError if a line is not a message, or a peer that is not trusted has sent too much.
        """
        try:
            data = self.socket.recv(_CHUNK)
        except BlockingIOError:
            return []
        except OSError:  # It was reset, has timed out, or there is no route.
            return None
        if not data:
            return None
        start = len(self._in)
        self._in += data
        if not self.trusted:
            self._allowed -= len(data)
            if self._allowed < 0:
                raise ProtocolError("too much before the handshake")
        end = self._in.rfind(b"\n", start)
        if end < 0:
            return []
        lines = bytes(self._in[:end]).split(b"\n")
        del self._in[: end + 1]
        return [_parse(line) for line in lines]

    def close(self) -> None:
        try:
            self.socket.shutdown(socket.SHUT_RDWR)  # processes that were forked meanwhile have it open, too
        except OSError:
            pass  # the other side has closed it
        self.socket.close()


def _parse(line: bytes) -> Message:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not a message: {error}") from None
    if not isinstance(message, dict):
        raise ProtocolError("not a message")
    return message


# Time to reach the launcher, for all addresses together (s). It answers within milliseconds, unless a thousand agents
# connect at the same moment.
_LIMIT = 20.0
# Minimum time for one address (s).
_SHORTEST = 0.05
# Pause before all addresses are tried again (s).
_PAUSE = 0.1


def connect(addresses: str, secret: str, identity: Message) -> tuple[Channel, list[Message]]:
    """Connects to the launcher. Returns: the connection, and the messages that came with the end of the handshake.

    addresses: "ADDRESS:PORT", or several with commas between them; identity: the agent's first message

    If a handshake fails, all addresses are tried again: if strangers flood the launcher with connections, it drops
    some, even of agents.

    Raises: StartError if the launcher cannot be reached: no address has accepted a connection, or handshakes still fail
        after 20 s.
    """
    candidates = addresses.split(",")
    deadline = time.monotonic() + _LIMIT
    while True:
        failures = []
        dropped = False
        for number, address in enumerate(candidates):
            try:
                # Divides the remaining time equally: an address behind a firewall may use up its part.
                limit = (deadline - time.monotonic()) / (len(candidates) - number)
                return _authenticate(address, secret, identity, max(limit, _SHORTEST))
            except (OSError, ProtocolError) as error:
                dropped |= isinstance(error, ProtocolError)
                failures.append(f"{address} ({getattr(error, 'strerror', None) or error})")
        if not dropped or time.monotonic() > deadline:
            break
        time.sleep(_PAUSE)
    raise StartError(
        f"rank {identity['rank']} on {os.uname().nodename} cannot reach the launcher at {' or '.join(failures)}: "
        "is there a firewall between them?"
    )


def _authenticate(address: str, secret: str, identity: Message, limit: float) -> tuple[Channel, list[Message]]:
    """Connects to one address, and authenticates both sides to each other. Raises: OSError, ProtocolError"""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + limit
    channel = Channel(socket.create_connection((host.strip("[]"), int(port)), timeout=limit), trusted=True)
    try:
        challenge = nonce()
        channel.send({"challenge": challenge})
        received: Message = {}
        messages: list[Message] = []
        while "answer" not in received:
            if not select.select([channel], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise ProtocolError("no answer in time")
            batch = channel.receive()
            if batch is None:
                raise ProtocolError("closed during the handshake")
            messages = batch  # The last batch is returned: commands may follow the answer in it.
            for message in messages:
                received |= message
                if "challenge" in message:
                    channel.send({"answer": proof(secret.encode(), "agent", str(message["challenge"])), **identity})
        if not is_proof(received["answer"], secret.encode(), "launcher", challenge):
            raise ProtocolError("the other side does not know the secret of this job")
    except BaseException:
        channel.close()
        raise
    return channel, messages
