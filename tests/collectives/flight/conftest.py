"""Processes that keep a flight record and are read from outside."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HEAD = """
import os, signal, sys, threading, time
from collectives.flight.recorder import DONE, FAILED, QUEUED, STARTED, Recorder
from collectives.flight.recorder import start_sampler
recorder = Recorder(rank=1, size=4)
def call(name="all_reduce"):
    text = recorder.intern("world", name, "float32", (512, 10), "sum", "/home/me/train.py", 88)
    return recorder.begin(text, 417)
def ready():
    print("ready", flush=True)
"""


@pytest.fixture
def recorded(start_job: Any, tmp_path: Path) -> Callable[..., Any]:
    """Starts a process of these lines, waits until it has said `ready`, and returns the job."""

    def start(body: str) -> Any:
        path = tmp_path / "recorded.py"
        path.write_text(HEAD + textwrap.dedent(body))
        job = start_job([sys.executable, str(path)])
        said = b""
        while not said.endswith(b"\n"):  # nothing is read ahead, so that `job.wait` returns all that follows
            byte = os.read(job.process.stdout.fileno(), 1)  # it speaks or ends
            if not byte:
                pytest.fail(job.process.stderr.read())
            said += byte
        assert said == b"ready\n"
        return job

    return start
