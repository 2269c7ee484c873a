"""The command line: what its words become, the help, and the table of options in the docs."""

from __future__ import annotations

import os
import re
import shlex
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from collectives.version import __version__
from launcher import cli, placement
from launcher.errors import UsageError
from launcher.job import Job
from launcher.network import Host
from launcher.options import parser

LAUNCH = [sys.executable, "-m", "launcher"]
DOCS = Path(__file__).parents[2] / "docs" / "launcher.md"
OPTIONS = {f"{each.option_strings[0]} {each.metavar or ''}".strip(): each for each in parser().actions}
HERE = __file__


@pytest.mark.parametrize(
    ("line", "options", "rest"),
    [
        ("s.py", {}, "s.py"),
        ("-n 4 --grace=1 s.py -n 7 --help", {"n": 4, "grace": 1}, "s.py -n 7 --help"),
        ("-m pkg -m x -n 2", {"module": "pkg"}, "-m x -n 2"),
        ("-m pkg -- x", {"module": "pkg"}, "-- x"),
        ("-n4 -mpkg.a -n2", {"n": 4, "module": "pkg.a"}, "-n2"),
        ("--config j.toml -n 2 --lr 3", {"config": "j.toml", "n": 2}, "--lr 3"),
        ("--config j.toml --lr=3 -n 2", {"config": "j.toml"}, "--lr=3 -n 2"),
        ("--config j.toml -- -n 2", {"config": "j.toml"}, "-n 2"),
        ("--grace -1 s.py", {"grace": -1}, "s.py"),
        ("--trace=--grace s.py", {"trace": "--grace"}, "s.py"),
        ("-- -odd.py x", {}, "-odd.py x"),
        ("-h", {"help": True}, ""),
        ("-np=2 a.py -- x", {"n": 2}, "a.py -- x"),
    ],
)
def test_command_line(line: str, options: dict[str, object], rest: str) -> None:
    assert cli.read(line.split()) == {**options, "rest": rest.split()}


@pytest.mark.parametrize(
    ("argv", "fields"),
    [
        ("-n 4 -n 2", {"n": 2}),
        ("--hosts a:4,b", {"hosts": (Host("a", 4), Host("b", 1))}),
        ("--engine intel --backend mpi", {"engine": "mpich", "backend": "mpi"}),
        ("--bind --share-gpu", {"bind": True, "share_gpu": True}),
        ("--grace 1.5 --start-limit 10", {"grace": 1.5, "start_limit": 10}),
        ("--timeout 90 --hang-timeout 30", {"timeout": 90, "hang_timeout": 30}),
        ("--timeout 3 --timeout 0 --hang-timeout off", {"timeout": None, "hang_timeout": None}),
        ("--hosts a:2 --min-ranks 1 --max-restarts 3", {"hosts": (Host("a", 2),), "min_ranks": 1, "max_restarts": 3}),
        ("--ranks 0,3 -n 4 --debug-rank 1", {"ranks": (0, 3), "n": 4, "debug_rank": 1}),
        ("--log-dir /tmp/a/b --events e --trace t", {"log_dir": "/tmp/a/b", "events": "e", "trace": "t"}),
    ],
)
def test_options_become_a_job(argv: str, fields: dict[str, Any]) -> None:
    assert cli.parse([*argv.split(), HERE, "-n", "7"]) == Job(script=HERE, args=("-n", "7"), **fields)


def test_hostfile(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=2\n# none\nb:3\n")
    job = cli.parse(["--hostfile", str(tmp_path / "hosts"), HERE])
    assert (job.hosts, job.n, job.size) == ((Host("a", 2), Host("b", 3)), None, 5)


def test_a_rank_for_every_gpu(monkeypatch: Any) -> None:
    monkeypatch.setattr(placement, "visible_gpus", lambda environ: ["0", "1", "5"])
    assert cli.parse(["-n", "gpu", HERE]).n == 3
    monkeypatch.setattr(placement, "visible_gpus", lambda environ: [])
    with pytest.raises(UsageError, match="-n gpu: "):
        cli.parse(["-n", "gpu", HERE])


def test_every_field_of_a_job_is_an_option() -> None:
    of_python_alone = {"prefix", "script", "args"}
    read_into_hosts, no_fields = {"hostfile"}, {"config", "version", "help"}
    options = {option.dest for option in OPTIONS.values()}
    assert options - read_into_hosts - no_fields == {field.name for field in fields(Job)} - of_python_alone


def test_version_and_help(capsys: Any) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"ddp-launch {__version__}\n"
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    for name, default in (("--grace", "5"), ("--hang-timeout", "540"), ("--engine", "auto"), ("--max-restarts", "0")):
        assert re.search(rf"^  {name} .*\({default}\)$", text, re.MULTILINE)


def test_help_that_cannot_be_written(run_job: Any) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write) as pipe:
        done = run_job([*LAUNCH, "--help"], stdout=pipe)
    assert (done.returncode, done.stderr) == (141, "")
    with open("/dev/full", "w") as full:
        done = run_job([*LAUNCH, "--help"], stdout=full)
    assert (done.returncode, done.stderr) == (1, "ddp-launch: the output cannot be written: No space left on device\n")


def test_the_docs_have_every_option_and_no_other() -> None:
    table = re.findall(r"^\| `(-[^`]+)` \| .+ \| `(ddp-launch .+)` \|$", DOCS.read_text(), re.MULTILINE)
    assert [usage for usage, _ in table] == list(OPTIONS)
    for usage, example in table:
        words = shlex.split(example)[1:]
        assert usage.split()[0] in words, "the example does not use it"
        assert cli.read(words)
