"""Asking other machines what they are: by ssh, as an engine reaches them, and without a password.

What they are asked needs nothing but a Python, the one of the same path; and they are to ring back at a port of this
machine, as ranks do that report to the launcher.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from launcher import route
from launcher.doctor.aside import run
from launcher.engines import finding
from launcher.engines.finding import INTEL, MPICH, OPENMPI
from launcher.hosts import Host
from launcher.job import UsageError

LIMIT = 20.0  # s; for all that is asked of one host
#: The words of a host that cannot be asked, because this machine has no ssh.
NO_SSH = "ssh is not installed"
_QUIETLY = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "-T")
# Where each engine is told of another way than ssh; Open MPI's name of before version 5 is the second.
_AGENTS = {
    MPICH: ("HYDRA_LAUNCHER_EXEC",),
    INTEL: ("I_MPI_HYDRA_BOOTSTRAP_EXEC", "HYDRA_LAUNCHER_EXEC"),
    OPENMPI: ("PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent"),
}
_MARK = "ddp-doctor-host "

# What a host is asked to run: any Python 3 understands it, and nothing need be installed.
_QUESTION = r"""
import json, os, socket, sys, time
try:
    from importlib.metadata import version
except ImportError:
    version = None
def have(name):
    try:
        return version(name)
    except Exception:
        return ""
back = []
for address in sys.argv[4].split(","):
    try:
        socket.create_connection((address, int(sys.argv[1])), 3).close()
    except Exception as error:
        back.append("%s: %s" % (address, error))
    else:
        back = []
        break
print("\n" + sys.argv[2] + json.dumps({
    "python": "%d.%d.%d" % sys.version_info[:3], "name": socket.gethostname(), "cores": len(os.sched_getaffinity(0)),
    "back": "; ".join(back), "time": time.time(), "folder": os.path.isdir(sys.argv[3]),
    "packages": {name: have(name) for name in sys.argv[5:]}}))
"""


class Reach(NamedTuple):
    """What came of asking a host.

    resolves: its name has an address here; local: it is this machine, and ssh was not tried
    status: ssh's exit status, None if it had not ended in time; words: its last line
    said: what the host said of itself, None if nothing; skew: s that its clock is ahead
    """

    name: str
    resolves: bool
    local: bool = False
    status: int | None = None
    words: str = ""
    said: dict[str, object] | None = None
    skew: float = 0.0


def look(hosts: Sequence[Host], packages: Sequence[str]) -> list[Reach]:
    """Asks all of them at the same time. packages: whose versions are wanted"""
    way = shell(os.environ, _family())
    with _Doorbell() as port, ThreadPoolExecutor(max_workers=min(32, len(hosts))) as pool:
        return list(pool.map(lambda host: _reach(host.name, way, port, packages), hosts))


def _family() -> str | None:
    """Of the engine that ddp-launch would choose."""
    try:
        return finding.find("auto")[1]
    except UsageError:
        return None


def shell(environ: Mapping[str, str], family: str | None) -> list[str]:
    """The words before a host's name, of the command that reaches it: ssh, or what the engine was told to use instead.

    family: of the engine, as in `launcher.engines.finding`; None: there is none

    >>> shell({"PRTE_MCA_plm_ssh_agent": "/x/rsh -q : ssh"}, "openmpi")
    ['/x/rsh', '-q']
    """
    instead = next((environ[name] for name in _AGENTS.get(family or "", ()) if environ.get(name)), "")
    # Open MPI takes several, of which the first that is there counts, and their options.
    words = shlex.split(instead.partition(":")[0]) if family == OPENMPI else [instead] if instead else []
    words = words or ["ssh"]
    return [*words, *_QUIETLY] if words[0] == "ssh" else words


def _reach(name: str, way: Sequence[str], port: int, packages: Sequence[str]) -> Reach:
    if route.is_here(name):
        return Reach(name, True, local=True)
    arguments = [str(port), _MARK, os.getcwd(), ",".join(route.addresses([name])), *packages]
    question = [sys.executable, "-c", _QUESTION, *arguments]
    start = time.time()
    try:
        status, lines = run([*way, name, shlex.join(question)], LIMIT, os.environ)
    except OSError:
        return Reach(name, _resolves(name), words=NO_SSH)
    middle = (start + time.time()) / 2
    for line in lines:
        if line.startswith(_MARK):
            said = json.loads(line[len(_MARK) :])
            return Reach(name, True, status=status, said=said, skew=said["time"] - middle)
    last = [line.strip() for line in lines if line.strip()][-1:]
    return Reach(name, _resolves(name), status=status, words="".join(last))


def _resolves(name: str) -> bool:
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return False
    return True


class _Doorbell:
    """A port at which other machines may ring: who comes through would also reach the launcher."""

    def __enter__(self) -> int:
        self._socket = socket.create_server(("0.0.0.0", 0), backlog=64)  # as the launcher does
        threading.Thread(target=self._open, daemon=True).start()
        return int(self._socket.getsockname()[1])

    def __exit__(self, *exception: object) -> None:
        self._socket.close()

    def _open(self) -> None:
        while True:
            try:
                self._socket.accept()[0].close()
            except OSError:  # closed
                return
