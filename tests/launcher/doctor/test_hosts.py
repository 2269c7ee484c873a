"""Other hosts: what ssh says of them, made up; and an ssh that is a script, which asks this machine in their place."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from launcher.doctor import hosts
from launcher.doctor.hosts import NO_SSH, Reach
from launcher.engines.mpiexec import INTEL, MPICH, OPENMPI
from launcher.network import Host

PACKAGES = {"numpy": "2.4.6", "ddp-runtime": "0.1.0"}
HERE = hosts.Here("3.11.7", "/v/bin/python", "/v", "/home/me", PACKAGES)
SAYS: dict[str, object] = {
    "python": "3.11.9",
    "name": "b",
    "cores": 8,
    "back": "",
    "time": 0.0,
    "folder": True,
    "packages": PACKAGES,
}
GOOD = Reach("b", True, status=0, value=SAYS)
REACHED, SAME = ("ok b is reached by ssh without a password (b, 8 cores)", "ok b has the same Python 3.11.9")
COPY = "rsync -a /v/ b:/v/"


def failed(status: int | None, words: str = "", resolves: bool = True) -> Reach:
    return Reach("b", resolves, status=status, words=words)


def says(**change: object) -> Reach:
    return GOOD._replace(value={**SAYS, **change})


@pytest.mark.parametrize(
    ("reached", "expected"),
    [
        (Reach("a", True, local=True), ["ok a is this machine"]),
        (GOOD, [REACHED, SAME]),
        # ssh's words.
        (failed(255, "me@b: Permission denied (publickey)."), ["error b wants a password: me@b -> ssh-copy-id b"]),
        (failed(255, "Host key verification failed."), ["error b is not known to ssh here -> ssh b true"]),
        (failed(255, "connect to host b port 22: Connection refused"), ["error b runs no ssh server -> sudo apt"]),
        (failed(255, "Could not resolve hostname b", False), ["error b has no address -> /etc/hosts"]),
        (failed(255, "connect to host b port 22: Connection timed out"), ["error timed out -> ssh -v b true"]),
        (failed(None), ["error b did not answer within 20 s -> ssh -v b true"]),
        (failed(255), ["error not reached by ssh: it says nothing -> ssh -v b true"]),
        (failed(None, NO_SSH), ["error there is no ssh on this machine -> sudo apt install openssh-client"]),
        # The remote shell's.
        (failed(127, "/v/bin/python: No such file"), [f"error but /v/bin/python does not run there -> {COPY}"]),
        (failed(1, ""), [f"error does not run there: exit status 1 -> {COPY}"]),
        # What is different there.
        (says(python="3.12.1"), [REACHED, f"error b has Python 3.12.1 as /v/bin/python -> {COPY}", "ok same"]),
        (
            says(packages={**PACKAGES, "numpy": "2.0.0"}),
            [REACHED, "warning b has numpy 2.0.0, and this machine 2.4.6 -> ssh b '/v/bin/python -m pip install nu"],
        ),
        (says(packages={"numpy": "2.4.6"}), [REACHED, f"error b has no ddp-runtime -> {COPY}"]),
        (says(packages={"ddp-runtime": "0.1.0"}), [REACHED, "error b has no numpy -> pip install numpy==2.4.6"]),
        (says(packages={**PACKAGES, "ddp-runtime": "0"}), [REACHED, f"error b has ddp-runtime 0, and -> {COPY}"]),
        (says(folder=False), [REACHED, SAME, "warning b has no folder /home/me -> ssh b 'mkdir -p /home/me'"]),
        (says(back="10.0.0.1: timed out"), [REACHED, SAME, "error cannot reach this machine back (10.0.0 -> ufw"]),
        (GOOD._replace(skew=-90.0), [REACHED, SAME, "note the clock of b is -90 s from this one -> timedatectl"]),
        (GOOD._replace(skew=0.2), [REACHED, SAME]),
    ],
)
def test_hosts(reached: Reach, expected: list[str], assert_found: Any) -> None:
    assert_found(hosts.judge([reached], HERE), *expected)


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An `ssh` that runs the command here, unless the host's name says otherwise."""
    script = tmp_path / "ssh"
    script.write_text(
        "#!/bin/sh\n"
        "while [ $# -gt 2 ]; do shift; done\n"
        "case $1 in\n"
        '  denied.invalid) echo "me@$1: Permission denied (publickey)." >&2; exit 255;;\n'
        "  silent.invalid) exec sleep 60;;\n"
        '  *) echo "Welcome to $1!"; exec sh -c "$2";;\n'
        "esac\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("HYDRA_LAUNCHER_EXEC", raising=False)


def test_asking_hosts(ssh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "LIMIT", 5.0)
    start = time.monotonic()
    names = ("far.invalid", "denied.invalid", "silent.invalid", "localhost")
    far, denied, silent, here = hosts.look([Host(name, 1) for name in names], ["numpy", "no-such-package"])
    assert time.monotonic() - start < 20, "they are asked at the same time"
    assert (far.status, far.resolves, far.local) == (0, True, False)
    assert far.value is not None
    assert far.value["python"] == ".".join(map(str, sys.version_info[:3]))
    packages: Any = far.value["packages"]
    assert packages["numpy"]
    assert packages["no-such-package"] == ""
    assert (far.value["back"], far.value["folder"]) == ("", True), "the other host has reached this one back"
    assert abs(far.skew) < 5
    assert denied == Reach(
        "denied.invalid", False, status=255, words="me@denied.invalid: Permission denied (publickey)."
    )
    assert silent == Reach("silent.invalid", False)
    assert here == Reach("localhost", True, local=True)


def test_a_machine_without_ssh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("HYDRA_LAUNCHER_EXEC", raising=False)
    (far,) = hosts.look([Host("far.invalid", 1)], [])
    assert far.words == NO_SSH


SSH = hosts.shell({}, None)


@pytest.mark.parametrize(
    ("family", "environ", "words"),
    [
        (None, {"HYDRA_LAUNCHER_EXEC": "/x/rsh"}, SSH),
        (MPICH, {}, SSH),
        (MPICH, {"HYDRA_LAUNCHER_EXEC": "/a folder/rsh"}, ["/a folder/rsh"]),
        (MPICH, {"PRTE_MCA_plm_ssh_agent": "/x/rsh"}, SSH),
        (INTEL, {"I_MPI_HYDRA_BOOTSTRAP_EXEC": "/x/rsh", "HYDRA_LAUNCHER_EXEC": "/y"}, ["/x/rsh"]),
        (OPENMPI, {"HYDRA_LAUNCHER_EXEC": "/x/rsh"}, SSH),
        (OPENMPI, {"PRTE_MCA_plm_ssh_agent": "/x/rsh -q : ssh"}, ["/x/rsh", "-q"]),
        (OPENMPI, {"OMPI_MCA_plm_rsh_agent": "ssh -p 7"}, ["ssh", "-p", "7", *SSH[1:]]),
        (OPENMPI, {"PRTE_MCA_plm_ssh_agent": "ssh : rsh"}, SSH),  # its own default
    ],
)
def test_an_engine_may_have_been_told_another_way(
    family: str | None, environ: dict[str, str], words: list[str]
) -> None:
    assert hosts.shell(environ, family) == words
    assert SSH[0] == "ssh"
    assert "BatchMode=yes" in SSH
