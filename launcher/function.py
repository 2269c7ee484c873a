"""`launcher.run`: calls a function on several ranks, for notebooks and tests.

The supervisor runs in a separate process, the driver. A notebook's kernel has many threads, so it must not be forked,
and its signals and standard streams must stay as they are. When the caller dies, the driver ends the ranks.
"""

from __future__ import annotations

import codecs
import os
import pickle
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, NoReturn, TypeVar

from collectives.errors import ROOT
from launcher.diagnosis.failures import Failure, NotStarted, RankFailed, TimeLimit, root_cause
from launcher.diagnosis.observer import Observer
from launcher.errors import RankError, UsageError
from launcher.function_worker import CALL, ENDING, ERROR, RESULT, load, pickler, store
from launcher.job import Job
from launcher.linux import die_with_parent, sweeping
from launcher.supervisor.supervisor import launch

T = TypeVar("T")

# What the driver runs. ROOT replaces the first entry of sys.path, which is the working folder: a module of the user
# there may shadow one of the launcher's. With PYTHONSAFEPATH sys.path has no such entry, and ROOT is only put in
# front.
_START = (
    "import sys; sys.path[: not getattr(sys.flags, 'safe_path', False)] = [sys.argv.pop(1)];"
    " from launcher.function import main; sys.exit(main(sys.argv[1:]))"
)
_CHUNK = 1 << 16
_NEEDS_CLOUDPICKLE = (
    "pickle cannot take {what} to the ranks: pip install cloudpickle, or define it in a module that they can import "
    "(and at its top level)"
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

    timeout: seconds, from the start of the launcher, after which the ranks are ended; None: no limit

    What ranks print appears on `sys.stdout` and `sys.stderr` of this process. `fn`, its arguments, results and
    exceptions are pickled. A function that pickle does not support (a lambda, a closure, a function of `__main__` or of
    a notebook) needs cloudpickle: `pip install cloudpickle`. May be called from any thread; Ctrl-C ends the ranks.

    Raises: the exception of the rank whose failure is the root cause, with a RankError as its `__cause__` that holds
        that rank's traceback; RankError if a rank ended in another way (killed, sys.exit), its exception cannot be
        pickled, or the job failed otherwise (it hung, an agent died); TimeoutError after `timeout`; UsageError if
        `nproc` or `timeout` is invalid, `fn` or its arguments cannot be pickled, or the ranks cannot be started (for
        example, there is no MPI for several ranks); KeyboardInterrupt after Ctrl-C.
    """
    if not isinstance(nproc, Integral) or nproc < 1:
        raise UsageError(f"the number of ranks must be an integer of at least 1, not {nproc!r}")
    if timeout is not None and not (isinstance(timeout, Real) and 0 < timeout < float("inf")):
        raise UsageError(f"the time limit must be a number of seconds above zero, not {timeout!r}")
    # Only this user can enter the folder (mode 0700): what it holds is unpickled and run.
    with tempfile.TemporaryDirectory(prefix="ddp-run-", ignore_cleanup_errors=True) as folder:
        store(folder, CALL, (sys.path, _module_of(fn), _pickle_call(fn, tuple(args), dict(kwargs or {}))))
        limit = "" if timeout is None else repr(float(timeout))
        _run_driver([sys.executable, "-c", _START, ROOT, folder, str(os.getpid()), str(int(nproc)), limit])
        return _load_results(folder, nproc)


def _pickle_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    library = pickler()
    what = f"{getattr(fn, '__qualname__', fn)} with its arguments"
    # pickle stores only a function's name. The rank's `__main__` is another module, without this function.
    if library is pickle and getattr(fn, "__module__", None) == "__main__":
        raise UsageError(_NEEDS_CLOUDPICKLE.format(what=what))
    try:
        call: bytes = library.dumps((fn, args, kwargs))
    except Exception as error:
        if library is pickle:
            raise UsageError(_NEEDS_CLOUDPICKLE.format(what=what)) from error
        raise UsageError(f"{what} cannot be taken to the ranks: {error}") from error
    return call


def _module_of(fn: Callable[..., Any]) -> tuple[str, str] | None:
    """Name and file of the function's module, which ranks may not find on their path.

    None for `__main__`, and for a module without a file.
    """
    module = sys.modules.get(getattr(fn, "__module__", None) or "__main__")
    file = getattr(module, "__file__", None)
    if module is None or not file or module.__name__ == "__main__":
        return None
    return module.__name__, file


def _load_results(folder: str, nproc: int) -> list[Any]:
    """The ranks' results. Raises: as `run`, if the call has failed."""
    try:
        rank, error = load(folder, ENDING)
    except FileNotFoundError:
        raise RankError("the launcher died") from None
    if rank is not None and os.path.exists(os.path.join(folder, ERROR.format(rank))):
        _raise(folder, rank, nproc)
    if error is not None:
        raise error
    results = []
    for rank in range(nproc):
        try:
            results.append(load(folder, RESULT.format(rank)))
        except FileNotFoundError:
            raise RankError(f"rank {rank} ended without a result (sys.exit in the function?)") from None
    return results


def _raise(folder: str, rank: int, nproc: int) -> NoReturn:
    """Raises the exception that a rank has stored, or a RankError if the exception cannot be unpickled."""
    summary, trace, pickled = load(folder, ERROR.format(rank))
    cause = RankError(f"rank {rank} of {nproc}:\n\n{trace}")
    try:
        error = pickle.loads(pickled)
        if sys.version_info >= (3, 11):
            error.add_note(f"raised on rank {rank} of {nproc}; its own traceback is above")
    except Exception:  # The exception was not pickled, or needs a module that does not exist here.
        raise RankError(f"rank {rank} raised {summary}") from cause
    raise error from cause


# -- the driver, seen from its caller


def _run_driver(command: Sequence[str]) -> None:
    """Runs the command to its end, and prints its output.

    Raises: KeyboardInterrupt, or an error of writing the output, after the command has ended.
    """
    # A session of its own: Ctrl-C on the terminal then signals this process only, which forwards it.
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        try:
            _copy_output(process)
        except BaseException:  # Ctrl-C was pressed, or sys.stdout cannot be written to.
            process.send_signal(signal.SIGINT)
            try:
                _copy_output(process)
            except KeyboardInterrupt:
                process.kill()  # The driver's reaper ends the ranks.
            except Exception:
                process.communicate()
            raise


def _copy_output(process: subprocess.Popen[bytes]) -> None:
    """Copies stdout and stderr of a process to `sys.stdout` and `sys.stderr`, perhaps a notebook's, until both end."""
    poll = select.poll()  # `select.select` takes no file descriptor above 1023.
    copies = {}
    for pipe, stream in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
        assert pipe is not None
        poll.register(pipe, select.POLLIN)
        copies[pipe.fileno()] = stream, codecs.getincrementaldecoder("utf-8")("replace")
    while copies:
        for fd, _ in poll.poll():
            data = os.read(fd, _CHUNK)
            stream, decoder = copies[fd]
            if stream is not None:
                stream.write(decoder.decode(data, final=not data))
                stream.flush()
            if not data:
                poll.unregister(fd)
                del copies[fd]


# -- the driver

# Seconds between asking the ranks to end and killing them. Short, because the caller waits for it after Ctrl-C.
_GRACE = 2.0


def main(argv: Sequence[str]) -> int:
    """Runs the driver. argv: the call's folder, the caller's pid, the number of ranks, the time limit (s) or "" """
    folder, parent, nproc, limit = argv
    # Background jobs of a shell may ignore SIGINT, and their child processes inherit that.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    die_with_parent(int(parent), signal.SIGTERM)
    observer = _FailureObserver()
    ending: tuple[int | None, Exception | None]
    with sweeping():
        try:
            job = Job(
                module="launcher.function_worker",
                args=(folder,),
                n=int(nproc),
                timeout=float(limit) if limit else None,
                grace=_GRACE,
            )
            code = launch(job, observers=[observer], explain=False)
            ending = observer.outcome(code)
        except UsageError as error:
            code = 2
            ending = (None, error)
    if os.getppid() != int(parent):
        shutil.rmtree(folder, ignore_errors=True)  # The caller has died.
    else:
        store(folder, ENDING, ending)
    return code


class _FailureObserver(Observer):
    """Records the failures of the job."""

    def __init__(self) -> None:
        self._failures: list[Failure] = []
        self._text = ""

    def failed(self, failure: Failure) -> None:
        self._failures.append(failure)

    def job_ended(self, code: int, text: str) -> None:
        self._text = text

    def outcome(self, code: int) -> tuple[int | None, Exception | None]:
        """The rank whose failure is the root cause, or None; and the error of the call, None if it succeeded."""
        if code == 0:
            return None, None
        if not self._failures:
            return None, RankError(self._text or f"the launcher ended with code {code}")
        first = root_cause(self._failures)
        text = self._text or str(first)
        if isinstance(first, TimeLimit):
            return None, TimeoutError(text)
        if isinstance(first, NotStarted) and first.code == 2:
            return None, UsageError(text)
        return first.rank if isinstance(first, RankFailed) else None, RankError(text)
