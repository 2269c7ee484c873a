"""Processes that keep a flight record and are read from outside."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HEAD = """
import os, signal, sys, threading, time
from collectives.flight.recorder import DONE, FAILED, QUEUED, STARTED, Recorder
from collectives.flight.sampler import Sampler
recorder = Recorder(rank=1, size=4)
world = recorder.communicator("world")
def call(name="all_reduce"):
    return recorder.begin(world, 417, recorder.intern(name, "float32", (512, 10), "sum", "/home/me/train.py", 88))
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
        if job.process.stdout.readline() != "ready\n":  # it ends or speaks: tests have a time limit
            pytest.fail(job.process.stderr.read())
        return job

    return start
