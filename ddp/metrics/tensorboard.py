"""Files for TensorBoard, written by TensorBoard's library: `TensorBoard`; `SummaryWriter` has PyTorch's interface."""

from __future__ import annotations

import importlib
import os
import socket
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from collectives.world import world_from_env
from ddp._tensor.core import Tensor
from ddp.errors import ArgumentError, how_to_install
from ddp.metrics.json_lines import as_plain, is_writer


class TensorBoard:
    """Event files in a folder, which `tensorboard --logdir` shows. Only rank 0 writes them, and needs the library.

    folder: the folder of one run; made if it does not exist
    rank, comm: this process's rank, or its communicator; pass one of the two

    The first `log` makes TensorBoard drop what was written before for its step and later steps. So does the first `log`
    after `close`.

    Raises: ArgumentError unless exactly one of rank and comm is given, and on rank 0 if the library is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str], *, rank: int | None = None, comm: Any = None) -> None:
        self.folder = os.path.abspath(folder)
        self._writer: Any = None
        self._writes = is_writer("TensorBoard", rank, comm)
        if self._writes:
            _import_library("TensorBoard")  # fails now, not at the end of the first epoch

    def log(self, step: int, **values: Any) -> None:
        """Writes scalars of one step. values: numbers, or tensors and arrays of one element, by tag.

        Pass a tag with a slash as `log(step, **{"train/loss": loss})`.
        """
        if not self._writes:
            return
        if self._writer is None:
            self._writer = _start_writer(self.folder, step)
        for tag, value in values.items():
            self._writer.add_scalar(tag, as_plain(value), step=step)

    def flush(self) -> None:
        """Writes all logged values to the file now. Without a call, they are written within two minutes."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Writes what was logged, and closes the file; a later `log` begins another one."""
        if self._writer is not None:
            writer = self._writer
            self._writer = None
            writer.close()

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _import_library(name: str) -> None:
    """Imports TensorBoard's library for the class `name`. Raises: ArgumentError if it is not installed."""
    try:
        importlib.import_module("tensorboard.summary")
    except ImportError as error:
        raise ArgumentError(
            f"{name}: its library cannot be imported ({error}): {how_to_install('tensorboard')}"
        ) from None


def _mark_start(folder: str, step: int) -> None:
    # This event makes TensorBoard drop the events that an earlier process has written for this step and later steps. It
    # is in a separate file, because a `Writer` writes scalars only.
    proto = importlib.import_module("tensorboard.compat.proto.event_pb2")
    mark = importlib.import_module("tensorboard.summary.writer.event_file_writer").EventFileWriter(folder)
    start = proto.SessionLog(status=proto.SessionLog.START)
    mark.add_event(proto.Event(wall_time=time.time(), step=step, session_log=start))
    mark.close()


def _start_writer(folder: str, step: int) -> Any:
    _mark_start(folder, step)
    return importlib.import_module("tensorboard.summary").Writer(folder)


class SummaryWriter:
    """Writes scalars, histograms and text for TensorBoard, with the interface of PyTorch's SummaryWriter.

    Under ddp-launch, mpiexec and other launchers, only rank 0 writes.

    log_dir: the folder, by default runs/ with the time, the host's name and `comment`
    purge_step: TensorBoard drops what an earlier process wrote for this step and later steps
    max_queue: number of events that may wait to be written; flush_secs: how long they may wait (s)
    filename_suffix: the end of the files' names

    New code should use `TensorBoard`, which purges by itself. Raises: ArgumentError in the process that writes, if
    the library is not installed.
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str] | None = None,
        comment: str = "",
        purge_step: int | None = None,
        max_queue: int = 10,
        flush_secs: int = 120,
        filename_suffix: str = "",
    ) -> None:
        default = f"runs/{time.strftime('%b%d_%H-%M-%S')}_{socket.gethostname()}{comment}"
        self.log_dir = os.fspath(log_dir or default)
        self._files: dict[str, Any] = {}  # by name of the folder below log_dir
        self._options = max_queue, flush_secs, filename_suffix
        world = world_from_env()
        self._writes = world is None or world.rank == 0
        if self._writes:
            _import_library("SummaryWriter")
            if purge_step is not None:
                _mark_start(self.log_dir, purge_step)

    def _add(self, step: Any, value: Any, folder: str = "") -> None:
        """Writes one value to the file of a folder. The first value makes the file."""
        if folder not in self._files:
            library = importlib.import_module("tensorboard.summary.writer.event_file_writer")
            self._files[folder] = library.EventFileWriter(os.path.join(self.log_dir, folder), *self._options)
        proto = importlib.import_module("tensorboard.compat.proto.event_pb2")
        event = proto.Event(wall_time=time.time(), step=int(step or 0), summary={"value": [value]})
        self._files[folder].add_event(event)

    def get_logdir(self) -> str:
        """Returns the folder."""
        return self.log_dir

    def add_scalar(self, tag: str, scalar_value: Any, global_step: Any = None) -> None:
        """Adds a scalar. scalar_value: a number, or a tensor or array of one element."""
        if self._writes:
            self._add(global_step, {"tag": tag, "simple_value": as_plain(scalar_value)})

    def add_scalars(self, main_tag: str, tag_scalar_dict: Mapping[str, Any], global_step: Any = None) -> None:
        """Adds scalars that share a plot. Each has its own folder below log_dir, which TensorBoard shows as a run."""
        if self._writes:
            for tag, number in tag_scalar_dict.items():
                value = {"tag": main_tag, "simple_value": as_plain(number)}
                self._add(global_step, value, f"{main_tag.replace('/', '_')}_{tag}")

    def add_histogram(self, tag: str, values: Any, global_step: Any = None, bins: Any = "tensorflow") -> None:
        """Adds a histogram. values: a tensor or array of any shape.

        Infinities and nan are left out. If no values remain, no histogram is added.
        bins: the number of bins, or their edges; any name, such as PyTorch's "tensorflow": 30 bins of equal width
        """
        if self._writes:
            array = values.numpy(force=True) if isinstance(values, Tensor) else np.asarray(values)
            finite = array[np.isfinite(array)].astype("float64")
            if finite.size:
                counts, limits = np.histogram(finite, 30 if isinstance(bins, str) else bins)
                histogram = {
                    "min": finite.min(),
                    "max": finite.max(),
                    "num": finite.size,
                    "sum": finite.sum(),
                    "sum_squares": finite @ finite,
                    "bucket_limit": limits,
                    "bucket": [0, *counts],  # an empty bucket in front: it ends at the first edge
                }
                self._add(global_step, {"tag": tag, "histo": histogram})

    def add_text(self, tag: str, text_string: str, global_step: Any = None) -> None:
        """Adds a text. text_string: Markdown."""
        if self._writes:
            library = importlib.import_module("tensorboard.plugins.text.summary_v2")
            self._add(global_step, library.text_pb(f"{tag}/text_summary", text_string).value[0])

    def flush(self) -> None:
        """Writes all added values to the files now."""
        for file in self._files.values():
            file.flush()

    def close(self) -> None:
        """Writes what was added, and closes the files; later values begin other files."""
        for file in self._files.values():
            file.close()
        self._files = {}

    def __enter__(self) -> SummaryWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
