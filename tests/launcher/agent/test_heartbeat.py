"""What /proc says of a process, as tables."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from launcher.agent.heartbeat import RankReader, descendants_cpu
from launcher.linux import parse_stat

REST = b"1 7 7 0 -1 4194304 9 0 0 0 250 50 900 900 20 0 3 0 99 4096 25 18446744073709551615"


@pytest.mark.parametrize(
    ("stat", "expected"),
    [
        (b"7 (python) S " + REST, ("S", 3.0, 102_400)),
        (b"7 (a b) c) (d) D " + REST, ("D", 3.0, 102_400)),  # a name may hold anything
        (b"7 (python) t " + REST, ("T", 3.0, 102_400)),  # under a debugger
        (b"7 (python) Z " + REST.replace(b" 25 ", b" 0 "), ("Z", 3.0, 0)),
        (b"", ("", 0.0, 0)),
    ],
)
def test_stat(stat: bytes, expected: tuple[str, float, int]) -> None:
    actual = parse_stat(stat, ticks=100, page=4096)
    assert (actual.state, actual.cpu, actual.rss) == expected


def test_this_process() -> None:
    beat = RankReader(os.getpid()).heartbeat()
    assert beat["state"] == "R"
    assert beat["cpu"] > 0
    assert beat["rss"] > 1 << 20
    gone = {"state": "", "cpu": 0.0, "below": 0.0, "rss": 0}
    assert RankReader(1 << 22).heartbeat() == {**beat, **gone}  # there is no such process
    assert RankReader(1 << 22).last_position() == "where its Python stood was never noted"


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
    assert descendants_cpu(child.pid) == 0.0
    dead = descendants_cpu(os.getpid()) - before
    assert alive >= 0.299  # sums of hundredths have been subtracted
    assert dead >= alive
