"""Function worker: a rank of `launcher.run`. Loads the function, calls it, and stores the result or the exception."""

from __future__ import annotations

import importlib
import os
import pickle
import sys
import traceback
from typing import Any

#: Names of the files in the folder of a call: the function with its arguments, the result of a rank, the exception of a
#: rank, and how the job ended.
CALL = "call"
RESULT = "result-{}"
ERROR = "error-{}"
ENDING = "ending"


def pickler() -> Any:
    """The module cloudpickle, or pickle if that is not installed; both have `dumps` and `dump`."""
    try:
        return importlib.import_module("cloudpickle")
    except ImportError:
        return pickle


def load(folder: str, name: str) -> Any:
    """The object in a file of the folder. Raises: FileNotFoundError"""
    with open(os.path.join(folder, name), "rb") as file:
        return pickle.load(file)


def store(folder: str, name: str, value: Any, library: Any = pickle) -> None:
    """Stores an object as a whole or not at all: the process may be killed at any moment. library: see `pickler`"""
    path = os.path.join(folder, name)
    with open(path + ".part", "wb") as file:
        library.dump(value, file, protocol=5)
    os.rename(path + ".part", path)


def main(folder: str) -> None:
    """Runs one rank. folder: of the call, written by `launcher.function`

    Raises: what the function raises; or the error of unpickling the call, or of pickling the result.
    """
    rank = os.environ["RANK"]
    sys.argv[1:] = []
    try:
        sys.path[:], module, call = load(folder, CALL)
        if module is not None:
            _import(*module)
        fn, args, kwargs = pickle.loads(call)
        store(folder, RESULT.format(rank), fn(*args, **kwargs), pickler())
    except Exception as error:
        store(folder, ERROR.format(rank), (*_describe(error), _pickle_error(error)))
        raise


def _import(name: str, file: str) -> None:
    """Imports the function's module. If it is not on the path (a test's module may not be), imports it from `file`."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        from importlib.util import module_from_spec, spec_from_file_location

        spec = spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            return  # Unpickling the call will say what is missing.
        sys.modules[name] = module = module_from_spec(spec)
        spec.loader.exec_module(module)


def _describe(error: Exception) -> tuple[str, str]:
    """The text of an exception, first without its traceback, then with it. Its plain repr if its methods fail."""
    trace = error.__traceback__ and error.__traceback__.tb_next  # Without the frame of `main`.
    try:
        text = "".join(traceback.format_exception(type(error), error, trace))
        return "".join(traceback.format_exception_only(error)).rstrip(), text
    except Exception:  # `traceback` reads attributes, and an exception's __getattr__ may raise anything.
        shown = BaseException.__repr__(error)
        return shown, "".join([*traceback.format_tb(trace), shown])


def _pickle_error(error: Exception) -> bytes:
    """The pickled exception; b"" if it cannot be pickled, unpickled, or shown after that."""
    try:
        data: bytes = pickler().dumps(error)
        traceback.format_exception(pickle.loads(data))
        return data
    except Exception:
        return b""


if __name__ == "__main__":
    main(sys.argv[1])
