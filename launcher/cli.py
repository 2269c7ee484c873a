"""`ddp-launch`: from the command line to a job, and from a job's end to an exit code."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from launcher.errors import UsageError
from launcher.job import Job
from launcher.options import GPU, parser, split

_SWEEP_LIMIT = 1.0
# Of each pair the command line's takes back what the job file has of the other.
_RIVALS = {"script": "module", "module": "script", "hosts": "hostfile", "hostfile": "hosts"}


def read(argv: Sequence[str]) -> dict[str, Any]:
    """The options on the command line, and `rest`: SCRIPT ARGS..., or the arguments of a module or a configured job.

    >>> read(["-n", "4", "train.py", "-n", "7"])
    {'n': 4, 'rest': ['train.py', '-n', '7']}
    Raises: UsageError for an unknown option, or one without its value.
    """
    options, rest = split(argv)
    return {**vars(parser().parse_args(options)), "rest": rest}


def job_of(options: Mapping[str, Any]) -> Job:
    """The job of a command line that `read` has read, and of the job file in it.

    Raises: UsageError, in one sentence.
    """
    fields, words = dict(options), list(options["rest"])
    configured: dict[str, Any] = {}
    args: tuple[str, ...] = ()
    if "config" in fields:
        from launcher import config  # here, because reading TOML takes milliseconds

        configured, args = config.load(fields["config"])
    if words and not {"script", "module"} & (configured.keys() | fields.keys()):
        fields["script"], *words = words
    fields = {key: value for key, value in configured.items() if _RIVALS.get(key) not in fields} | fields
    for name in ("config", "rest"):
        fields.pop(name, None)
    if path := fields.pop("hostfile", None):
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
    """The job that a command line asks for. Raises: UsageError, in one sentence."""
    return job_of(read(argv))


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    try:
        options = read(sys.argv[1:] if argv is None else argv)
        if "help" in options or "version" in options:
            from collectives import __version__

            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # its reader may go, as `| head` does
            return _print(parser().format_help() if "help" in options else f"ddp-launch {__version__}\n", sys.stdout)
        if {"resize", "job"} & options.keys():
            return _resize(options)
        job = job_of(options)
        _note_ranks_behind_script(job)
        from launcher.engines import resolve_size  # here, because a wrong command line need not wait for it

        return _run(resolve_size(job, os.environ))
    except UsageError as error:
        from launcher.console.terminal import one_line

        _print(f"ddp-launch: {one_line(str(error))}\n", sys.stderr)  # if it can be; the exit code says it, too
        return 2


def _resize(options: dict[str, Any]) -> int:
    """Has a running job go on with another number of ranks; the exit code. Raises: UsageError"""
    if options.keys() != {"resize", "job", "rest"} or options["rest"]:
        raise UsageError("a running job gets another number of ranks by ddp-launch --resize N --job PID, and no more")
    from launcher.resize import resize  # here, because no job needs it

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends this command, without a traceback
    done, text = resize(options["job"], options["resize"])
    return _print(f"ddp-launch: {text}\n", sys.stdout if done else sys.stderr) or int(not done)


def _note_ranks_behind_script(job: Job) -> None:
    """Says that a number of ranks behind the script is an argument of it: other launchers read it anywhere."""
    for option, number in zip(job.args, job.args[1:], strict=False):
        if option in ("-n", "-np") and number.isdigit() and job.n is None and not job.hosts:
            target = job.script or f"-m {job.module}"
            _print(
                f"ddp-launch: {option} {number} behind {target} is an argument of it; for {number} ranks: "
                f"ddp-launch {option} {number} {target}\n",
                sys.stderr,
            )


def _print(text: str, stream: TextIO | None) -> int:
    """Prints a text; returns the exit code. stream: None if it is closed, where print would take stdout instead"""
    try:
        if stream is not None:
            print(text, end="", file=stream, flush=True)
        return 0
    except OSError as error:
        if stream is sys.stdout:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else Python would try once more at its end, and complain
            _print(f"ddp-launch: the output cannot be written: {error.strerror}\n", sys.stderr)
        return 1


def _run(job: Job) -> int:
    from launcher.linux import become_subreaper, childless, children_of, parents, sweep
    from launcher.supervisor.supervisor import launch

    began = time.time()
    # A parent that ignores it hands that down, and no child could be waited for.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # If the reaper is killed, its orphans come to this process; children from before its exec are not of this job.
    before = frozenset() if childless() else frozenset(children_of(parents(), os.getpid()))
    become_subreaper()
    try:
        return launch(job)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the job is over, and so is this process, in a moment
        sweep(_SWEEP_LIMIT, before, began)
