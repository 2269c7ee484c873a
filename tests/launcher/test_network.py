"""Hosts as users write them, on the command line and in files: what is read, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.errors import UsageError
from launcher.network import Host, parse_hostfile, parse_hosts, read_hostfile


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", [Host("a", 1)]),
        ("a:4,b:4", [Host("a", 4), Host("b", 4)]),
        ("a:4, b", [Host("a", 4), Host("b", 1)]),
        ("b:1,a:2,b:3", [Host("b", 4), Host("a", 2)]),  # named twice: the sum, in the place of the first
        ("10.0.0.1:2,node-7.cluster", [Host("10.0.0.1", 2), Host("node-7.cluster", 1)]),
        ("[fd00::1]:8,[fe80::2%eth0]", [Host("fd00::1", 8), Host("fe80::2%eth0", 1)]),
    ],
)
def test_hosts(text: str, hosts: list[Host]) -> None:
    assert parse_hosts(text) == tuple(hosts)


@pytest.mark.parametrize(
    "text", ["", "a,,b", "a:", "a:x", "a:-1", "a:1.5", "a b", "fd00::1", "[::1", "-oProxyCommand=x", "a;b", "a:٣"]
)
def test_what_is_no_list_of_hosts_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--hosts: .* is not understood: host, host:4, \[::1\]:4 or host slots=4$"):
        parse_hosts(text)


def test_a_host_without_slots_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^--hosts: b has no slot: leave it out$"):
        parse_hosts("a,b:0")


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a\nb\n", [Host("a", 1), Host("b", 1)]),
        ("# MPICH\na:4\n\n  b:2   # the old one\n", [Host("a", 4), Host("b", 2)]),
        ("a slots=4\nb\tslots = 2\r\n", [Host("a", 4), Host("b", 2)]),
        ("[fd00::1]:3\n[fd00::2] slots=3", [Host("fd00::1", 3), Host("fd00::2", 3)]),
        ("a:2\nb\na slots=3\n", [Host("a", 5), Host("b", 1)]),
    ],
)
def test_hostfiles_of_both_customs(text: str, hosts: list[Host]) -> None:
    assert parse_hostfile(text, "hosts.txt") == tuple(hosts)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("a\nb slot=4\n", 2),
        ("\n# two\n\na:4:5\n", 4),
        ("a:4 slots=4", 1),  # which of the two?
        ("a slots=4 max_slots=8", 1),
        ("a b", 1),
        ("a slots=", 1),
    ],
)
def test_a_bad_line_is_named(text: str, number: int) -> None:
    with pytest.raises(UsageError, match=rf"^hosts\.txt, line {number}: .* is not understood: host, host:4"):
        parse_hostfile(text, "hosts.txt")


def test_a_hostfile_that_is_no_use(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^the hostfile .*/none cannot be read: No such file or directory$"):
        read_hostfile(str(tmp_path / "none"))
    (tmp_path / "empty").write_text("# nobody\n")
    with pytest.raises(UsageError, match=r"^the hostfile .*/empty names no host$"):
        read_hostfile(str(tmp_path / "empty"))
    (tmp_path / "bad").write_bytes(b"a\n\xff\n")
    with pytest.raises(UsageError, match=r"/bad, line 2: "):
        read_hostfile(str(tmp_path / "bad"))
    (tmp_path / "good").write_text("a:2\n")
    assert read_hostfile(str(tmp_path / "good")) == (Host("a", 2),)
