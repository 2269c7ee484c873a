"""A job of a few lines, started by ddp-launch from this checkout."""

from __future__ import annotations

import os
import select
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Run

LAUNCH = [sys.executable, "-m", "launcher"]

# What every script below may use.
HEAD = """
import os, signal, subprocess, sys, time
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
"""


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    """Writes a script and returns its path."""

    def write(body: str, name: str = "job.py") -> str:
        path = tmp_path / name
        path.write_text(HEAD + textwrap.dedent(body))
        return str(path)

    return write


@pytest.fixture
def ddp_launch(run_job: Any, script: Callable[[str], str]) -> Run:
    """Runs a script of these lines under ddp-launch to its end."""

    def run(body: str, *args: str, n: int = 2, options: tuple[str, ...] = (), **more: Any) -> Any:
        return run_job([*LAUNCH, "-n", str(n), *options, script(body), *args], timeout=20, **more)

    return run


@pytest.fixture
def start_launch(start_job: Any, script: Callable[[str], str]) -> Callable[..., Any]:
    """Starts a script of these lines, waits until every rank has said `ready`, and returns the job."""

    def start(body: str, n: int = 2, options: tuple[str, ...] = (), **more: Any) -> Any:
        job = start_job([*LAUNCH, "-n", str(n), *options, script(body)], **more)
        wait_for(job.process.stdout, "ready", n)
        return job

    return start


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
