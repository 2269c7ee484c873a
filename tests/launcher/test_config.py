"""Job files and `--set`: what they say, what wins, and that a printed job is the same job again."""

from __future__ import annotations

import datetime
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher import cli, config, engines
from launcher.config import Layer, words
from launcher.job import Job
from launcher.network import Host

HERE = __file__


@pytest.fixture
def job_file(tmp_path: Path) -> Any:
    """Writes a job file beside a script train.py, and returns its path."""
    (tmp_path / "train.py").touch()

    def write(text: str) -> str:
        (tmp_path / "job.toml").write_text(text)
        return str(tmp_path / "job.toml")

    return write


def test_a_job_file(job_file: Any, tmp_path: Path) -> None:
    launch = '[launch]\nn = 3\nscript = "train.py"\ngrace = 1\n'
    path = job_file(launch + '[args]\nlr = 0.1\non = true\noff = false\nxs = [1, "a"]\n')
    job = cli.parse(["--config", path, "-n", "2", "--lr", "1"])
    args = ("--lr", "0.1", "--on", "--xs", "1", "a", "--lr", "1")
    assert job == Job(script=os.path.join(tmp_path, "train.py"), n=2, grace=1, args=args)
    assert cli.parse(["--config", path, "-m", "pkg"]).module == "pkg"


def test_every_key(job_file: Any, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("c:3\n")
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
        max_restarts = 3
        min_ranks = 1
        ranks = [0, 1]
        status = false
        debug_rank = 1
        log_dir = "logs"
        events = "events.jsonl"
        trace = "/absolute"
        """.replace("/absolute", str(tmp_path / "elsewhere"))
    )
    assert cli.parse(["--config", path, "--set", "args.lr=1", "w"]) == Job(
        script=str(tmp_path / "train.py"),
        args=("--lr", "1", "data", "-v", "w"),
        n=2,
        hosts=(Host("c", 3),),
        engine="mpich",
        backend="mpi",
        bind=True,
        share_gpu=True,
        grace=1,
        start_limit=2.5,
        hang_timeout=None,
        max_restarts=3,
        min_ranks=1,
        ranks=(0, 1),
        status=False,
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
        ("timeout = 90", {"timeout": 90}),
    ],
)
def test_values_that_can_be_written_in_several_ways(job_file: Any, launch: str, fields: dict[str, Any]) -> None:
    job = cli.parse(["--config", job_file(f"[launch]\n{launch}\n"), HERE])
    assert job == Job(script=HERE, **fields)


@pytest.mark.parametrize(
    ("assignments", "launch", "args"),
    [
        (["n=4"], {"n": 4}, {}),
        (["launch.n=4", "n=2"], {"n": 2}, {}),
        (["launch.n = 4"], {"n": 4}, {}),
        (["args.lr=0.1"], {}, {"lr": 0.1}),
        (["args.lr=1e-3", "args.opt=adam", "args.on=true"], {}, {"lr": 0.001, "opt": "adam", "on": True}),
        (
            ["args.xs=[1, 2]", "args.s='4'", "args.s2=a=b", "args.e="],
            {},
            {"xs": [1, 2], "s": "4", "s2": "a=b", "e": ""},
        ),
        (["args.model.width=3"], {}, {"model.width": 3}),
        (["ranks=0,3"], {"ranks": (0, 3)}, {}),
        (["hang_timeout=off", "engine=slurm"], {"hang_timeout": None, "engine": "slurm"}, {}),
        (["hosts=a:4"], {"hosts": (Host("a", 4),)}, {}),
        (["bind=true", "n=gpu"], {"bind": True, "n": "gpu"}, {}),
        (["script=x.py", "log_dir=logs"], {"script": "x.py", "log_dir": "logs"}, {}),
    ],
)
def test_set(assignments: list[str], launch: dict[str, Any], args: dict[str, Any]) -> None:
    assert config.changes(assignments) == Layer(launch, args)


def test_the_command_line_wins_over_set_and_that_over_the_file(job_file: Any) -> None:
    path = job_file('[launch]\nscript = "train.py"\nn = 1\ngrace = 1\nstart_limit = 1\n[args]\nlr = 1\nmomentum = 2\n')
    # Wherever it stands on the command line.
    job = cli.parse(["-n", "3", "--set", "n=2", "--set", "grace=2", "--config", path, "--set", "args.lr=3", "--x"])
    assert (job.n, job.grace, job.start_limit, job.args) == (3, 2, 1, ("--lr", "3", "--momentum", "2", "--x"))


@pytest.mark.parametrize(
    ("lower", "upper", "both"),
    [
        ({"script": "a"}, {"module": "b"}, {"module": "b"}),
        ({"module": "a"}, {"script": "b"}, {"script": "b"}),
        ({"hosts": (), "n": 3}, {"hostfile": "b"}, {"hostfile": "b", "n": 3}),
        ({"hostfile": "a"}, {"hosts": ()}, {"hosts": ()}),
        ({"n": 1, "bind": True}, {"n": 2}, {"n": 2, "bind": True}),
    ],
)
def test_layers(lower: dict[str, Any], upper: dict[str, Any], both: dict[str, Any]) -> None:
    assert Layer(upper, {"b": 2}, ("y",)).over(Layer(lower, {"a": 1, "b": 1}, ("x",))) == Layer(
        both, {"a": 1, "b": 2}, ("x", "y")
    )


def test_words() -> None:
    assert words({"a": [True, False], "s": "x y", "f": 1e-5}) == ("--a", "true", "false", "--s", "x y", "--f", "1e-05")


# Strings that are not strings as they stand, or are hard to write.
HARD = [
    "",
    "4",
    "true",
    "a b",
    "'",
    '"',
    "\\",
    "#",
    "a\nb",
    "\t\r\b\f",
    "\x01\x1f\x7f",
    "é",
    "😀",
    "\u2028",
    "[x]",
    "=",
]


_WORDS = st.text(max_size=20)
_VALUES = _WORDS | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.booleans()


@settings(derandomize=True, deadline=None, database=None)
@given(st.dictionaries(_WORDS, _VALUES | st.lists(_VALUES, max_size=4), max_size=4))
def test_whatever_is_written_is_read_again(table: dict[str, Any]) -> None:
    text = "".join(config.line(key, value) for key, value in table.items())
    assert config.tomllib().loads(text) == table


@settings(derandomize=True, deadline=None, database=None)
@given(_WORDS)
def test_any_text_is_a_value(text: str) -> None:
    assert config.value_of(config.written(text)) == text
    if text.isalpha() and text not in ("true", "false", "inf", "nan"):
        assert config.value_of(text) == text


def test_a_value_is_toml_or_stands_for_itself() -> None:
    table = {"4": 4, "'4'": "4", "adam": "adam", "007": "007", "a#b": "a#b", "4 # b": "4 # b", "1\nx = 2": "1\nx = 2"}
    assert {text: config.value_of(text) for text in table} == table
    assert config.value_of('["#", 1]') == ["#", 1]
    assert config.value_of("2026-11-21") == datetime.date(2026, 11, 21)


def printed(argv: list[str], capsys: Any) -> str:
    assert cli.main(["--print-config", *argv]) == 0
    text = capsys.readouterr()
    assert text.err == ""
    return str(text.out)


@pytest.mark.parametrize(
    "argv",
    [
        ["train.py"],
        ["-m", "pkg.train", "--lr", "1"],
        ["-n", "4", "--ranks", "0,3", "--bind", "--no-status", "train.py", *HARD],
        ["--hosts", "a:4,[::1]:2", "--min-ranks", "3", "--max-restarts", "2", "train.py", "-n", "4"],
        ["--hostfile", "hosts", "--engine", "intel", "--backend", "nccl", "train.py"],
        ["--timeout", "90", "--hang-timeout", "off", "--grace", "0.5", "--start-limit", "1e3", "train.py"],
        ["--log-dir", "logs", "--events", "e.jsonl", "--trace", "t", "--status", "train.py"],
        ["--set", "args.lr=0.1", "--set", "args.on=true", "--set", "args.a.b=[1, 2]", "train.py", "--lr", "2"],
        ["--set", "args.when=2026-11-21", "--set", "args.off=false", "--debug-rank", "1", "-n", "2", "train.py"],
    ],
)
def test_a_printed_job_is_the_same_job(argv: list[str], tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    Path("hosts").write_text("a:4\n")
    text = printed(argv, capsys)
    # A job file's paths count from its folder, which may be any.
    (tmp_path / "elsewhere").mkdir()
    Path("elsewhere/job.toml").write_text(text)
    again = cli.parse(["--config", "elsewhere/job.toml"])
    asked = cli.parse([str(tmp_path / word) if word in ("train.py", "logs", "e.jsonl", "t") else word for word in argv])
    assert again == engines.resolve_size(asked, {})
    assert printed(["--config", "elsewhere/job.toml"], capsys) == text


def test_a_printed_job_keeps_its_args(job_file: Any, capsys: Any) -> None:
    path = job_file('[launch]\nscript = "train.py"\n[args]\nlr = 0.1\n')
    text = printed(["--config", path, "--set", "args.lr=0.2", "--epochs", "3"], capsys)
    assert text.endswith("\n\n[args]\nlr = 0.2\n")
    assert 'args = ["--epochs", "3"]\n' in text


def test_what_toml_cannot_hold_is_refused(capsys: Any) -> None:
    assert cli.main(["--print-config", HERE, "\udcff"]) == 2
    assert capsys.readouterr().err == "ddp-launch: TOML cannot hold '\\udcff', which is not valid UTF-8\n"


def test_reading_toml_waits_until_there_is_some(run_job: Any) -> None:
    code = "import sys; from launcher import cli; cli.parse(['-n', '2', sys.argv[1]]); print(*sys.modules)"
    loaded = set(run_job([sys.executable, "-c", code, HERE]).stdout.split())
    assert "launcher.options" in loaded
    assert not loaded & {
        "tomllib",
        "tomli",
        "launcher.network",
        "difflib",
    }


def test_no_variable_of_the_environment_changes_a_job(monkeypatch: Any) -> None:
    class Watched(dict[str, str]):
        def __getitem__(self, name: str) -> str:
            pytest.fail(f"{name} was looked up")

        def get(self, name: str, default: Any = None) -> Any:
            if name.startswith("L"):
                return default  # LANGUAGE and LC_* of argparse's messages
            pytest.fail(f"{name} was looked up")

    monkeypatch.setattr(os, "environ", Watched())
    assert cli.parse(["-n", "2", HERE]).n == 2


def test_the_job_file_of_the_docs(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    docs = (Path(__file__).parents[2] / "docs" / "launcher.md").read_text()
    (tmp_path / "job.toml").write_text(docs.split("```toml\n")[1].split("```")[0])
    job = cli.parse(["--config", str(tmp_path / "job.toml")])
    assert job.args == ("--lr", "0.1", "--layers", "64", "10", "--verbose", "data")
    assert (job.size, job.hang_timeout, job.ranks) == (8, None, (0, 3))
