"""`ddp-launch --resize N --job PID`: asks a running ddp-launch of this user to continue with N ranks.

ddp-launch listens on an abstract Unix socket named after its pid. Such a socket is not a file, so none is left behind.
Both sides ask the kernel for the pid and user of their peer. ddp-launch takes requests only from processes of its own
user. The client sends its request only if the peer has that pid and the same user. A request is one packet, the number;
the answer is one packet of JSON.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from contextlib import suppress

# struct ucred of socket(7): pid, uid, gid.
_CREDENTIALS = struct.Struct("3i")
# Maximum length of an answer (bytes).
_MAX_ANSWER = 1 << 16


def address(pid: int) -> str:
    """The abstract address at which the ddp-launch of that pid listens."""
    return f"\0ddp-launch-{pid}"


def peer(sock: socket.socket) -> tuple[int, int]:
    """Pid and user id of the process on the other side: the one that connected, or the one that listens."""
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


def resize(pid: int, n: int) -> tuple[bool, str]:
    """Asks the ddp-launch of that pid to continue with `n` ranks. Waits until they train or fail, or it has refused.

    Returns: whether the job has `n` ranks now, and a sentence for the user
    """
    answer = b""
    failure = f"{pid} is no ddp-launch of yours that runs on this machine (ddp-top shows them)"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock, suppress(OSError):
        sock.connect(address(pid))
        if peer(sock) == (pid, os.geteuid()):
            sock.sendall(str(n).encode())
            failure = f"ddp-launch {pid} ended before it answered"
            answer = sock.recv(_MAX_ANSWER)
    if not answer:
        return False, failure
    done, text = json.loads(answer)
    return bool(done), str(text)
