"""Damaged job files: refused with a UsageError, or a job that passes every check, and is the same once printed."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher import config, engines, placement
from launcher.config import value_of
from launcher.errors import UsageError
from launcher.job import Job
from launcher.network import parse_hostfile
from tests.mutations import mutated

FILES = [
    b"""[launch]
n = 4
script = "train.py"
hosts = ["a:2", "[::1]:4"]
grace = 5.0
timeout = 90
hang_timeout = "off"
start_limit = 1e3
max_restarts = 3
min_ranks = 2
ranks = [0, 3]
debug_rank = 1
bind = true
engine = "mpich"
backend = "mpi"
log_dir = "logs"
events = "events.jsonl"
trace = "trace"

[args]
lr = 0.1
layers = [64, 10]
name = "x"
verbose = true
when = 2026-11-21T07:30:00Z
""",
    b'[launch]\nn = "gpu"\nmodule = "pkg.train"\nargs = ["data", "-v"]\n',
    b'[launch]\nscript = "train.py"\nhostfile = "hosts"\nranks = "0,1"\n[args]\n"b c" = 1\n',
]
# What the grammar knows, and values that no program expects.
WORDS = [
    *(b"\n", b" ", b"=", b"[", b"]", b"{", b"}", b'"', b"'", b'"""', b",", b".", b"#", b"\\", b"\0", b"\r", b"\xff"),
    *(b"[launch]\n", b"[args]\n", b"[[launch]]\n", b"n = 1\n", b"gpu", b"off", b"true", b"0", b"-1", b"inf", b"nan"),
    *(b"1" + b"0" * digits for digits in (20, 400, 5000)),
    *(b"1e999", b"0x" + b"f" * 400, b'"\\u0000"', b'"\\U0010ffff"', b'"a\\u0000b"', b'"' + b"x" * 5000 + b'"'),
    *(b"[" * 200, b"{a=" * 200, b"a." * 2000, b"2026-11-21", b"07:30:00", b'["a", 1]', b'"a:99999999999999999999"'),
]


def absolute(job: Job) -> Job:
    paths = {key: getattr(job, key) for key in ("script", "log_dir", "events", "trace")}
    return dataclasses.replace(job, **{key: path and os.path.abspath(path) for key, path in paths.items()})


def check(job: Job) -> None:
    """What the rest of the launcher may take for granted."""
    assert job.size >= 1
    for seconds in (job.grace, job.start_limit, job.timeout, job.hang_timeout):
        assert seconds is None or math.isfinite(seconds)
    for text in (*job.target, job.log_dir or "", job.events or "", job.trace or "", *(host.name for host in job.hosts)):
        assert "\0" not in text
        text.encode()


def job_of(path: Path) -> tuple[Job, Any]:
    layer = config.load(str(path))
    return engines.resolve_size(layer.job(), {}), layer


def test_a_damaged_job_file(count: Callable[[int, int], int], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(placement, "count_gpus", lambda: 2)
    Path("train.py").touch()
    Path("hosts").write_text("a:4\nb slots=2\n")
    rng = random.Random(3)
    good = 0
    for number in range(count(500, 10_000)):
        data = mutated(FILES[number % len(FILES)], rng, WORDS)
        Path("job.toml").write_bytes(data)
        try:
            job, layer = job_of(Path("job.toml"))
            printed = config.show(job, layer)
        except UsageError:
            continue
        check(job)
        good += 1
        Path("printed.toml").write_text(printed)
        assert job_of(Path("printed.toml"))[0] == absolute(job)
    assert good > 10


@pytest.mark.parametrize("key", config.KEYS)
def test_every_value_of_every_key(key: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    rest = b"" if key in ("module", "script") else b'module = "x"\n'
    for value in WORDS:
        for table in (b"", b"[args]\n", b"[launch]\n"):
            Path("job.toml").write_bytes(table + key.encode() + b" = " + value + b"\n" + rest)
            with contextlib.suppress(UsageError):
                job, layer = job_of(Path("job.toml"))
                check(job)
                config.show(job, layer)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("n = 1" + "0" * 5000, "is not valid TOML: Exceeds the limit"),
        ("n = " + "[" * 100_000, "is not valid TOML: "),
        ("grace = 1" + "0" * 400, "grace should be a number of seconds, not 10000"),
        ('hostfile = "a\\u0000b"', "hostfile should be a path, not 'a\\x00b'"),
        ('args = ["a\\u0000b"]', "args should be a list of strings"),
        ('[args]\nx = "a\\u0000b"', "'x' in [args] has a zero byte, which no argument of a program can have"),
        ('[args]\n"a\\u0000b" = 1', "'a\\x00b' in [args] has a zero byte"),
    ],
    ids=range(7),
)
def test_what_was_found_so(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(text if text.startswith("[args]") else f"[launch]\n{text}\n")
    with pytest.raises(UsageError, match=re.escape(says)):
        config.load(str(tmp_path / "job.toml"))


def test_no_value_of_set_is_too_long_or_too_deep() -> None:
    for text in ("1" + "0" * 5000, "[" * 100_000):
        assert value_of(text) == text
    for text in ("a:" + "9" * 5000, "a slots=" + "9" * 5000):
        with pytest.raises(UsageError, match="is not understood"):
            parse_hostfile(text, "hosts")
