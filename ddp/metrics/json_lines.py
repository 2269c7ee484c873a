"""A file of JSON lines that rank 0 writes; a resumed job replaces the lines of steps that it repeats."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from typing import Any

from ddp._files import atomic_write, open_stream
from ddp.errors import ArgumentError

RESERVED = "step"


class JsonLines:
    """A file of JSON objects, one a line: `{"step": 120, "loss": 0.25}`. Rank 0 writes it.

    path: the file, or a device, pipe or terminal; lines are added to an existing file
    rank, comm: this process's rank, or its communicator; pass one of the two

    A job that resumes repeats the steps since its checkpoint. So that no step is in the file twice, the first `log`
    removes the lines of its step and of later steps, as does the first `log` after `close`. Each line is written at
    once and whole, unless the disk is full. The first `log` also removes a line that a machine left incomplete when it
    went down.

    Raises: ArgumentError unless exactly one of rank and comm is given.
    """

    def __init__(self, path: str | os.PathLike[str], *, rank: int | None = None, comm: Any = None) -> None:
        self.path = os.path.abspath(path)
        self._writes = is_writer("JsonLines", rank, comm)
        self._number: int | None = None  # file descriptor

    def log(self, step: int, **values: Any) -> None:
        """Writes one line.

        step: a whole number
        values: numbers, tensors and arrays of one element, strings, booleans, None, lists, tuples and dicts of these.
        Infinity and nan become null, since JSON does not have them.

        Raises, on rank 0: ArgumentError for any other step or value, or an existing file that JsonLines has not
        written; OSError if the file cannot be read or written.
        """
        if not self._writes:
            return
        text = _format_line(check_step(self, step), values)
        if self._number is None:
            self._number = _open_for_append(self.path, step)
        data = text.encode()
        try:
            while data:  # one call writes all of it, unless the disk fills up
                data = data[os.write(self._number, data) :]
        except OSError as error:
            self.close()  # the next `log` removes the part of this line that was written
            raise OSError(error.errno, error.strerror, self.path) from None

    def close(self) -> None:
        """Closes the file; a later `log` opens it again."""
        if self._number is not None:
            number = self._number
            self._number = None
            os.close(number)

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _format_line(step: int, values: dict[str, Any]) -> str:
    texts = {RESERVED: str(step)}
    for name, value in values.items():
        try:
            texts[name] = json.dumps(_finite(value), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ArgumentError(f"JsonLines.log: {name}: {error}") from None
    return "{" + ", ".join(f"{json.dumps(name)}: {text}" for name, text in texts.items()) + "}\n"


def _finite(value: Any) -> Any:
    value = as_plain(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _open_for_append(path: str, step: int) -> int:
    """Opens a file to append to. First removes the lines of `step` and later steps from it."""
    stream = open_stream(path)
    if stream is not None:
        return stream
    if os.path.exists(path):
        with open(path, "rb") as file:
            kept = b"".join(_lines_before(path, file, step))
            size = file.seek(0, os.SEEK_END)
        if len(kept) < size:
            with atomic_write(path) as file:
                file.write(kept)
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)


def _lines_before(path: str, lines: Any, step: int) -> Iterator[bytes]:
    for number, line in enumerate(lines, 1):
        if not line.endswith(b"\n"):
            return  # an incomplete line: the machine went down, or the disk was full
        try:
            line_step = json.loads(line)[RESERVED]
            if line_step < step:
                yield line
        except (ValueError, KeyError, TypeError, IndexError, RecursionError):
            raise ArgumentError(f"{path}, line {number}: expected JSON with a step, as JsonLines writes it") from None


# --- used by all writers: which rank writes, and how a value is stored ---


def is_writer(name: str, rank: int | None, comm: Any) -> bool:
    """Whether this process is rank 0. Raises: ArgumentError unless exactly one of `rank` and `comm` is given."""
    if (rank is None) == (comm is None):
        raise ArgumentError(f"{name}: expected this process's rank, or its communicator: rank=0, or comm=comm")
    return int(comm.rank if rank is None else rank) == 0


def check_step(writer: object, step: Any) -> int:
    """The step as an int. Raises: ArgumentError if it is not a whole number."""
    step = as_plain(step)
    if type(step) is not int:
        raise ArgumentError(f"{type(writer).__name__}.log: expected a step that is a whole number, got {step!r}")
    return step


def as_plain(value: Any) -> Any:
    """Converts a tensor or array of one element to a number. Returns anything else unchanged."""
    return value.item() if hasattr(value, "item") else value
