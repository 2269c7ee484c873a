"""A save in the background: its thread, and what became of it, known to all ranks alike."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import numpy as np

from collectives import Communicator, ReduceOp
from ddp.checkpoint._snapshot import Snapshot

_log = logging.getLogger("ddp.checkpoint")
_under_way: set[Saving] = set()
_registered = False
_NICE = 19  # next to nothing, where a thread that trains wants the same core


class Saving:
    """One save under way. A process that ends waits for it.

    comm: nobody else calls on it meanwhile
    write: writes what the snapshot holds; refuse: what is called in its place, with the reason, if that failed
    told: called when it is over
    """

    def __init__(
        self,
        comm: Communicator,
        snapshot: Snapshot,
        write: Callable[[], Path],
        refuse: Callable[[str], NoReturn],
        told: Callable[[], None],
    ) -> None:
        self.snapshot = snapshot
        self._comm, self._write, self._refuse, self._told = comm, write, refuse, told
        self._path: Path | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="save of a checkpoint")
        _wait_at_exit()
        _under_way.add(self)
        self._thread.start()

    def result(self) -> Path | None:
        """Waits for its end: the checkpoint; None if the state was changed meanwhile and has to be saved anew.

        The same on all ranks. Raises: CheckpointError on all of them, and there is no checkpoint of this step.
        """
        self.snapshot.wait()
        self._thread.join()
        _under_way.discard(self)
        if self._error is not None:
            raise self._error
        return self._path

    def finish(self) -> None:
        """Waits for its end where nobody asks for the result any more; what went wrong is only said."""
        try:
            if self.result() is None:
                _log.error("a save was given up: parameters were changed while they were copied, and the process ends")
        except Exception as error:
            _log.error("a save failed while the process was ending: %s: %s", type(error).__name__, error)

    def _run(self) -> None:
        try:
            trouble = None
            try:
                self.snapshot.copy()
            except Exception as error:  # memory, or a device
                trouble = f"{type(error).__name__}: {error}"
            _give_way()
            if not self._all(self.snapshot.intact):
                return
            if trouble is not None:
                self._refuse(trouble)
            self._path = self._write()
        except BaseException as error:  # raised where the ranks look at the result
            self._error = error
        finally:
            self._told()

    def _all(self, mine: bool) -> bool:
        if self._comm.size == 1:
            return mine
        return bool(self._comm.all_reduce(np.array([mine]), ReduceOp.MIN)[0])


def _give_way() -> None:
    """Leaves the cores to whoever trains: on Linux a thread has a priority, which those that it starts inherit."""
    with contextlib.suppress(OSError):  # not allowed: it saves at the usual priority
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def _wait_at_exit() -> None:
    """Has this process wait for its saves when it ends, while the threads that write can still be started.

    `atexit` runs after the interpreter has joined all threads and shut down the pools of `concurrent.futures`, and a
    save needs these. What they register with themselves runs before, the last registered first.
    """
    global _registered
    if not _registered:
        _registered = True
        threading._register_atexit(_finish)  # type: ignore[attr-defined]  # no public call runs so early


def _finish() -> None:
    for saving in tuple(_under_way):
        saving.finish()
