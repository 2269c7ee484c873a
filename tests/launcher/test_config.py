"""Job files: what they say, that the command line wins, and that damaged ones are refused with a sentence."""

from __future__ import annotations

import math
import os
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher import cli, engines, placement
from launcher.config import words
from launcher.errors import UsageError
from launcher.job import Job
from launcher.network import Host
from tests.mutations import mutated

HERE = __file__


@pytest.fixture
def job_file(tmp_path: Path, monkeypatch: Any) -> Any:
    """Writes a job file beside a script train.py, in the working folder, and returns its path."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    Path("hosts").write_text("a:4\nb slots=2\n")

    def write(text: str | bytes) -> str:
        Path("job.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(tmp_path / "job.toml")

    return write


def test_every_key(job_file: Any, tmp_path: Path) -> None:
    path = job_file(
        """
        [launch]
        script = "train.py"
        args = ["data", "-v"]
        n = 2
        hostfile = "hosts"
        engine = "intel"
        backend = "mpi"
        bind = true
        share_gpu = true
        grace = 1
        start_limit = 2.5
        timeout = "off"
        hang_timeout = 0
        heartbeat_timeout = 9
        max_restarts = 3
        min_ranks = 1
        ranks = [0, 1]
        debug_rank = 1
        log_dir = "logs"
        events = "events.jsonl"
        trace = "/absolute"
        [args]
        lr = 0.1
        on = true
        off = false
        xs = [1, "a"]
        """.replace("/absolute", str(tmp_path / "elsewhere"))
    )
    assert cli.parse(["--config", path, "w"]) == Job(
        script=str(tmp_path / "train.py"),
        args=("--lr", "0.1", "--on", "--xs", "1", "a", "data", "-v", "w"),
        n=2,
        hosts=(Host("a", 4), Host("b", 2)),
        engine="mpich",
        backend="mpi",
        bind=True,
        share_gpu=True,
        grace=1,
        start_limit=2.5,
        hang_timeout=None,
        heartbeat_timeout=9,
        max_restarts=3,
        min_ranks=1,
        ranks=(0, 1),
        debug_rank=1,
        log_dir=str(tmp_path / "logs"),
        events=str(tmp_path / "events.jsonl"),
        trace=str(tmp_path / "elsewhere"),
    )


@pytest.mark.parametrize(
    ("launch", "fields"),
    [
        ('hosts = "a:2,b"', {"hosts": (Host("a", 2), Host("b", 1))}),
        ('hosts = ["a:2", "[::1]:4"]', {"hosts": (Host("a", 2), Host("::1", 4))}),
        ("n = 4\nranks = 3", {"n": 4, "ranks": (3,)}),
        ('n = 4\nranks = "0,3"', {"n": 4, "ranks": (0, 3)}),
    ],
)
def test_values_that_can_be_written_in_several_ways(job_file: Any, launch: str, fields: dict[str, Any]) -> None:
    job = cli.parse(["--config", job_file(f"[launch]\n{launch}\n"), HERE])
    assert job == Job(script=HERE, **fields)


def test_the_command_line_wins(job_file: Any) -> None:
    path = job_file('[launch]\nscript = "train.py"\nhostfile = "hosts"\nn = 1\ngrace = 1\n[args]\nlr = 1\n')
    job = cli.parse(["-n", "3", "--hosts", "c:3", "--config", path, "--lr", "2"])
    assert (job.n, job.grace, job.hosts, job.args) == (3, 1, (Host("c", 3),), ("--lr", "1", "--lr", "2"))
    job = cli.parse(["--config", path, "-m", "pkg"])
    assert (job.module, job.script) == ("pkg", None)


def test_words() -> None:
    assert words({"a": [True, False], "s": "x y", "f": 1e-5}) == ("--a", "true", "false", "--s", "x y", "--f", "1e-05")


def test_reading_toml_waits_until_there_is_some(run_job: Any) -> None:
    code = "import sys; from launcher import cli; cli.parse(['-n', '2', sys.argv[1]]); print(*sys.modules)"
    loaded = set(run_job([sys.executable, "-c", code, HERE]).stdout.split())
    assert "launcher.options" in loaded
    assert not loaded & {"tomllib", "tomli", "launcher.network", "difflib"}


def test_the_job_file_of_the_docs(job_file: Any) -> None:
    docs = (Path(__file__).parents[2] / "docs" / "launcher.md").read_text()
    job = cli.parse(["--config", job_file(docs.split("```toml\n")[1].split("```")[0])])
    assert job.args == ("--lr", "0.1", "--layers", "64", "10", "--verbose", "data")
    assert (job.size, job.hang_timeout, job.ranks) == (8, None, (0, 3))


FILES = [
    b"""[launch]
n = 4
script = "train.py"
hosts = ["a:2", "[::1]:4"]
grace = 5.0
timeout = 90
hang_timeout = "off"
ranks = [0, 3]
bind = true
log_dir = "logs"

[args]
lr = 0.1
layers = [64, 10]
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


def test_a_damaged_job_file_is_refused_or_a_job(
    job_file: Any, count: Callable[[int, int], int], monkeypatch: Any
) -> None:
    monkeypatch.setattr(placement, "count_gpus", lambda: 2)
    rng = random.Random(3)
    whole = [
        key.encode() + b" = " + value + b"\n" for key in ("script", "hosts", "n", "grace", "trace") for value in WORDS
    ]
    damaged = [mutated(FILES[number % len(FILES)], rng, WORDS) for number in range(count(500, 10_000))]
    good = 0
    for text in [*damaged, *(b'[launch]\nmodule = "x"\n' + line for line in whole)]:
        try:
            job = engines.resolve_size(cli.parse(["--config", job_file(text)]), {})
        except UsageError:
            continue
        good += 1
        assert job.size >= 1
        assert all(each is None or math.isfinite(each) for each in (job.grace, job.start_limit, job.timeout))
        for word in (*job.target, job.log_dir or "", job.events or "", *(host.name for host in job.hosts)):
            assert "\0" not in word
            os.fsencode(word)
    assert good > 10


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("n = 1" + "0" * 5000, "is not valid TOML: Exceeds the limit"),
        ("n = " + "[" * 100_000, "is not valid TOML: "),
        ("grace = 1" + "0" * 400, "the grace must be a number of seconds, zero or more, not inf"),
        ('hostfile = "a\\u0000b"', "hostfile should be a path, or another text without a zero byte, not 'a\\x00b'"),
        ("trace = 3", "trace should be a path, "),
        ('args = ["a\\u0000b"]', "args should be a list of strings"),
        ('[args]\nx = "a\\u0000b"', "'x' in [args] has a zero byte, which no argument of a program can have"),
    ],
    ids=range(7),
)
def test_values_that_are_refused(text: str, says: str, job_file: Any) -> None:
    path = job_file(text if text.startswith("[args]") else f"[launch]\n{text}\n")
    with pytest.raises(UsageError, match=re.escape(says)):
        cli.parse(["--config", path, HERE])
