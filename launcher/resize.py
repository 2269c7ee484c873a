"""`ddp-launch --resize N --job PID`: asks a running ddp-launch of this user to go on with N ranks, and waits for it.

ddp-launch listens on an abstract Unix socket that bears its pid. It has no name in a file system, so that nothing can
be left behind, and the kernel tells each side who the other one is: only processes of the same user may ask, and an
answer counts only if it comes from that pid. A request is one packet, the number; the answer is one packet of JSON.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from contextlib import suppress

_CREDENTIALS = struct.Struct("3i")  # struct ucred of socket(7): pid, uid, gid
_LARGEST = 1 << 16  # bytes of an answer


def address(pid: int) -> str:
    """Where the ddp-launch of that pid listens, in the abstract namespace."""
    return f"\0ddp-launch-{pid}"


def peer(sock: socket.socket) -> tuple[int, int]:
    """Pid and user id of the other side: of who connected, or of who began to listen."""
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


def resize(pid: int, n: int) -> tuple[bool, str]:
    """Asks the ddp-launch of that pid to go on with `n` ranks; whether it does, and the sentence that says so.

    Returns when the new ranks train, or when it is known that they will not: there may be no such job of this user.
    """
    answer = b""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock, suppress(OSError):
        sock.connect(address(pid))
        if peer(sock) == (pid, os.geteuid()):
            sock.sendall(str(n).encode())
            answer = sock.recv(_LARGEST)
    if not answer:
        return False, f"{pid} is no ddp-launch of yours that runs on this machine (ddp-top shows them)"
    done, text = json.loads(answer)
    return bool(done), str(text)
