"""Function worker: a rank of `launcher.run`. Reads the call, makes it, and stores the result or the exception."""

from __future__ import annotations

import importlib
import os
import pickle
import sys
import traceback
from typing import Any

#: Files in the folder of a call: what to call, each rank's result or exception, and how the job ended.
CALL, RESULT, ERROR, ENDING = "call", "result-{}", "error-{}", "ending"


def pickler() -> Any:
    """cloudpickle, or plain pickle where that is not installed; both have `dumps` and `dump`."""
    try:
        return importlib.import_module("cloudpickle")
    except ImportError:
        return pickle


def main(folder: str) -> None:
    """folder: of the call, written by `launcher.function`. Raises: what the function raises."""
    rank = os.environ["RANK"]
    sys.argv[1:] = []
    try:
        fn, args, kwargs = _read_call(os.path.join(folder, CALL))
        result = fn(*args, **kwargs)
        _write(os.path.join(folder, RESULT.format(rank)), result)
    except Exception as error:
        with open(os.path.join(folder, ERROR.format(rank)), "wb") as file:
            pickle.dump((*_described(error), _pickled(error)), file)
        raise


def _read_call(path: str) -> Any:
    with open(path, "rb") as file:
        sys.path[:], home, call = pickle.load(file)
    if home is not None:
        _import(*home)
    return pickle.loads(call)


def _import(name: str, file: str) -> None:
    """Has the function's module, which may be on no path: a test's, say."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        from importlib.util import module_from_spec, spec_from_file_location

        spec = spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            return  # unpickling will say what is missing
        sys.modules[name] = module = module_from_spec(spec)
        spec.loader.exec_module(module)


def _write(path: str, result: Any) -> None:
    """All of it or nothing: the launcher may end this rank meanwhile."""
    with open(path + ".part", "wb") as file:
        pickler().dump(result, file, protocol=5)
    os.rename(path + ".part", path)


def _described(error: Exception) -> tuple[str, str]:
    """The text of an exception without its traceback, and with it; its repr if methods of its own class fail."""
    trace = error.__traceback__ and error.__traceback__.tb_next  # without the frame of `main`
    try:
        text = "".join(traceback.format_exception(type(error), error, trace))
        return "".join(traceback.format_exception_only(error)).rstrip(), text
    except Exception:  # `traceback` asks for attributes, which a class may answer with any exception
        shown = BaseException.__repr__(error)
        return shown, "".join([*traceback.format_tb(trace), shown])


def _pickled(error: Exception) -> bytes:
    """b"" if it cannot be pickled, or if what is made of that again cannot be shown."""
    try:
        data: bytes = pickler().dumps(error)
        traceback.format_exception(pickle.loads(data))
        return data
    except Exception:
        return b""


if __name__ == "__main__":
    main(sys.argv[1])
