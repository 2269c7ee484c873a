"""A job of a few lines, started by ddp-launch from this checkout."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Run

LAUNCH = [sys.executable, "-m", "launcher"]
Script = Callable[..., str]

# What every script below may use.
HEAD = """
import os, signal, subprocess, sys, time
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
"""


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Writes a script and returns its path."""

    def write(body: str, name: str = "job.py") -> str:
        path = tmp_path / name
        path.write_text(HEAD + textwrap.dedent(body))
        return str(path)

    return write


@pytest.fixture
def launch(run_job: Run) -> Run:
    """Runs `ddp-launch` with these words to its end, whose exit code must be that: `launch("-n", 2, path, code=1)`."""

    def run(*words: object, timeout: float = 60.0, **more: Any) -> Any:
        return run_job([*LAUNCH, *map(str, words)], timeout, **{"code": 0, **more})

    return run


@pytest.fixture
def ddp_launch(launch: Run, script: Script) -> Run:
    """Runs a script of these lines under ddp-launch to its end."""

    def run(body: str, *args: str, n: int = 2, options: Sequence[str] = (), **more: Any) -> Any:
        return launch("-n", n, *options, script(body), *args, timeout=20, **more)

    return run


@pytest.fixture
def start_launch(start_job: Any, script: Script) -> Callable[..., Any]:
    """Starts a script of these lines, waits until every rank has said `ready`, and returns the job."""

    def start(body: str, n: int = 2, options: Sequence[str] = (), **more: Any) -> Any:
        job = start_job([*LAUNCH, "-n", str(n), *options, script(body)], **more)
        wait_for(job.process.stdout, "ready", n)
        return job

    return start


@pytest.fixture
def run_in_own_network(run_job: Run) -> Run:
    """Runs code, whose first argument is the path of `ip`, in a network of its own, where even lo is down."""
    ip = shutil.which("ip", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    alone = ["unshare", "--user", "--map-root-user", "--net"]
    if ip is None or subprocess.run([*alone, "true"], capture_output=True).returncode != 0:
        pytest.skip("a network of its own takes ip, and user namespaces or root")
    return lambda code, *args: run_job([*alone, sys.executable, "-c", code, ip, *args], code=0)


def read_events(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of events."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def wait_for(stream: Any, word: str, times: int, timeout: float = 20.0) -> str:
    """Reads `stream` until `word` has come `times` times; what came. Nothing is read ahead, so more can follow."""
    deadline = time.monotonic() + timeout
    text = ""
    while text.count(word) < times:
        if not select.select([stream], [], [], max(0.0, deadline - time.monotonic()))[0]:
            pytest.fail(f"waited {timeout} s for {times} times {word!r}, got {text!r}")
        data = os.read(stream.fileno() if hasattr(stream, "fileno") else stream, 1 << 16)
        if not data:
            pytest.fail(f"{word!r} never came, only {text!r}")
        text += data.decode(errors="replace")
    return text
