"""The command line: what its words become, the help, and the table of options in the docs."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import pytest

from collectives import __version__
from launcher import cli, placement
from launcher.job import Job
from launcher.options import parser
from tests.conftest import ROOT

DOCS = ROOT / "docs/launcher.md"
OPTIONS = {f"{action.option_strings[0]} {action.metavar or ''}".strip(): action for action in parser().actions}


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
        ("--metrics-port 9400 s.py", {"metrics_port": ("127.0.0.1", 9400)}, "s.py"),
        ("--metrics-port 0.0.0.0:94 s.py", {"metrics_port": ("0.0.0.0", 94)}, "s.py"),
        ("--trace=--grace s.py", {"trace": "--grace"}, "s.py"),
        ("-- -odd.py x", {}, "-odd.py x"),
        ("-h", {"help": True}, ""),
        ("-np=2 a.py -- x", {"n": 2}, "a.py -- x"),
    ],
)
def test_command_line(line: str, options: dict[str, object], rest: str) -> None:
    assert cli.read(line.split()) == {**options, "rest": rest.split()}


def test_a_rank_for_every_gpu(monkeypatch: Any) -> None:
    monkeypatch.setattr(placement, "visible_gpus", lambda environ: ["0", "1", "5"])
    assert cli.parse(["-n", "gpu", __file__]).n == 3


def test_every_field_of_a_job_is_an_option() -> None:
    of_python_alone = {"prefix", "script", "args"}
    no_fields = {"config", "version", "help", "resize", "job"}
    options = {option.dest for option in OPTIONS.values()}
    assert options - no_fields == {field.name for field in fields(Job)} - of_python_alone


def test_version_and_help(capsys: Any) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"ddp-launch {__version__}\n"
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    for name, default in (("--grace", "5"), ("--hang-timeout", "540"), ("--engine", "auto"), ("--max-restarts", "0")):
        assert re.search(rf"^  {name} .*\({default}\)$", text, re.MULTILINE)


def test_the_docs_have_every_option_and_no_other() -> None:
    assert re.findall(r"^\| `(-[^`]+)` \| ", DOCS.read_text(), re.MULTILINE) == list(OPTIONS)
