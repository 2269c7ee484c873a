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
from types import ModuleType, TracebackType

from collectives.world import report, supervised
from launcher.errors import StartError
from launcher.linux import working_folder

TYPE_CHECKING = False  # not of `typing`, whose import would cost every agent a tenth of its memory
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from typing import Any, NoReturn

#: In place of a script: the program to run is on the standard input, or is no Python at all.
STDIN, NO_PYTHON = "-", "--no-python"

#: At this signal a rank writes its Python stacks; a real-time one, far from those that libraries take: SIGUSR1 and
#: SIGUSR2 are the user's.
STACKS = signal.SIGRTMAX - 3
#: Of the memory that they are written to.
STACKS_NAME = "ddp-stacks"

# Characters. More would only scroll away what matters: the beginning says where it was, the end names the error.
_TRACEBACK_LIMIT, _MESSAGE_LIMIT = 1 << 16, 1 << 12


def run(target: Sequence[str], stacks: int, mask: Iterable[int] = ()) -> NoReturn:
    """Runs `SCRIPT ARGS...`, `-m MODULE ARGS...` or `--no-python PROGRAM ARGS...`; ends the way a Python program does.

    A script may be whatever `python SCRIPT` takes: a file, also a compiled one, a folder or a zip file that has a
    `__main__.py`, or `-`, the standard input.

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
    if target[0] == NO_PYTHON:
        _become(target[1:])
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    sys.argv[:] = list(target)
    if target[0] == "-m":
        code = _load_module(main, target[1])
    elif target[0] == STDIN:
        _begin_path("")
        code = compile(sys.stdin.buffer.read(), "<stdin>", "exec", dont_inherit=True)
    else:
        code = _load_script(main, os.path.join(working_folder(), target[0]))
    exec(code, main.__dict__)


def _become(command: Sequence[str]) -> NoReturn:
    """Replaces this process by a program. Raises: StartError if it cannot be run."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and programs would inherit that
        signal.signal(number, signal.SIG_DFL)
    import shutil  # here, because agents have no use for it

    program = shutil.which(command[0])  # `os.execvp` would report a folder of PATH that may not be searched
    if program is None:
        raise StartError(f"there is no program {command[0]} that can be run")
    try:
        os.execv(program, [*command])
    except OSError as error:
        raise StartError(f"the program {command[0]} cannot be run: {error.strerror}") from None


def _begin_path(*folders: str) -> None:
    """Puts the folder of the script, or of `-m`, where the agent has put ours, or nothing with PYTHONSAFEPATH."""
    sys.path[:1] = [] if getattr(sys.flags, "safe_path", False) else folders


def _load_script(main: ModuleType, path: str) -> Any:
    """The code that `python path` runs in `main`. Raises: ImportError if another version of Python has compiled it."""
    from importlib.machinery import PathFinder, SourcelessFileLoader  # here, because agents have no use for it

    if spec := PathFinder.find_spec("__main__", [path]):  # it is a folder or a zip file
        sys.path[:1] = [path]
        return _describe(main, spec).get_code("__main__")
    _begin_path(os.path.dirname(os.path.realpath(path)))
    main.__file__ = path
    if path.endswith(".pyc"):
        return SourcelessFileLoader("__main__", path).get_code("__main__")
    with io.open_code(path) as file:
        source = file.read()
    return compile(source, path, "exec", dont_inherit=True)


def _load_module(main: ModuleType, name: str) -> Any:
    """The code that `python -m name` runs in `main`. Raises: StartError if there is none."""
    import runpy

    # The working folder comes first, and is there before the module is looked for.
    sys.argv[:2] = ["-m"]
    _begin_path(*filter(None, [working_folder()]))  # it may have been removed, and Python does without it, too
    # What `python -m` itself asks; the public functions of runpy take the module away again before exit handlers run.
    _, spec, code = runpy._get_module_details(name, StartError)  # type: ignore[attr-defined]
    _describe(main, spec)
    sys.argv[0] = getattr(main, "__file__", "-m")
    return code


def _describe(main: ModuleType, spec: ModuleSpec) -> Any:
    """Sets the attributes of `main` that follow from its module spec, and returns its loader."""
    main.__spec__, main.__loader__, main.__package__ = spec, spec.loader, spec.parent
    if spec.origin is not None:
        main.__file__ = spec.origin
    return spec.loader


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
