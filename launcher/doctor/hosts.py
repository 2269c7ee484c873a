"""Whether other machines can train with this one: reached by ssh as an engine reaches them, without a password; able to
reach this one back; with the same Python and packages at the same place.
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
from launcher.doctor.finding import Finding, error, note, ok, warning
from launcher.doctor.python import NEEDED, version
from launcher.hosts import Host

CHECK = "hosts"
_CONNECT = 5  # s until ssh gives up
_LIMIT = 20.0  # s; for all that is asked of one host
_SSH = ("ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT}", "-T")
_MARK = "ddp-doctor-host "
_OURS = "ddp-runtime"
_PACKAGES = (*NEEDED, _OURS)
_NO_SSH = "ssh is not installed"
_CLOCKS = 1.0  # s by which clocks may differ, and ssh is part of it

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


class Here(NamedTuple):
    """What the hosts are compared with."""

    python: str
    executable: str
    folder: str
    packages: dict[str, str]


def look(hosts: Sequence[Host]) -> list[Reach]:
    """Asks all of them at the same time."""
    with _Doorbell() as port, ThreadPoolExecutor(max_workers=min(32, len(hosts))) as pool:
        return list(pool.map(lambda host: _reach(host.name, port), hosts))


def judge(reached: Sequence[Reach], here: Here) -> list[Finding]:
    """What follows."""
    return [finding for each in reached for finding in _judge(each, here)]


def check(hosts: Sequence[Host]) -> list[Finding]:
    """Looks and judges."""
    packages = {name: version(name) for name in _PACKAGES}
    here = Here(".".join(map(str, sys.version_info[:3])), sys.executable, os.getcwd(), packages)
    return judge(look(hosts), here)


def shell(environ: Mapping[str, str] = os.environ) -> list[str]:
    """The words before a host's name, of the command that reaches it: ssh, or what hydra was told to use instead."""
    instead = environ.get("HYDRA_LAUNCHER_EXEC")
    return [instead] if instead else [*_SSH]


def _judge(reach: Reach, here: Here) -> list[Finding]:
    name = reach.name
    if reach.local:
        return [ok(CHECK, f"{name} is this machine")]
    if reach.said is None:
        return [_unreached(reach, here)]
    said = reach.said
    at = f"ssh {shlex.quote(name)} "
    found = [ok(CHECK, f"{name} is reached by ssh without a password ({said['name']}, {said['cores']} cores)")]
    python = str(said["python"])
    if python.split(".")[:2] != here.python.split(".")[:2]:
        text = f"{name} has Python {python} as {here.executable}, and this machine {here.python}"
        found.append(error(CHECK, text, "install the same Python on all hosts, at the same path"))
    packages = said["packages"]
    assert isinstance(packages, dict)
    differing = {
        each: (packages.get(each, ""), have) for each, have in here.packages.items() if packages.get(each, "") != have
    }
    for package, (there, have) in differing.items():
        wanted = f"{here.folder}" if package == _OURS else f"{package}=={have}"
        mend = at + shlex.quote(f"{shlex.quote(here.executable)} -m pip install {shlex.quote(wanted)}")
        if not there:
            found.append(error(CHECK, f"{name} has no {package}", mend))
        elif package == _OURS:
            found.append(error(CHECK, f"{name} has {package} {there}, and this machine {have}", mend))
        else:
            text = f"{name} has {package} {there}, and this machine {have}: ranks may compute different numbers"
            found.append(warning(CHECK, text, mend))
    if not differing:
        found.append(ok(CHECK, f"{name} has the same Python {python} and packages"))
    if not said["folder"]:
        text = f"{name} has no folder {here.folder}, where a job started here would look for its script"
        found.append(warning(CHECK, text, at + shlex.quote(f"mkdir -p {shlex.quote(here.folder)}")))
    if said["back"]:
        text = f"{name} cannot reach this machine back ({said['back']}), where its ranks report: a firewall?"
        found.append(error(CHECK, text, "sudo iptables -L -n  # or: sudo ufw status"))
    if abs(reach.skew) > _CLOCKS:
        text = f"the clock of {name} is {reach.skew:+.0f} s from this one: dates in logs will not match"
        found.append(note(CHECK, text, at + "sudo timedatectl set-ntp true"))
    return found


def _unreached(reach: Reach, here: Here) -> Finding:
    name, words = reach.name, reach.words
    at = shlex.quote(name)
    if words == _NO_SSH:
        return error(
            CHECK,
            f"there is no ssh on this machine, by which {name} would be reached",
            "sudo apt install openssh-client",
        )
    # 255 is ssh's own; what else comes back is the remote shell's.
    if reach.status not in (None, 255):
        text = f"{name} is reached, but {here.executable} does not run there: {words or f'exit status {reach.status}'}"
        return error(CHECK, text, "install the same environment on all hosts, at the same path, or share it (NFS)")
    if "Permission denied" in words:
        return error(CHECK, f"{name} wants a password: {words}", f"ssh-copy-id {at}")
    if "Host key verification failed" in words or "authenticity" in words:
        return error(CHECK, f"{name} is not known to ssh here: {words}", f"ssh {at} true  # and say yes")
    if not reach.resolves:
        text = f"{name} has no address: no such host, or a name that this machine does not know"
        return error(CHECK, text, f"echo 'ADDRESS {name}' | sudo tee -a /etc/hosts")
    if reach.status is None:
        return error(CHECK, f"{name} did not answer within {_LIMIT:g} s", f"ssh -v {at} true")
    if "refused" in words:
        return error(CHECK, f"{name} runs no ssh server: {words}", "sudo apt install openssh-server  # there")
    return error(CHECK, f"{name} is not reached by ssh: {words or 'it says nothing'}", f"ssh -v {at} true")


def _reach(name: str, port: int) -> Reach:
    if route.is_here(name):
        return Reach(name, True, local=True)
    arguments = [str(port), _MARK, os.getcwd(), ",".join(route.addresses([name])), *_PACKAGES]
    question = [sys.executable, "-c", _QUESTION, *arguments]
    start = time.time()
    try:
        status, lines = run([*shell(), name, shlex.join(question)], _LIMIT, os.environ)
    except OSError:
        return Reach(name, _resolves(name), words=_NO_SSH)
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
