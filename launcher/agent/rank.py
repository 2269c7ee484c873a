"""Runs the user's script in the forked rank as `python SCRIPT` would, and reports exceptions and exit codes.

A rank is a fork of its agent, so the interpreter does not start a second time. The script finds what a new interpreter
would give it: `__main__` is a new module, `sys.argv` and `sys.path` are as usual, tracebacks begin in the user's code.
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

TYPE_CHECKING = False  # Not from `typing`, whose import would cost every agent 0.3 to 0.5 MB.
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from typing import Any, NoReturn

#: Given in place of a script: the script is read from the standard input.
STDIN = "-"
#: Given in front of a program that is not Python.
NO_PYTHON = "--no-python"

#: The signal at which a rank writes its Python stacks: a real-time signal that libraries hardly use. SIGUSR1 and
#: SIGUSR2 are left to the user.
STACKS = signal.SIGRTMAX - 3
#: Name of the memory that the stacks are written to.
STACKS_NAME = "ddp-stacks"

# Maximum number of characters of a traceback, and of an exception's message. The middle is left out: the
# beginning says where the error happened, the end names it.
_TRACEBACK_LIMIT = 1 << 16
_MESSAGE_LIMIT = 1 << 12


def run(target: Sequence[str], stacks: int, mask: Iterable[int] = ()) -> NoReturn:
    """Runs `SCRIPT ARGS...`, `-m MODULE ARGS...` or `--no-python PROGRAM ARGS...`, and exits as Python would.

    A script is anything that `python SCRIPT` takes: a source file, a compiled file, a folder or a zip file with a
    `__main__.py`, or `-`, the standard input.

    stacks: file descriptor to which all threads' Python stacks are written at the signal STACKS
    mask: the signal mask to set when the script begins; from then on Ctrl-C can interrupt the rank

    An uncaught exception, or an exit status other than 0, is reported before exit handlers run. Exit handlers inform
    the other ranks, whose errors must not be reported first. A module or program that cannot be run is reported as
    wrong use, because the user's code has not failed.

    Raises: SystemExit, unless a program has replaced this process.
    """
    rank_pid = os.getpid()
    reported = False
    # The handler is written in C: it also runs while C code holds the GIL, or never returns to Python.
    faulthandler.register(STACKS, file=stacks, all_threads=True, chain=False)

    def report_exception(cls: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        nonlocal reported
        if os.getpid() != rank_pid:  # It is a child that the script has forked.
            sys.__excepthook__(cls, error, trace)
        elif not reported:
            reported = True
            report(raised={"type": _type_name(error), "message": _message(error), "traceback": _format(error, trace)})

    if not os.environ.get("PYTHONBREAKPOINT"):  # Else the user has chosen a debugger.
        sys.breakpointhook = _breakpoint
    # In the rank the hook prints nothing: at the end of the job the launcher prints one traceback, that of the failure
    # that caused the others. A hook that is set later, such as that of `collectives`, calls this one.
    sys.excepthook = report_exception
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        _execute(target)
        status = 0
    except SystemExit as exit_:
        status = _exit_status(exit_.code)
    except KeyboardInterrupt:
        status = 130
    except StartError as error:
        status = 2
        reported = True
        report(refused=str(error))
    except BaseException as error:
        status = 1
        trace = _user_frames(error.__traceback__)
        error.__traceback__ = trace
        report_exception(type(error), error, trace)
        if sys.excepthook not in (report_exception, None):  # None: the interpreter is shutting down.
            sys.excepthook(type(error), error, trace)
    if status & 0xFF and not reported:
        report(leaving=status & 0xFF)
    _ignore_interrupts()
    # `sys.exit` is looked up now: a library that must know the status before the program ends may have replaced it.
    sys.exit(status)


def _breakpoint(*args: Any, **kwargs: Any) -> Any:
    """`breakpoint()`: the launcher's debugger in a rank, Python's own in a process that a rank has forked."""
    if supervised():
        from launcher.debugger import stop_at  # Imported late, because it imports much.

        stop_at(sys._getframe(1), *args, **kwargs)
    else:
        import pdb

        pdb.Pdb().set_trace(sys._getframe(1))


def _ignore_interrupts() -> None:
    """Makes Python print no traceback for Ctrl-C from now on, while it only waits for threads and cleans up."""
    print_unraisable = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            print_unraisable(unraisable)

    sys.unraisablehook = hook


def _execute(target: Sequence[str]) -> None:
    if target[0] == NO_PYTHON:
        _exec_program(target[1:])
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    sys.argv[:] = list(target)
    if target[0] == "-m":
        code = _load_module(main, target[1])
    elif target[0] == STDIN:
        _set_first_path("")
        code = compile(sys.stdin.buffer.read(), "<stdin>", "exec", dont_inherit=True)
    else:
        code = _load_script(main, os.path.join(working_folder(), target[0]))
    exec(code, main.__dict__)


def _exec_program(command: Sequence[str]) -> NoReturn:
    """Replaces this process by a program. Raises: StartError if it cannot be run."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and the program would inherit that.
        signal.signal(number, signal.SIG_DFL)
    import shutil  # Imported late, because agents have no use for it.

    # `os.execvp` would report a folder on PATH that may not be searched, instead of the missing program.
    program = shutil.which(command[0])
    if program is None:
        raise StartError(f"there is no program {command[0]} that can be run")
    try:
        os.execv(program, [*command])
    except OSError as error:
        raise StartError(f"the program {command[0]} cannot be run: {error.strerror}") from None


def _set_first_path(*folders: str) -> None:
    """Replaces the first entry of sys.path, which the agent has set, by `folders`; with PYTHONSAFEPATH, removes it."""
    sys.path[:1] = [] if getattr(sys.flags, "safe_path", False) else folders


def _load_script(main: ModuleType, path: str) -> Any:
    """The code that `python path` runs in `main`.

    Raises: OSError or SyntaxError, as Python would; ImportError if another version of Python has compiled the file.
    """
    # Imported late, because agents have no use for it.
    from importlib.machinery import PathFinder, SourcelessFileLoader

    if spec := PathFinder.find_spec("__main__", [path]):  # It is a folder or a zip file.
        sys.path[:1] = [path]
        return _set_spec(main, spec).get_code("__main__")
    _set_first_path(os.path.dirname(os.path.realpath(path)))
    main.__file__ = path
    if path.endswith(".pyc"):
        return SourcelessFileLoader("__main__", path).get_code("__main__")
    with io.open_code(path) as file:
        source = file.read()
    return compile(source, path, "exec", dont_inherit=True)


def _load_module(main: ModuleType, name: str) -> Any:
    """The code that `python -m name` runs in `main`.

    Raises: StartError if there is no such module, or it has no code to run; what a package's `__init__` raises.
    """
    import runpy

    # The working folder comes first, and is on the path before the module is searched.
    sys.argv[:2] = ["-m"]
    _set_first_path(*filter(None, [working_folder()]))  # Left out, as Python does, if the folder has been removed.
    # `python -m` calls the same function. The public functions of runpy remove the module before exit handlers run.
    _, spec, code = runpy._get_module_details(name, StartError)  # type: ignore[attr-defined]
    _set_spec(main, spec)
    sys.argv[0] = getattr(main, "__file__", "-m")
    return code


def _set_spec(main: ModuleType, spec: ModuleSpec) -> Any:
    """Sets the attributes of `main` that follow from its module spec, and returns its loader."""
    main.__spec__ = spec
    main.__loader__ = spec.loader
    main.__package__ = spec.parent
    if spec.origin is not None:
        main.__file__ = spec.origin
    return spec.loader


def _exit_status(code: object) -> int:
    """The exit status of a Python program that calls `sys.exit(code)`. Prints a code other than an int or None."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code
    try:
        print(code, file=sys.stderr)
    except OSError:
        pass  # stderr is closed; the status stays the same.
    return 1


def _user_frames(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without its first frames, those of this module.

    None if no user code has run, because the script could not be loaded.
    """
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    if trace is not None and trace.tb_frame.f_code.co_filename.startswith("<frozen importlib"):
        return None
    return trace


def _type_name(error: BaseException) -> str:
    cls = type(error)
    if cls.__module__ in ("builtins", "__main__"):
        return cls.__qualname__
    return f"{cls.__module__}.{cls.__qualname__}"


def _message(error: BaseException) -> str:
    try:
        return _truncate(str(error), _MESSAGE_LIMIT)
    except Exception:  # A broken __str__ must not hide the error.
        return "(its message cannot be shown)"


def _format(error: BaseException, trace: TracebackType | None) -> str:
    try:
        import traceback

        text = "".join(traceback.format_exception(type(error), error, trace))
    except Exception:  # Memory or file descriptors may have run out. Python's own hook needs less, and no import.
        sys.__excepthook__(type(error), error, trace)
        return ""
    return _truncate(text, _TRACEBACK_LIMIT)


def _truncate(text: str, limit: int) -> str:
    """Shortens a text of more than `limit` characters to its beginning, the number left out, and its end."""
    half = limit // 2
    if len(text) <= limit:
        return text
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"


def quote_colons(args: Sequence[str]) -> list[str]:
    """The same arguments, safe to pass through an engine, for which a lone colon begins a second program.

    >>> quote_colons(["a:b", ":", "::"])
    ['a:b', '::', ':::']
    """
    return [arg + ":" if arg and not arg.strip(":") else arg for arg in args]


def unquote_colons(args: Sequence[str]) -> list[str]:
    """Undoes `quote_colons`."""
    return [arg[:-1] if arg and not arg.strip(":") else arg for arg in args]
