"""Other hosts: what ssh may answer, made up; and an ssh that is a script, which asks this machine in their place."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.doctor import hosts
from launcher.doctor.hosts import judge, remote_shell
from launcher.doctor.probes import Answer
from launcher.network import Host

HERE = {"python": "3.11", "numpy": "2.4.6", "ddp-runtime": "0.1.0"}
REACHED, SAME = ("ok b is reached by ssh without a password (8 cores)", "ok b has the same Python and packages")
COPY = f"rsync -a {sys.prefix}/ b:{sys.prefix}/"


def failed(status: int | None, reason: str) -> Answer:
    return Answer(None, reason, (), status)


def has(unreachable: str = "", **change: str) -> Answer:
    return Answer({"versions": HERE | change, "cores": 8, "unreachable": unreachable}, "")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (has(), [REACHED, SAME]),
        (failed(255, "me@b: Permission denied (publickey)."), ["error b wants a password: me@b -> ssh-copy-id b"]),
        (failed(255, "port 22: Connection refused"), ["error b is not reached by ssh: port 22 -> ssh -v b true"]),
        (failed(None, "not ended after 20 s"), ["error not ended after 20 s -> ssh -v b true"]),
        (failed(127, "No such file"), [f"error but {sys.executable} fails there: No such file -> {COPY}"]),
        (has(python="3.12"), [REACHED, f"error b has python 3.12, and this machine 3.11 -> {COPY}"]),
        (
            has(numpy="2.0.0"),
            [REACHED, "warning b has numpy 2.0.0, and this -> pip install numpy==2.4.6"],
        ),
        (has(numpy=""), [REACHED, "error b has numpy (none) -> pip install numpy==2.4.6"]),
        (has(**{"ddp-runtime": "0"}), [REACHED, f"error b has ddp-runtime 0 -> {COPY}"]),
        (has("10.0.0.1: timed out"), [REACHED, SAME, "error cannot connect to this machine (10.0.0 -> ufw"]),
    ],
)
def test_what_a_host_answers(answer: Answer, expected: list[str], assert_found: Any) -> None:
    assert_found(judge("b", answer, HERE), *expected)


def test_hosts_are_asked_by_the_remote_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, assert_found: Any
) -> None:
    ssh = tmp_path / "rsh"
    ssh.write_text(
        "#!/bin/sh\n"
        "case $1 in\n"
        '  denied.invalid) echo "me@$1: Permission denied (publickey)." >&2; exit 255;;\n'
        "  silent.invalid) exec sleep 60;;\n"
        '  *) echo "Welcome to $1!"; exec sh -c "$2";;\n'
        "esac\n"
    )
    ssh.chmod(0o755)
    monkeypatch.setenv("HYDRA_LAUNCHER_EXEC", str(ssh))
    monkeypatch.setattr(hosts, "LIMIT", 5.0)
    names = ("far.invalid", "denied.invalid", "silent.invalid", "localhost")
    assert_found(
        hosts.check([Host(name, 1) for name in names]),
        "ok localhost is this machine",
        f"ok far.invalid is reached by ssh without a password ({len(os.sched_getaffinity(0))} cores)",
        "ok far.invalid has the same Python and packages",
        "error denied.invalid wants a password -> ssh-copy-id",
        "error silent.invalid is not reached by ssh: the process had not ended after 5 s -> ssh -v",
    )
    monkeypatch.setenv("HYDRA_LAUNCHER_EXEC", "/no/ssh")
    assert_found(hosts.check([Host("far.invalid", 1)]), "error there is no /no/ssh on this -> openssh-client")


def test_an_engine_may_use_another_remote_shell() -> None:
    assert remote_shell({})[0] == "ssh"
    assert "BatchMode=yes" in remote_shell({})
    assert remote_shell({"PRTE_MCA_plm_ssh_agent": "/x/rsh -q : ssh"}) == ["/x/rsh", "-q"]
    assert remote_shell({"HYDRA_LAUNCHER_EXEC": "/x/rsh"}) == ["/x/rsh"]
