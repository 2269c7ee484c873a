"""Hosts as users write them, on the command line and in files: what is read, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launcher.errors import UsageError
from launcher.network import Host, parse_hosts, read_hostfile


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a:4, b", [Host("a", 4), Host("b", 1)]),
        ("b:1,a:2,b:3", [Host("b", 4), Host("a", 2)]),  # named twice: the sum, in the place of the first
        ("10.0.0.1:2,node-7.cluster", [Host("10.0.0.1", 2), Host("node-7.cluster", 1)]),
    ],
)
def test_hosts(text: str, hosts: list[Host]) -> None:
    assert parse_hosts(text) == tuple(hosts)


@pytest.mark.parametrize(
    "text", ["", "a,,b", "a:", "a:x", "a:-1", "a:1.5", "a b", "fd00::1", "-oProxyCommand=x", "a;b", "a:٣"]
)
def test_what_is_no_list_of_hosts_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--hosts: .* is not understood: host, host:4 or host slots=4$"):
        parse_hosts(text)


def test_a_host_without_slots_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^--hosts: b has no slot: leave it out$"):
        parse_hosts("a,b:0")


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("# MPICH\na:4\n\n  b:2   # the old one\n", [Host("a", 4), Host("b", 2)]),
        ("a slots=4\nb\tslots = 2\r\n", [Host("a", 4), Host("b", 2)]),
        ("a:2\nb\na slots=3\n", [Host("a", 5), Host("b", 1)]),
    ],
)
def test_hostfiles_of_both_mpis(text: str, hosts: list[Host], tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(text)
    assert read_hostfile(str(tmp_path / "hosts")) == tuple(hosts)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"a\nb slot=4\n", "line 2: 'b slot=4' is not understood: host, host:4"),
        (b"a:4 slots=4", "line 1: "),  # which of the two?
        (b"a slots=" + b"9" * 5000, "line 1: "),
        (b"a\n\xff\n", "line 2: "),
        (b"# nobody\n", "names no host"),
    ],
)
def test_a_bad_hostfile(text: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_bytes(text)
    with pytest.raises(UsageError, match=re.escape(says)):
        read_hostfile(str(tmp_path / "hosts"))
