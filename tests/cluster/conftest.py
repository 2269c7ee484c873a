"""Clusters that live as long as the tests that use them.

A script beside this file sets one up, says "ready ...", and undoes everything when its stdin ends: that happens when
the tests are over, and also when they are killed.
"""

from __future__ import annotations

import contextlib
import select
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CANNOT = 77  # exit status of a script whose cluster this machine cannot have
SETTING_UP = 280.0  # s; packages may have to be installed first
ENDING = 30.0  # s

Cluster = Callable[..., list[str]]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """`cluster("hosts.sh", "up")` runs the script until the module's tests are over; what it said after "ready"."""
    with contextlib.ExitStack() as stack:
        yield lambda script, *args: stack.enter_context(_running(script, *args))


@contextlib.contextmanager
def _running(script: str, *args: str) -> Iterator[list[str]]:
    process = subprocess.Popen(
        [str(HERE / script), *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for the tests, which then end it in order
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        heard, _, _ = select.select([process.stdout], [], [], SETTING_UP)
        said = process.stdout.readline().split() if heard else []
        if said[:1] == ["ready"]:
            yield said[1:]
            return
        rest = process.communicate(timeout=ENDING)[0]
        reason = " ".join([*said, rest]).strip()
        if process.returncode == CANNOT:
            pytest.skip(reason)
        pytest.fail(f"{script} {args}: {reason}")
    finally:
        process.stdin.close()
        try:
            assert process.wait(ENDING) in (0, 1, CANNOT)
        finally:
            process.kill()
            process.stdout.close()
            process.wait()


@pytest.fixture
def leaving(tmp_path: Path) -> Callable[[str], str]:
    """`leaving("sys.exit(3)")` is a script: rank 1 goes like that while the others wait for it in a collective."""

    def write(how: str) -> str:
        script = tmp_path / "leaving.py"
        script.write_text(
            "import os, signal, sys\n"
            "import numpy as np\n"
            "import collectives\n"
            "comm = collectives.init(timeout=60)\n"
            "comm.all_reduce(np.ones(1))\n"
            f"if comm.rank == 1: {how}\n"
            "comm.all_reduce(np.ones(1))\n"
        )
        return str(script)

    return write
