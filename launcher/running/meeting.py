"""Where rank 0 may be met: libraries other than ours, PyTorch's among them, look for it in the environment.

Nobody can promise that a port stays free. This one was a moment ago, it is none of those that the system gives to who
asks for any (the ranks' own connections have such), and a restart has another one.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from collectives.world import KEEPER
from launcher.engines import Engine, slurm
from launcher.job import Job

ADDRESS, PORT = "MASTER_ADDR", "MASTER_PORT"

# Above those that services have, below those that systems give away (32768 on) and that Kubernetes does (30000 on).
_PORTS = range(20_000, 30_000)
_TRIES = 100


def meeting(environ: Mapping[str, str], host: str, port: object) -> dict[str, str]:
    """What ranks find in their environment besides `environ`: where rank 0 is; the user's own values stay.

    >>> meeting({"MASTER_PORT": "29500"}, "127.0.0.1", 20417)
    {'MASTER_ADDR': '127.0.0.1'}
    """
    # In a rank of another job they are that one's, and its rank 0 listens there.
    own = () if KEEPER in environ else environ
    return {name: str(value) for name, value in ((ADDRESS, host), (PORT, port)) if name not in own}


def host_of_rank_0(job: Job, engine: Engine, environ: Mapping[str, str]) -> str:
    """By which name or address the ranks of a settled job reach its rank 0: hosts are filled in order."""
    if not engine.elsewhere:
        return "127.0.0.1"
    first = job.hosts[0].name if job.hosts else slurm.nodes(environ)[0]
    if first in engine.elsewhere or not job.hosts:
        return first
    from launcher import route  # here, because a job on one machine needs none of it

    return route.addresses(engine.elsewhere)[0]


def free_port() -> int:
    """A port on which nobody listens on this machine."""
    for _ in range(_TRIES):
        port = _PORTS[int.from_bytes(os.urandom(4), "little") % len(_PORTS)]
        try:
            socket.create_server(("", port)).close()
            return port
        except OSError:
            continue
    with socket.create_server(("", 0)) as any_port:
        return int(any_port.getsockname()[1])
