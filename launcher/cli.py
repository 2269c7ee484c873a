"""`ddp-launch`: reads the command line, runs the job that it describes, and returns the exit code."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from launcher.errors import UsageError
from launcher.job import Job
from launcher.options import GPU, parser, split

# Options that exclude each other. One on the command line overrides the other one in the job file.
_ALTERNATIVES = {"script": "module", "module": "script", "hosts": "hostfile", "hostfile": "hosts"}


def read(argv: Sequence[str]) -> dict[str, Any]:
    """The options on the command line. `rest`: SCRIPT ARGS..., or the arguments of a module or of a job file's script.

    >>> read(["-n", "4", "train.py", "-n", "7"])
    {'n': 4, 'rest': ['train.py', '-n', '7']}

    Raises: UsageError for an unknown option, or a missing or invalid value.
    """
    options, rest = split(argv)
    return {**vars(parser().parse_args(options)), "rest": rest}


def job_of(options: Mapping[str, Any]) -> Job:
    """The job that the options on the command line describe, together with the job file. options: from `read`

    Raises: UsageError, with a message of one sentence.
    """
    fields = dict(options)
    words = list(options["rest"])
    configured: dict[str, Any] = {}
    args: tuple[str, ...] = ()
    if "config" in fields:
        from launcher import config  # Imported late: most jobs have no job file.

        configured, args = config.load(fields["config"])
    if words and not {"script", "module"} & (configured.keys() | fields.keys()):
        fields["script"], *words = words
    fields = {key: value for key, value in configured.items() if _ALTERNATIVES.get(key) not in fields} | fields
    for name in ("config", "rest"):
        fields.pop(name, None)
    if path := fields.get("hostfile"):
        if "hosts" in fields:
            raise UsageError(f"give hosts or a hostfile, not both: {path}")
        from launcher.network import read_hostfile

        fields["hosts"] = read_hostfile(path)
    if fields.get("n") == GPU:
        if fields.get("hosts"):
            text = "give every host its number of ranks, as in --hosts a:8,b:8"
            raise UsageError(f"-n gpu counts the GPUs of this machine, not those of hosts: {text}")
        from launcher.placement import count_gpus

        fields["n"] = count_gpus()
    return Job(**fields, args=(*args, *words))


def parse(argv: Sequence[str]) -> Job:
    """The job that a command line describes. Raises: UsageError, with a message of one sentence."""
    return job_of(read(argv))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Returns: its exit code"""
    try:
        options = read(sys.argv[1:] if argv is None else argv)
        if "help" in options or "version" in options:
            from collectives import __version__

            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # The reader may end early, as `| head` does.
            return _print(parser().format_help() if "help" in options else f"ddp-launch {__version__}\n", sys.stdout)
        if {"resize", "job"} & options.keys():
            return _resize(options)
        job = job_of(options)
        _note_ranks_behind_script(job)
        return _run(job)
    except UsageError as error:
        from launcher.console.terminal import one_line

        _print(f"ddp-launch: {one_line(str(error))}\n", sys.stderr)
        return 2


def _resize(options: dict[str, Any]) -> int:
    """Asks a running job to continue with another number of ranks. Returns: the exit code. Raises: UsageError"""
    if options.keys() != {"resize", "job", "rest"} or options["rest"]:
        raise UsageError(
            "--resize and --job go together, without a script or other options: ddp-launch --resize N --job PID"
        )
    from launcher.resize import resize  # Imported late: starting a job does not need it.

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends this command without a traceback.
    done, text = resize(options["job"], options["resize"])
    return _print(f"ddp-launch: {text}\n", sys.stdout if done else sys.stderr) or int(not done)


def _note_ranks_behind_script(job: Job) -> None:
    """Warns of a `-n N` after the script if the number of ranks is not given otherwise.

    Such a `-n` is an argument of the script, but may be meant as the number of ranks.
    """
    for option, number in zip(job.args, job.args[1:], strict=False):
        if option in ("-n", "-np") and number.isdigit() and job.n is None and not job.hosts:
            target = job.script or f"-m {job.module}"
            _print(
                f"ddp-launch: {option} {number} behind {target} is an argument of it; for {number} ranks: "
                f"ddp-launch {option} {number} {target}\n",
                sys.stderr,
            )


def _print(text: str, stream: TextIO | None) -> int:
    """Prints a text. Returns: the exit code. stream: None if it is closed: then nothing is printed"""
    try:
        if stream is not None:
            print(text, end="", file=stream, flush=True)
        return 0
    except OSError as error:
        if stream is sys.stdout:
            # Otherwise Python would flush stdout at its exit, and report the same error.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            _print(f"ddp-launch: the output cannot be written: {error.strerror}\n", sys.stderr)
        return 1


def _run(job: Job) -> int:
    from launcher.linux import sweeping
    from launcher.supervisor.supervisor import launch

    with sweeping():  # If the reaper is killed, its orphans come to this process.
        return launch(job)
