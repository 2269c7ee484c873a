"""`launcher.run`: calls a function on several ranks, for notebooks and tests.

The supervisor runs in a process of its own, the driver. A notebook's kernel has many threads, and must neither be
forked nor have its signals or standard streams changed; and when the caller dies, the driver ends the ranks.
"""

from __future__ import annotations

import codecs
import io
import os
import pickle
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NoReturn, TextIO, TypeVar

from launcher.diagnosis.failures import Failure, NotStarted, RankFailed, TimeLimit, root_cause
from launcher.diagnosis.observer import Observer
from launcher.errors import RankError, UsageError
from launcher.function_worker import CALL, ENDING, ERROR, RESULT, pickler
from launcher.job import Job
from launcher.linux import become_subreaper, die_with_parent, sweep
from launcher.supervisor.supervisor import launch

T = TypeVar("T")

# The first entry of sys.path is the working folder, in which a user may have a module called as one of ours; with
# PYTHONSAFEPATH it is missing, and what comes first is the user's.
_START = (
    "import sys; sys.path[: not getattr(sys.flags, 'safe_path', False)] = [sys.argv.pop(1)];"
    " from launcher.function import main; sys.exit(main(sys.argv[1:]))"
)
_CHUNK = 1 << 16
_NEEDS_CLOUDPICKLE = (
    "{what} cannot be taken to the ranks by pickle: pip install cloudpickle, or define it in a module that they can "
    "import (and at its top level)"
)


def run(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    nproc: int = 2,
    *,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float | None = None,
) -> list[T]:
    """Calls `fn(*args, **kwargs)` on `nproc` ranks, each a process, and returns their results in rank order.

    timeout: seconds for the whole; None: no limit
    What ranks print comes out at `sys.stdout` and `sys.stderr` of this process. `fn`, its arguments, results and
    exceptions travel by pickle: the ranks of one job trust each other. A function that pickle cannot take (a lambda,
    a closure, one of `__main__` or of a notebook) needs cloudpickle: `pip install cloudpickle`. May be called from
    any thread; Ctrl-C ends the ranks.

    Raises: what the first failing rank raised, with that rank's traceback as its `__cause__`; RankError if a rank
    ended otherwise (killed, sys.exit), or raised what cannot be pickled; TimeoutError; UsageError if there is no MPI,
    or `fn` cannot be taken to the ranks.
    """
    if nproc < 1:
        raise UsageError(f"the number of ranks must be at least 1, not {nproc}")
    if timeout is not None and not 0 < timeout < float("inf"):
        raise UsageError(f"the time limit must be a number of seconds above zero, not {timeout}")
    # A folder that only this user can look into (0700): what lies in it is run.
    with tempfile.TemporaryDirectory(prefix="ddp-run-", ignore_cleanup_errors=True) as folder:
        with open(os.path.join(folder, CALL), "wb") as file:
            _write_call(file, fn, tuple(args), dict(kwargs or {}))
        root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        limit = "" if timeout is None else repr(float(timeout))
        _follow([sys.executable, "-c", _START, root, folder, str(os.getpid()), str(nproc), limit])
        return _results(folder, nproc)


# -- what travels


def _write_call(file: Any, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    by = pickler()
    call = io.BytesIO()
    try:
        (_Plain(call, protocol=5) if by is pickle else by.CloudPickler(call, protocol=5)).dump((fn, args, kwargs))
    except UsageError:
        raise
    except Exception as error:
        what = f"{getattr(fn, '__qualname__', fn)} with its arguments"
        if by is pickle:
            raise UsageError(_NEEDS_CLOUDPICKLE.format(what=what)) from error
        raise UsageError(f"{what} cannot be taken to the ranks: {error}") from error
    home = sys.modules.get(getattr(fn, "__module__", None) or "")
    pickle.dump((sys.path, _found_at(home), call.getvalue()), file, protocol=5)


class _Plain(pickle.Pickler):
    """Refuses what a rank would look for in vain: its `__main__` is another."""

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, (type, type(_found_at))) and thing.__module__ == "__main__":
            raise UsageError(_NEEDS_CLOUDPICKLE.format(what=f"{thing.__qualname__}, which is defined in __main__,"))
        return NotImplemented


def _found_at(module: ModuleType | None) -> tuple[str, str] | None:
    """Name and file of a module that is not `__main__`: a test's module may be on no path."""
    file = getattr(module, "__file__", None)
    return (module.__name__, file) if module is not None and file and module.__name__ != "__main__" else None


def _results(folder: str, nproc: int) -> list[Any]:
    try:
        with open(os.path.join(folder, ENDING), "rb") as file:
            kind, rank, text = pickle.load(file)
    except FileNotFoundError:
        kind, rank, text = "failed", None, "the launcher died"
    if kind == "wrong use":
        raise UsageError(text)
    if kind == "late":
        raise TimeoutError(text)
    if rank is not None and os.path.exists(path := os.path.join(folder, ERROR.format(rank))):
        _raise(path, rank, nproc)
    if kind == "failed":
        raise RankError(text)
    results = []
    for rank in range(nproc):
        try:
            with open(os.path.join(folder, RESULT.format(rank)), "rb") as file:
                results.append(pickle.load(file))
        except FileNotFoundError:
            raise RankError(f"rank {rank} ended without a result (sys.exit in the function?)") from None
    return results


def _raise(path: str, rank: int, nproc: int) -> NoReturn:
    with open(path, "rb") as file:
        words, trace, pickled = pickle.load(file)
    cause = RankError(f"rank {rank} of {nproc}:\n\n{trace}")
    try:
        error = pickle.loads(pickled)
    except Exception:  # none was sent, or what it is made of is not here
        error = None
    if not isinstance(error, BaseException):
        raise RankError(f"rank {rank} raised {words}") from cause
    if sys.version_info >= (3, 11):
        error.add_note(f"raised on rank {rank} of {nproc}; its own traceback is above")
    raise error from cause


# -- the launcher's process, and what ranks print


def _follow(command: Sequence[str]) -> None:
    """Runs the command to its end, passing on what it prints. Raises: KeyboardInterrupt, when it has ended."""
    streams = [
        (_own(sys.stdout, sys.__stdout__, 1), sys.stdout),
        (_own(sys.stderr, sys.__stderr__, 2), sys.stderr),
    ]
    for own, stream in streams:
        if own:
            stream.flush()  # what was printed before comes before
    # In a session of its own: a Ctrl-C on the terminal comes to this process alone, which passes it on.
    process = subprocess.Popen(
        command,
        # A debugger in a rank reads from the terminal, if there is one.
        stdin=None if _at_a_terminal() else subprocess.DEVNULL,
        stdout=None if streams[0][0] else subprocess.PIPE,
        stderr=None if streams[1][0] else subprocess.PIPE,
        start_new_session=True,
    )
    pipes = {pipe.fileno(): _Printer(stream) for pipe, (_, stream) in _pipes(process, streams)}
    interrupt: BaseException | None = None
    while True:
        try:
            _pass_on(process, pipes)
            break
        except BaseException as error:  # Ctrl-C, or sys.stdout.write has raised: the second time it is killed at once
            if interrupt is not None and isinstance(error, Exception):
                process.kill()  # it cannot be followed any more; its reaper ends the ranks
                process.wait()
                break
            interrupt = interrupt or error
            process.send_signal(signal.SIGINT)
    for pipe, _ in _pipes(process, streams):
        pipe.close()
    if interrupt is not None:
        raise interrupt


def _pipes(process: subprocess.Popen[bytes], streams: Sequence[tuple[bool, TextIO]]) -> list[tuple[Any, Any]]:
    return [(pipe, each) for pipe, each in zip((process.stdout, process.stderr), streams, strict=True) if pipe]


def _pass_on(process: subprocess.Popen[bytes], pipes: dict[int, _Printer]) -> None:
    while pipes:
        poll = select.poll()  # and not `select`, which takes no file descriptor above 1023
        for fd in pipes:
            poll.register(fd, select.POLLIN)
        for fd, _ in poll.poll():
            data = os.read(fd, _CHUNK)
            (pipes[fd] if data else pipes.pop(fd)).print(data)
    process.wait()


class _Printer:
    """Writes bytes that are UTF-8, cut anywhere, to a stream of text."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def print(self, data: bytes) -> None:
        """data: b"" at the end"""
        text = self._decode(data, final=not data)
        if self._stream is not None:
            try:
                self._stream.write(text)
                self._stream.flush()
            except Exception:
                self._stream = None  # once is enough
                raise


def _own(stream: TextIO | None, original: TextIO | None, fd: int) -> bool:
    """True if that file descriptor is where the stream goes; not so in a notebook, or under pytest."""
    try:
        return stream is not None and stream is original and stream.fileno() == fd
    except (OSError, ValueError):  # closed, or not a file
        return False


def _at_a_terminal() -> bool:
    return _own(sys.stdin, sys.__stdin__, 0) and _own(sys.stdout, sys.__stdout__, 1) and os.isatty(0)


# A caller that ends the call does not wait long (s).
_GRACE = 2.0
_SWEEP_LIMIT = 1.0


def main(argv: Sequence[str]) -> int:
    """FOLDER PARENT NPROC LIMIT: of the call, the caller's pid, the number of ranks, seconds or nothing."""
    folder, parent, nproc, limit = argv[0], int(argv[1]), int(argv[2]), float(argv[3]) if argv[3] else None
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a caller that ignores it hands that down
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a background job's child ignores it, and could not be ended by it
    die_with_parent(parent, signal.SIGTERM)
    become_subreaper()
    listener = _Listener()
    try:
        job = Job(module="launcher.function_worker", args=(folder,), n=nproc, timeout=limit, grace=_GRACE)
        code = launch(job, observers=[listener], explain=False)
        ending = listener.outcome(code)
    except UsageError as error:
        code, ending = 2, ("wrong use", None, str(error))
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the job is over, and so is this process, in a moment
        sweep(_SWEEP_LIMIT)
    if os.getppid() != parent:
        shutil.rmtree(folder, ignore_errors=True)  # the caller has gone
    else:
        with open(os.path.join(folder, ENDING), "wb") as file:
            pickle.dump(ending, file)
    return code


class _Listener(Observer):
    """Hears what went wrong, and on which rank."""

    def __init__(self) -> None:
        self._failures: list[Failure] = []
        self._text = ""

    def failed(self, failure: Failure) -> None:
        self._failures.append(failure)

    def job_ended(self, code: int, text: str) -> None:
        self._text = text

    def outcome(self, code: int) -> tuple[str, int | None, str]:
        """How it ended ("well", "late", "wrong use" or "failed"), the rank to blame if one is, and a sentence."""
        if code == 0:
            return "well", None, ""
        if not self._failures:
            return "failed", None, self._text or f"the launcher ended with code {code}"
        first = root_cause(self._failures)
        kind = "late" if isinstance(first, TimeLimit) else "failed"
        if isinstance(first, NotStarted) and first.code == 2:
            kind = "wrong use"
        return kind, first.rank if isinstance(first, RankFailed) else None, self._text or str(first)
