"""Runs the user's script in the forked rank as `python SCRIPT` would, and reports exceptions and exit codes.

The agent forks before anything is imported, so a rank costs no second interpreter start. The script sees nothing of
this: `__main__` is a module of its own, `sys.argv` and `sys.path` are as usual, tracebacks begin in the user's code.
"""

from __future__ import annotations

import builtins
import faulthandler
import io
import os
import signal
import sys
from collections.abc import Iterable, Sequence
from types import CodeType, ModuleType, TracebackType

from collectives.world import report, supervised
from launcher.errors import StartError
from launcher.linux import working_folder

TYPE_CHECKING = False  # not of `typing`, whose import would cost every agent a tenth of its memory
if TYPE_CHECKING:
    from typing import Any, NoReturn

#: At this signal a rank writes its Python stacks; a real-time one, far from those that libraries take: SIGUSR1 and
#: SIGUSR2 are the user's.
STACKS = signal.SIGRTMAX - 3
#: Of the memory that they are written to.
STACKS_NAME = "ddp-stacks"

# Characters. More would only scroll away what matters: the beginning says where it was, the end names the error.
_TRACEBACK_LIMIT, _MESSAGE_LIMIT = 1 << 16, 1 << 12


def run(target: Sequence[str], stacks: int, mask: Iterable[int] = ()) -> NoReturn:
    """Runs `SCRIPT ARGS...` or `-m MODULE ARGS...`; ends the way a Python program does.

    stacks: file descriptor to which all threads' Python stacks are written at the signal STACKS
    mask: of signals, from the moment on at which an interruption is the script's

    An uncaught exception or an exit status is reported before exit handlers run: in these the other ranks learn of it,
    and their errors must not be reported first.

    A module that cannot be run is wrong use, and reported as such: no code of the user's has failed.

    Raises: SystemExit, always
    """
    me = os.getpid()
    reported = False
    # In C, in the signal's own handler: whatever holds the GIL or never returns to Python cannot keep it from that.
    faulthandler.register(STACKS, file=stacks, all_threads=True, chain=False)

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        nonlocal reported
        if os.getpid() != me:  # a child that the script forked is not the rank
            sys.__excepthook__(kind, error, trace)
        elif not reported:
            reported = True
            report(raised={"type": _type_name(error), "message": _message(error), "traceback": _format(error, trace)})

    if not os.environ.get("PYTHONBREAKPOINT"):  # else the user has chosen a debugger
        sys.breakpointhook = _breakpoint
    # The launcher prints tracebacks, so that the first one comes once, and last. Hooks set later call this one in turn.
    sys.excepthook = tell
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        _execute(target)
        status = 0
    except SystemExit as exit_:
        status = _status(exit_.code)
    except KeyboardInterrupt:
        status = 130
    except StartError as words:
        status, reported = 2, True
        report(refused=str(words))
    except BaseException as error:
        status = 1
        error.__traceback__ = trace = _users_part(error.__traceback__)
        tell(type(error), error, trace)
        if sys.excepthook not in (tell, None):  # None is what an interpreter leaves behind that is being torn down
            sys.excepthook(type(error), error, trace)
    if status & 0xFF and not reported:
        report(leaving=status & 0xFF)
    _hush()
    # Looked up now: who must know a program's status before it ends has replaced it.
    sys.exit(status)


def _breakpoint(*args: Any, **kwargs: Any) -> Any:
    """`breakpoint()`: the launcher's debugger, or Python's own in a process that is no rank but was forked by one."""
    if supervised():
        from launcher.debugger import stop_at  # here, because it imports much

        stop_at(sys._getframe(1), *args, **kwargs)
    else:
        import pdb

        pdb.Pdb().set_trace(sys._getframe(1))


def _hush() -> None:
    """Silences Ctrl-C from here on: Python only waits for threads and cleans up, and its end is no error."""
    shown = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            shown(unraisable)

    sys.unraisablehook = hook


def _execute(target: Sequence[str]) -> None:
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    if target[0] == "-m":
        # As `python -m`: the working folder comes first, and is there before the module is looked for.
        sys.argv[:] = ["-m", *target[2:]]
        _begin_path(working_folder())
        code = load_module(target[1], main)
    else:
        sys.argv[:] = list(target)
        _begin_path(os.path.dirname(os.path.realpath(target[0])))
        main.__file__ = os.path.abspath(target[0])
        with io.open_code(main.__file__) as file:
            source = file.read()
        sys.modules["__main__"] = main
        code = compile(source, main.__file__, "exec", dont_inherit=True)
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def _begin_path(folder: str) -> None:
    """Puts the folder of the script, or of `-m`, where the agent has put ours, or nothing with PYTHONSAFEPATH."""
    # "": it has been removed, and Python does without it, too.
    sys.path[:1] = [folder] if folder and not getattr(sys.flags, "safe_path", False) else []


def load_module(name: str, main: ModuleType) -> CodeType:
    """The code that `python -m name` runs in `main`. Raises: StartError if there is none."""
    import runpy

    # What `python -m` itself asks; the public functions of runpy take the module away again before exit handlers run.
    _, spec, code = runpy._get_module_details(name, StartError)  # type: ignore[attr-defined]
    main.__spec__, main.__loader__, main.__package__ = spec, spec.loader, spec.parent
    if spec.origin is not None:
        main.__file__ = sys.argv[0] = spec.origin
    return code


def _status(code: object) -> int:
    """What Python makes of `sys.exit(code)`."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code
    try:
        print(code, file=sys.stderr)
    except OSError:
        pass  # stderr is closed; the status remains
    return 1


def _users_part(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame on that is not of this module."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    if trace is not None and trace.tb_frame.f_code.co_filename.startswith("<frozen importlib"):
        return None  # the module was not found, and none of the user's code ran
    return trace


def _type_name(error: BaseException) -> str:
    kind = type(error)
    if kind.__module__ in ("builtins", "__main__"):
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def _message(error: BaseException) -> str:
    try:
        return _shortened(str(error), _MESSAGE_LIMIT)
    except Exception:  # a broken __str__ must not hide the error
        return "(its message cannot be shown)"


def _format(error: BaseException, trace: TracebackType | None) -> str:
    try:
        import traceback

        text = "".join(traceback.format_exception(type(error), error, trace))
    except Exception:  # memory, file descriptors or the import itself may have failed: Python's own printer needs none
        sys.__excepthook__(type(error), error, trace)
        return ""
    return _shortened(text, _TRACEBACK_LIMIT)


def _shortened(text: str, limit: int) -> str:
    """The beginning and the end of a text that has more characters than `limit`."""
    half = limit // 2
    if len(text) <= limit:
        return text
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"


def quote_colons(args: Sequence[str]) -> list[str]:
    """The same arguments, safe to pass through an engine: a lone colon would begin a second program.

    >>> quote_colons(["a:b", ":", "::"])
    ['a:b', '::', ':::']
    """
    return [arg + ":" if arg and not arg.strip(":") else arg for arg in args]


def unquote_colons(args: Sequence[str]) -> list[str]:
    """Undoes `quote_colons`."""
    return [arg[:-1] if arg and not arg.strip(":") else arg for arg in args]
