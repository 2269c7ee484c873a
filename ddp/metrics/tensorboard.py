"""Scalars for TensorBoard, written by its own library; a resumed job replaces the steps that it repeats."""

from __future__ import annotations

import importlib
import os
import time
from typing import Any

from ddp.errors import ArgumentError, how_to_install
from ddp.metrics.values import as_plain, is_writer


class TensorBoard:
    """Event files in a folder, which `tensorboard --logdir` shows. Rank 0 writes them, and it alone needs the library.

    folder: of one run; made if it is not there
    rank, comm: this process's rank, or a communicator that has it; one of the two

    The first `log` of a process tells TensorBoard to forget what an earlier one wrote for its step and later ones.
    Raises: ArgumentError if the library is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str], *, rank: int | None = None, comm: Any = None) -> None:
        self.folder = os.path.abspath(folder)
        self._writer: Any = None
        self._writes = is_writer("TensorBoard", rank, comm)
        if self._writes:
            try:
                importlib.import_module("tensorboard.summary")  # now, and not at the end of the first epoch
            except ImportError as error:
                raise ArgumentError(
                    f"TensorBoard: its library cannot be imported ({error}): {how_to_install('tensorboard')}"
                ) from None

    def log(self, step: int, **values: Any) -> None:
        """Writes scalars of one step. values: numbers, or tensors and arrays of one element, by tag.

        A tag with a slash goes in as `log(step, **{"train/loss": loss})`.
        """
        if not self._writes:
            return
        if self._writer is None:
            self._writer = _start_writer(self.folder, step)
        for tag, value in values.items():
            self._writer.add_scalar(tag, as_plain(value), step=step)

    def flush(self) -> None:
        """What was logged is in the file when this returns; otherwise it is within two minutes."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Writes what is left; a later `log` begins another file."""
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _start_writer(folder: str, step: int) -> Any:
    # The second start of a session, and each later one, takes back what is of its step or later. The mark has a file of
    # its own, since a `Writer` writes scalars alone.
    proto = importlib.import_module("tensorboard.compat.proto.event_pb2")
    mark = importlib.import_module("tensorboard.summary.writer.event_file_writer").EventFileWriter(folder)
    start = proto.SessionLog(status=proto.SessionLog.START)
    mark.add_event(proto.Event(wall_time=time.time(), step=step, session_log=start))
    mark.close()
    return importlib.import_module("tensorboard.summary").Writer(folder)
