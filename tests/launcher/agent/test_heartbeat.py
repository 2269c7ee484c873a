"""What /proc says of a process, as tables."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from launcher.agent.heartbeat import Heartbeat, count_kills, descendants_cpu, explain
from launcher.linux import parse_stat

REST = b"1 7 7 0 -1 4194304 9 0 0 0 250 50 900 900 20 0 3 0 99 4096 25 18446744073709551615"


@pytest.mark.parametrize(
    ("stat", "expected"),
    [
        (b"7 (python) S " + REST, ("S", 3.0, 102_400)),
        (b"7 (python) R " + REST, ("R", 3.0, 102_400)),
        (b"7 (a b) c) (d) D " + REST, ("D", 3.0, 102_400)),  # a name may hold anything
        (b"7 (python) t " + REST, ("T", 3.0, 102_400)),  # under a debugger
        (b"7 (python) Z " + REST.replace(b" 25 ", b" 0 "), ("Z", 3.0, 0)),
        (b"", ("", 0.0, 0)),
    ],
)
def test_stat(stat: bytes, expected: tuple[str, float, int]) -> None:
    found = parse_stat(stat, ticks=100, page=4096)
    assert (found.state, found.cpu, found.rss) == expected


def test_this_process() -> None:
    beat = Heartbeat(os.getpid()).take()
    assert beat["state"] == "R"
    assert beat["cpu"] > 0
    assert beat["rss"] > 1 << 20
    assert Heartbeat(1 << 22).take() == {
        **beat,
        "state": "",
        "cpu": 0.0,
        "below": 0.0,
        "rss": 0,
    }  # there is no such process
    assert Heartbeat(1 << 22).stood() == "where its Python stood was never noted"


GIB = 1 << 30


@pytest.mark.parametrize(
    ("available", "taken", "words"),
    [
        (
            GIB // 4,
            True,
            "the kernel's out-of-memory killer ended it: it had 14.2 GiB at most; the machine had 256 MiB free",
        ),
        (3 * GIB, False, "it had 14.2 GiB at most; the machine had 3.0 GiB free"),
        (None, False, "it had 14.2 GiB at most"),
    ],
)
def test_memory_in_words(available: int | None, taken: bool, words: str) -> None:
    assert explain(int(14.2 * GIB), available, taken) == words


@pytest.mark.parametrize(
    ("text", "kills"),
    [
        ("low 0\nhigh 0\nmax 91\noom 2\noom_kill 3\noom_group_kill 0\n", 3),  # memory.events
        ("pgscan_zone 7\noom_kill 12\ndrop_pagecache 0\n", 12),  # /proc/vmstat
        ("oom_kill_disable 0\n", 0),
        ("", 0),
    ],
)
def test_counting_kills(text: str, kills: int) -> None:
    assert count_kills(text) == kills


SPIN = "import sys, time\nuntil = time.process_time() + {}\nwhile time.process_time() < until: pass\n"
SPIN += "print('spun', flush=True)\nsys.stdin.read()"
# A child of a child, both of which are still there when it has spun.
NESTED = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', sys.argv[1]])"


def test_cpu_below_counts_descendants_alive_and_dead() -> None:
    before = descendants_cpu(os.getpid())
    command = [sys.executable, "-c", NESTED, SPIN.format(0.3)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"spun\n"
        alive = descendants_cpu(os.getpid()) - before
        assert descendants_cpu(child.pid) >= 0.3
        child.communicate(timeout=20)
    dead = descendants_cpu(os.getpid()) - before
    assert alive >= 0.3
    assert dead >= alive


def test_a_process_that_sleeps_or_has_gone_uses_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        time.sleep(0.1)
        assert descendants_cpu(child.pid) == 0.0
        child.communicate(b"\n", timeout=20)
    assert descendants_cpu(child.pid) == 0.0
