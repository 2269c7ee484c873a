"""Job files: what they say, that the command line wins, and that damaged ones are refused with a sentence."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from launcher import cli
from launcher.config import words
from launcher.errors import UsageError
from launcher.job import Job
from launcher.network import Host
from tests.conftest import ROOT

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


# Keys whose values are the fields of a job as they stand.
PLAIN: dict[str, Any] = {"n": 2, "backend": "mpi", "bind": True, "share_gpu": True, "grace": 1, "start_limit": 2.5}
PLAIN |= {"heartbeat_timeout": 9, "max_restarts": 3, "min_ranks": 1, "ranks": (0, 1), "debug_rank": 1}


def test_every_key(job_file: Any, tmp_path: Path) -> None:
    path = job_file(
        "[launch]\n"
        + "".join(f"{key} = {json.dumps(value)}\n" for key, value in PLAIN.items())
        + f"""
        script = "train.py"
        args = ["data", "-v"]
        hostfile = "hosts"
        engine = "intel"
        timeout = "off"
        hang_timeout = 0
        log_dir = "logs"
        events = "events.jsonl"
        trace = "{tmp_path}/elsewhere"
        [args]
        lr = 0.1
        on = true
        off = false
        xs = [1, "a"]
        """
    )
    assert cli.parse(["--config", path, "w"]) == Job(
        script=str(tmp_path / "train.py"),
        args=("--lr", "0.1", "--on", "--xs", "1", "a", "data", "-v", "w"),
        hosts=(Host("a", 4), Host("b", 2)),
        hostfile=str(tmp_path / "hosts"),
        engine="mpich",
        hang_timeout=None,
        log_dir=str(tmp_path / "logs"),
        events=str(tmp_path / "events.jsonl"),
        trace=str(tmp_path / "elsewhere"),
        **PLAIN,
    )


def test_the_command_line_wins(job_file: Any) -> None:
    path = job_file('[launch]\nscript = "train.py"\nhostfile = "hosts"\nn = 1\ngrace = 1\n[args]\nlr = 1\n')
    job = cli.parse(["-n", "3", "--hosts", "c:3", "--config", path, "--lr", "2"])
    assert (job.n, job.grace, job.hosts, job.args) == (3, 1, (Host("c", 3),), ("--lr", "1", "--lr", "2"))
    job = cli.parse(["--config", path, "-m", "pkg"])
    assert (job.module, job.script) == ("pkg", None)


def test_hosts_and_ranks_may_be_lists_or_texts(job_file: Any) -> None:
    for hosts, ranks in (('"a:2,b:3"', '"0,3"'), ('["a:2", "b:3"]', "[0, 3]")):
        job = cli.parse(["--config", job_file(f"[launch]\nhosts = {hosts}\nranks = {ranks}"), HERE])
        assert (job.hosts, job.ranks) == ((Host("a", 2), Host("b", 3)), (0, 3))


def test_words() -> None:
    assert words({"a": [True, False], "s": "x y", "f": 1e-5}) == ("--a", "true", "false", "--s", "x y", "--f", "1e-05")


def test_the_job_file_of_the_docs(job_file: Any) -> None:
    docs = (ROOT / "docs/launcher.md").read_text()
    job = cli.parse(["--config", job_file(docs.split("```toml\n")[1].split("```")[0])])
    assert job.args == ("--lr", "0.1", "--layers", "64", "10", "--verbose", "data")
    assert (job.size, job.hang_timeout, job.ranks) == (8, None, (0, 3))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[launch]\nn = \n", "job.toml is not valid TOML: "),
        (b"[launch]\nscript = 'caf\xe9'\n", "job.toml is not valid TOML: "),
        ("[launch]\nn = 1" + "0" * 5000, "is not valid TOML: Exceeds the limit"),
        ("[launch]\nn = " + "[" * 100_000, "is not valid TOML: "),
        ("launch = 3", "launch should be a table: [launch]"),
        ("[lanch]\nn = 2", "unknown table lanch (did you mean launch?)"),
        ('[launch]\nscirpt = "job.py"', "unknown key in [launch]: scirpt (did you mean script?)"),
        ("[launch]\nbind = 1", "bind should be true or false, not 1"),
        ("[launch]\nn = true", "n should be a whole number of ranks, or gpu, not 'true'"),
        ('[launch]\nranks = [0, "a"]', "ranks should be ranks, as in 0,3, not '0,a'"),
        ("[launch]\ngrace = 1" + "0" * 400, "the grace must be a number of seconds, zero or more, not inf"),
        ('[launch]\nhostfile = "a\\u0000b"', "hostfile should be a path, or another text without a zero byte, not "),
        ("[launch]\ntrace = 3", "trace should be a path, "),
        ('[launch]\nargs = "--lr 1"', "args should be a list of strings, not '--lr 1'"),
        ("[args]\nmodel.width = 3", "model in [args] should be a string, a number, a boolean or a list"),
        ('[args]\nx = "a\\u0000b"', "'x' in [args] has a zero byte, which no argument of a program can have"),
    ],
    ids=range(16),
)
def test_a_wrong_job_file_is_refused(text: str | bytes, says: str, job_file: Any) -> None:
    with pytest.raises(UsageError, match=re.escape(says)):
        cli.parse(["--config", job_file(text), HERE])
