"""The table of options, and what is made of it: the command line, the helps, and the table in the docs."""

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
from launcher.options import GROUPS, KEYS, OPTIONS, Option

LAUNCH = [sys.executable, "-m", "launcher"]
DOCS = Path(__file__).parents[2] / "docs" / "launcher.md"


@pytest.mark.parametrize(
    ("line", "options", "rest"),
    [
        ("s.py", {}, "s.py"),
        ("-n 4 s.py -n 7 --help", {"n": 4}, "s.py -n 7 --help"),
        ("-n4 --grace=1 s.py", {"n": 4, "grace": 1}, "s.py"),
        ("-n 2 -m pkg --lr 3", {"n": 2, "module": "pkg"}, "--lr 3"),
        ("-m pkg -m x -n 2", {"module": "pkg"}, "-m x -n 2"),
        ("-n 2 -mpkg --lr 3", {"n": 2, "module": "pkg"}, "--lr 3"),
        ("-mpkg x -n 2", {"module": "pkg"}, "x -n 2"),
        ("-m pkg -- x", {"module": "pkg"}, "-- x"),
        ("--config j.toml -n 2 --lr 3", {"config": "j.toml", "n": 2}, "--lr 3"),
        ("--config j.toml --lr=3 -n 2", {"config": "j.toml"}, "--lr=3 -n 2"),
        ("--config j.toml -- -n 2", {"config": "j.toml"}, "-n 2"),
        ("--set n=2 --set=args.x=- s.py", {"set": ["n=2", "args.x=-"]}, "s.py"),
        ("--grace -1 s.py", {"grace": -1}, "s.py"),
        ("--trace=--grace s.py", {"trace": "--grace"}, "s.py"),
        ("-- -odd.py x", {}, "-odd.py x"),
        ("-h", {"help": True}, ""),
        ("-np 2 a.py -- x", {"n": 2}, "a.py -- x"),
        ("-np=2 a.py", {"n": 2}, "a.py"),
    ],
)
def test_command_line(line: str, options: dict[str, object], rest: str) -> None:
    assert cli.read(line.split()) == {**options, "rest": rest.split()}


HERE = __file__


@pytest.mark.parametrize(
    ("argv", "fields"),
    [
        ("-n 4", {"n": 4}),
        ("-n 4 -n 2", {"n": 2}),
        ("--hosts a:4,b", {"hosts": (Host("a", 4), Host("b", 1))}),
        ("--engine openmpi", {"engine": "openmpi"}),
        ("--engine intel", {"engine": "mpich"}),
        ("--backend mpi", {"backend": "mpi"}),
        ("--bind --share-gpu", {"bind": True, "share_gpu": True}),
        ("--grace 1.5 --start-limit 10", {"grace": 1.5, "start_limit": 10}),
        ("--timeout 90 --hang-timeout 30", {"timeout": 90, "hang_timeout": 30}),
        ("--timeout off --hang-timeout off", {"timeout": None, "hang_timeout": None}),
        ("--timeout 3 --timeout 0 --hang-timeout 0", {"timeout": None, "hang_timeout": None}),
        ("--max-restarts 3", {"max_restarts": 3}),
        ("--hosts a:2 --min-ranks 1", {"hosts": (Host("a", 2),), "min_ranks": 1}),
        ("--ranks 0,3 -n 4", {"ranks": (0, 3), "n": 4}),
        ("--status", {"status": True}),
        ("--status --no-status", {"status": False}),
        ("--debug-rank 1 -n 2", {"debug_rank": 1, "n": 2}),
        ("--log-dir /tmp/a/b --events e --trace t", {"log_dir": "/tmp/a/b", "events": "e", "trace": "t"}),
    ],
)
def test_options_become_a_job(argv: str, fields: dict[str, Any]) -> None:
    assert cli.parse([*argv.split(), HERE, "-n", "7"]) == Job(script=HERE, args=("-n", "7"), **fields)


def test_a_hostfile(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=2\n# none\nb:3\n")
    job = cli.parse(["--hostfile", str(tmp_path / "hosts"), HERE])
    assert (job.hosts, job.n, job.size) == ((Host("a", 2), Host("b", 3)), None, 5)


def test_a_rank_for_every_gpu(monkeypatch: Any) -> None:
    monkeypatch.setattr(placement, "visible_gpus", lambda environ: ["0", "1", "5"])
    assert cli.parse(["-n", "gpu", HERE]).n == 3
    monkeypatch.setattr(placement, "visible_gpus", lambda environ: [])
    with pytest.raises(UsageError, match="-n gpu: "):
        cli.parse(["-n", "gpu", HERE])


def test_the_size_of_a_job() -> None:
    hosts = (Host("a", 2), Host("b", 3))
    sizes = [Job(script=HERE), Job(script=HERE, n=3), Job(script=HERE, hosts=hosts), Job(script=HERE, n=4, hosts=hosts)]
    assert [job.size for job in sizes] == [1, 3, 5, 4]


def test_every_field_of_a_job_has_one_key_and_every_key_a_field() -> None:
    of_python_alone = {"prefix"}
    read_into_hosts = {"hostfile"}
    assert set(KEYS) - read_into_hosts == {field.name for field in fields(Job)} - of_python_alone
    for option in OPTIONS:
        plain = option.name.lstrip("-").replace("-", "_")
        assert option.key in ("", plain) or (option.name, option.key) in {("-m", "module"), ("--no-status", "status")}


def test_the_short_help_fits_one_screen() -> None:
    text = cli.parser().format_help()
    lines = text.splitlines()
    assert len(lines) < 24  # the shell's prompt takes one
    assert max(map(len, lines)) <= 100
    assert "--help-all" in text


def test_the_long_help_has_every_option_in_its_group() -> None:
    text = cli.parser(everything=True).format_help()
    assert max(map(len, text.splitlines())) <= 100
    for heading, options in GROUPS.items():
        group = text.split(f"{heading}:\n")[1].split("\n\n")[0]
        names = [re.split(r"[ ,]", line.strip())[0] for line in group.splitlines()]
        assert names == [option.name for option in options]


@pytest.mark.parametrize(
    ("name", "default"),
    [("-n", ""), ("--grace", "5"), ("--hang-timeout", "540"), ("--engine", "auto"), ("--max-restarts", "0")],
)
def test_helps_show_the_defaults_of_a_job(name: str, default: str, capsys: Any) -> None:
    assert cli.main(["--help-all"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if re.match(rf"  {name}[ ,]", line))
    assert line.endswith(f"({default})") == bool(default)


def test_version(capsys: Any) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"ddp-launch {__version__}\n"


def test_help_for_nobody(run_job: Any) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write) as pipe:
        done = run_job([*LAUNCH, "--help-all"], stdout=pipe)
    assert (done.returncode, done.stderr) == (141, "")
    with open("/dev/full", "w") as full:
        done = run_job([*LAUNCH, "--help-all"], stdout=full)
    assert (done.returncode, done.stderr) == (1, "ddp-launch: the output cannot be written: No space left on device\n")


def rows() -> dict[str, tuple[str, str]]:
    """What the docs say of each option: meaning and example."""
    table = re.findall(r"^\| `(-[^`]+)` \| (.+) \| `(ddp-launch .+)` \|$", DOCS.read_text(), re.MULTILINE)
    return {usage: (meaning, example) for usage, meaning, example in table}


def test_the_docs_have_every_option_and_no_other() -> None:
    assert list(rows()) == [option.usage for option in OPTIONS]


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_the_docs_show_each_option_at_work(option: Option) -> None:
    meaning, example = rows()[option.usage]
    words = shlex.split(example)[1:]
    assert option.name in words, "the example does not use it"
    assert cli.read(words)
    assert cli.default(option) in meaning
