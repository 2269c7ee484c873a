"""Whether other machines can train with this one: reached by ssh as an engine reaches them, without a password; able to
reach this one back; with the same Python and packages at the same place.

What they are asked needs nothing but a Python, the one of the same path; and they connect back to a port of this
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

from launcher import network
from launcher.doctor.findings import Finding, error, note, ok, warning
from launcher.doctor.machine import NEEDED, version
from launcher.doctor.probes import run
from launcher.engines import mpiexec
from launcher.engines.mpiexec import INTEL, MPICH, OPENMPI
from launcher.errors import UsageError
from launcher.network import Host

CHECK = "hosts"
_OURS = "ddp-runtime"
_PACKAGES = (*NEEDED, _OURS, "mpich", "openmpi", "impi-rt")
_CLOCKS = 1.0  # s by which clocks may differ, and ssh is part of it
LIMIT = 20.0  # s; for all that is asked of one host
#: The words of a host that cannot be asked, because this machine has no ssh.
NO_SSH = "ssh is not installed"
_QUIETLY = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "-T")
# The variables that name another remote shell to each engine; Open MPI's of before version 5 is the second.
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
    value: what the host answered, None if nothing; skew: s that its clock is ahead
    """

    name: str
    resolves: bool
    local: bool = False
    status: int | None = None
    words: str = ""
    value: dict[str, object] | None = None
    skew: float = 0.0


class Here(NamedTuple):
    """What the hosts are compared with. prefix: the folder of the environment; packages: those that are installed"""

    python: str
    executable: str
    prefix: str
    folder: str
    packages: dict[str, str]


def judge(reached: Sequence[Reach], here: Here) -> list[Finding]:
    """What follows."""
    return [finding for each in reached for finding in _judge(each, here)]


def check(hosts: Sequence[Host]) -> list[Finding]:
    """Looks and judges."""
    packages = {name: found for name in _PACKAGES if (found := version(name))}
    here = Here(".".join(map(str, sys.version_info[:3])), sys.executable, sys.prefix, os.getcwd(), packages)
    return judge(look(hosts, list(packages)), here)


def _judge(reach: Reach, here: Here) -> list[Finding]:
    name = reach.name
    if reach.local:
        return [ok(CHECK, f"{name} is this machine")]
    if reach.value is None:
        return [_unreached(reach, here)]
    value = reach.value
    at, copy = f"ssh {shlex.quote(name)} ", _copy(name, here)
    found = [ok(CHECK, f"{name} is reached by ssh without a password ({value['name']}, {value['cores']} cores)")]
    python = str(value["python"])
    if python.split(".")[:2] != here.python.split(".")[:2]:
        text = f"{name} has Python {python} as {here.executable}, and this machine {here.python}"
        found.append(error(CHECK, text, copy))
    packages = value["packages"]
    assert isinstance(packages, dict)
    differing = {
        each: (packages.get(each, ""), have) for each, have in here.packages.items() if packages.get(each, "") != have
    }
    for package, (there, have) in differing.items():
        install = at + shlex.quote(shlex.join([here.executable, "-m", "pip", "install", f"{package}=={have}"]))
        if not there:
            found.append(error(CHECK, f"{name} has no {package}", copy if package == _OURS else install))
        elif package == _OURS:
            found.append(error(CHECK, f"{name} has {package} {there}, and this machine {have}", copy))
        else:
            text = f"{name} has {package} {there}, and this machine {have}: ranks may compute different numbers"
            found.append(warning(CHECK, text, install))
    if not differing:
        found.append(ok(CHECK, f"{name} has the same Python {python} and packages"))
    if not value["folder"]:
        text = f"{name} has no folder {here.folder}, where a job started here would look for its script"
        found.append(warning(CHECK, text, at + shlex.quote(f"mkdir -p {shlex.quote(here.folder)}")))
    if value["back"]:
        text = f"{name} cannot reach this machine back ({value['back']}), where its ranks report: a firewall?"
        found.append(error(CHECK, text, "sudo iptables -L -n  # or: sudo ufw status"))
    if abs(reach.skew) > _CLOCKS:
        text = f"the clock of {name} is {reach.skew:+.0f} s from this one: dates in logs will not match"
        found.append(note(CHECK, text, at + "sudo timedatectl set-ntp true"))
    return found


def _unreached(reach: Reach, here: Here) -> Finding:
    name, words = reach.name, reach.words
    at = shlex.quote(name)
    if words == NO_SSH:
        text = f"there is no ssh on this machine, by which {name} would be reached"
        return error(CHECK, text, "sudo apt install openssh-client")
    # 255 is ssh's own; what else comes back is the remote shell's.
    if reach.status not in (None, 255):
        text = f"{name} is reached, but {here.executable} does not run there: {words or f'exit status {reach.status}'}"
        return error(CHECK, text, _copy(name, here))
    if "Permission denied" in words:
        return error(CHECK, f"{name} wants a password: {words}", f"ssh-copy-id {at}")
    if "Host key verification failed" in words or "authenticity" in words:
        return error(CHECK, f"{name} is not known to ssh here: {words}", f"ssh {at} true  # and say yes")
    if "refused" in words:
        return error(CHECK, f"{name} runs no ssh server: {words}", "sudo apt install openssh-server  # there")
    if not reach.resolves and "timed out" not in words:
        text = f"{name} has no address: no such host, or a name that this machine does not know"
        return error(CHECK, text, f"echo 'ADDRESS {name}' | sudo tee -a /etc/hosts")
    if reach.status is None:
        return error(CHECK, f"{name} did not answer within {LIMIT:g} s", f"ssh -v {at} true")
    return error(CHECK, f"{name} is not reached by ssh: {words or 'it says nothing'}", f"ssh -v {at} true")


def _copy(name: str, here: Here) -> str:
    """The command that gives a host this machine's environment, at the same path."""
    return shlex.join(["rsync", "-a", f"{here.prefix}/", f"{name}:{here.prefix}/"])


def look(hosts: Sequence[Host], packages: Sequence[str]) -> list[Reach]:
    """Asks all of them at the same time. packages: whose versions are wanted"""
    way = shell(os.environ, _family())
    with _Doorbell() as port, ThreadPoolExecutor(max_workers=min(32, len(hosts))) as pool:
        return list(pool.map(lambda host: _reach(host.name, way, port, packages), hosts))


def _family() -> str | None:
    """Of the engine that ddp-launch would choose."""
    try:
        return mpiexec.find_mpiexec_for("auto")[1]
    except UsageError:
        return None


def shell(environ: Mapping[str, str], family: str | None) -> list[str]:
    """The words before a host's name, of the command that reaches it: ssh, or what the engine's variables name.

    family: of the engine, as in `launcher.engines.mpiexec`; None: there is none

    >>> shell({"PRTE_MCA_plm_ssh_agent": "/x/rsh -q : ssh"}, "openmpi")
    ['/x/rsh', '-q']
    """
    instead = next((environ[name] for name in _AGENTS.get(family or "", ()) if environ.get(name)), "")
    # Open MPI takes several, of which the first that is there counts, and their options.
    words = shlex.split(instead.partition(":")[0]) if family == OPENMPI else [instead] if instead else []
    words = words or ["ssh"]
    return [*words, *_QUIETLY] if words[0] == "ssh" else words


def _reach(name: str, way: Sequence[str], port: int, packages: Sequence[str]) -> Reach:
    if network.is_here(name):
        return Reach(name, True, local=True)
    arguments = [str(port), _MARK, os.getcwd(), ",".join(network.addresses([name])), *packages]
    question = [sys.executable, "-c", _QUESTION, *arguments]
    start = time.time()
    try:
        status, lines = run([*way, name, shlex.join(question)], LIMIT, os.environ)
    except OSError:
        return Reach(name, _resolves(name), words=NO_SSH)
    middle = (start + time.time()) / 2
    for line in lines:
        if line.startswith(_MARK):
            value = json.loads(line[len(_MARK) :])
            return Reach(name, True, status=status, value=value, skew=value["time"] - middle)
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
