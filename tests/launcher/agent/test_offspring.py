"""CPU time below a process: of children that run, of their children, and of those that have ended."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from launcher.agent.heartbeat import Descendants

SPIN = "import sys, time\nuntil = time.process_time() + {}\nwhile time.process_time() < until: pass\n"
SPIN += "print('spun', flush=True)\nsys.stdin.read()"
# A child of a child, both of which are still there when it has spun.
NESTED = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', sys.argv[1]])"


def test_cpu_below_counts_descendants_alive_and_dead() -> None:
    before = Descendants(os.getpid()).cpu()
    command = [sys.executable, "-c", NESTED, SPIN.format(0.3)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"spun\n"
        alive = Descendants(os.getpid()).cpu() - before
        assert Descendants(child.pid).cpu() >= 0.3
        child.communicate(timeout=20)
    dead = Descendants(os.getpid()).cpu() - before
    assert alive >= 0.3
    assert dead >= alive


def test_a_process_that_sleeps_or_has_gone_uses_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        time.sleep(0.1)
        assert Descendants(child.pid).cpu() == 0.0
        child.communicate(b"\n", timeout=20)
    assert Descendants(child.pid).cpu() == 0.0


def test_children_are_found_between_thorough_looks_too() -> None:
    descendants = Descendants(os.getpid())
    before = descendants.cpu()
    with subprocess.Popen(
        [sys.executable, "-c", "import time\nwhile time.process_time() < 0.3: pass\ntime.sleep(60)"]
    ) as child:
        try:
            deadline = time.monotonic() + 20
            while Descendants(os.getpid()).cpu() - before < 0.2:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            assert descendants.cpu() - before >= 0.2  # the second look
        finally:
            child.kill()
