"""The writing side of the flight recorder, which is always on: recording a call takes less than a microsecond.

The memory is a memfd of this process: it leaves no file behind, and other processes find it as /proc/PID/fd/N.
Recording a call waits for nothing. Only a new call text takes a lock, since calls come from several threads.

A rank that never reaches a collective is in some loop of the user's code. When its peers time out, their errors should
say where. So if there are several ranks, each has a thread that once a second records where the main thread's code is.
If the main thread computes without releasing the GIL, there is no new sample, and the age of the last one shows that.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import itertools
import mmap
import operator
import os
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from time import monotonic_ns
from types import FrameType
from typing import Any

from collectives.errors import ROOT, ArgumentError
from collectives.flight import layout
from collectives.flight.layout import CALL, CALLS, CALLS_AT, DONE, FAILED, QUEUED, STARTED, STATE_BITS
from collectives.world import report

__all__ = ["DONE", "FAILED", "QUEUED", "STARTED", "Recorder", "mark_step", "process_recorder"]

Location = tuple[str, int, str]  # file, line, function
_SIZE = CALL.size
_WORDS = CALL.size // 8
_FIRST_WORD = CALLS_AT // 8


class Recorder:
    """The flight record of this process, as its writer.

    rank, size: this process's rank and the number of ranks; -1 while unknown
    fd: the file descriptor of the memfd; None if the system refuses one, or in a forked child. Then only this process
        can read the record, by `peek`
    oldest: texts up to this number may soon be overwritten, and must be interned again before they are used
    """

    def __init__(self, rank: int = -1, size: int = -1) -> None:
        self.fd, memory = _shared_memory()
        self._use(memory)
        self._indices = itertools.count(1)  # `next` on it is atomic.
        self._lock = threading.Lock()
        self._texts: dict[tuple[Hashable, ...], int] = {}
        self._newest = self.oldest = 0
        fields = (layout.MAGIC, layout.VERSION, layout.SIZE, os.getpid(), rank, size)
        layout.HEADER.pack_into(memory, 0, *fields, -1, -1, 0, 0, 0, 0, layout.NOT_KNOWN, layout.NOT_KNOWN)
        _recorders.add(self)

    def identify(self, rank: int, size: int) -> None:
        """Sets this process's rank and the number of ranks."""
        self._words[layout.RANK_WORD] = rank
        self._words[layout.SIZE_WORD] = size

    def step(self, number: int | None = None) -> None:
        """Records that the program has finished step `number`; None: one more step than before, starting at 1."""
        self._words[layout.STEP_WORD] = number if number is not None else max(0, self._words[layout.STEP_WORD]) + 1

    def count_backwards(self, number: int) -> None:
        """Records the number of finished synchronized backwards; it is the step count if the program sets none."""
        self._words[layout.BACKWARDS_WORD] = number

    def add(self, name: str, amount: float) -> None:
        """Adds to one of `layout.FIGURES` that is a sum."""
        self._floats[layout.FIGURES[name]] += amount

    def set(self, name: str, figure: float) -> None:
        """Sets one of `layout.FIGURES` that is not a sum."""
        self._floats[layout.FIGURES[name]] = figure

    def begin(
        self,
        text: int,
        number: int,
        state: int = STARTED,
        _pack_into: Callable[..., None] = CALL.pack_into,  # A default, since a local name is looked up faster.
    ) -> int:
        """Records a call. Returns: its index, for `start` and `end`.

        text: from `intern`; number: the call's sequence number on its communicator; state: STARTED or QUEUED
        """
        index = next(self._indices)
        now = monotonic_ns()
        started = now if state == STARTED else 0
        offset = CALLS_AT + index % CALLS * _SIZE
        _pack_into(self._bytes, offset, index, text, number, now, started, 0, index << STATE_BITS | state)
        return index

    # After CALLS later calls, a call's record has been overwritten. If that happens between the check and the writing
    # below, where a thread may lose the GIL, the first and last word of the new record disagree, and readers skip it.

    def start(self, index: int) -> None:
        """Records that a queued call has started."""
        words = self._words
        first = _FIRST_WORD + index % CALLS * _WORDS
        if words[first] == index:
            words[first + 4] = monotonic_ns()
            words[first + 6] = index << STATE_BITS | STARTED

    def end(self, index: int, state: int = DONE) -> None:
        """Records that a call is DONE or FAILED."""
        words = self._words
        first = _FIRST_WORD + index % CALLS * _WORDS
        if words[first] == index:
            words[first + 5] = monotonic_ns()
            words[first + 6] = index << STATE_BITS | state

    def times(self, index: int) -> tuple[int, int, int] | None:
        """When a call was entered, started and ended, in nanoseconds of CLOCK_MONOTONIC; 0: not yet.

        None if its record has been overwritten, which happens after CALLS later calls.
        """
        first = _FIRST_WORD + index % CALLS * _WORDS
        recorded, _, _, queued, started, ended, _ = self._words[first : first + _WORDS].tolist()
        return (queued, started, ended) if recorded == index == self._words[first] else None

    def intern(
        self, communicator: str, name: str, dtype: Hashable, shape: Hashable, more: str, file: str, line: int
    ) -> int:
        """Writes a call text if it is new. Returns: its number, which is valid for the `begin` that follows

        dtype, shape: hashable objects, formatted by `str`; None without an array
        more: other arguments, such as op and root; file, line: place in the user's code
        """
        key = (communicator, name, dtype, shape, more, file, line)
        number = self._texts.get(key, 0)
        if number > self.oldest:
            return number
        texts = ["" if value is None else str(value) for value in key]
        fields = [layout.truncate(text, limit) for text, limit in zip(texts[:5], (96, 32, 24, 64, 48), strict=True)]
        fields += [layout.truncate(file, 112, keep_end=True), str(line)]
        with self._lock:
            self._newest += 1
            number = self._newest
            # The slot of a text is overwritten TEXTS texts later, but new calls point to a text only until TEXTS // 2
            # texts later. The ring holds fewer calls than that, so a text outlives the recorded calls that point to it.
            self.oldest = max(0, number - layout.TEXTS // 2)
            if len(self._texts) >= layout.TEXTS:
                self._texts.clear()
            start = layout.text_at(number)
            self._bytes[start : start + layout.TEXT_SIZE] = layout.pack_text(number, fields, layout.TEXT_SIZE)
            self._texts[key] = number
        return number

    def record_position(self, location: Location, within: Location | None = None) -> None:
        """Records the position of the main thread's Python code. location, within: from `main_thread_position`"""
        fields = []
        for file, line, function in (location, within or ("", 0, "")):
            fields += [layout.truncate(file, 256, keep_end=True), str(line), layout.truncate(function, 112)]
        packed = layout.pack_text(monotonic_ns(), fields, layout.POSITION_SIZE)
        self._bytes[layout.POSITION_AT : layout.POSITION_AT + layout.POSITION_SIZE] = packed

    def peek(self, offset: int, length: int) -> bytes:
        """Part of the record, for a reader in this process: `FlightReader(recorder.peek)`."""
        return bytes(self._bytes[offset : offset + length])

    def _use(self, memory: mmap.mmap) -> None:
        self._bytes = memoryview(memory)
        self._words = self._bytes.cast("q")
        self._floats = self._bytes.cast("d")

    def _detach_from_parent(self) -> None:
        """In a forked child: the memory is the parent's, so this process continues with a private copy."""
        memory = mmap.mmap(-1, layout.SIZE)
        memory[:] = self._bytes
        self._lock = threading.Lock()
        self.fd = None
        self._use(memory)


def _shared_memory() -> tuple[int | None, mmap.mmap]:
    try:
        fd = os.memfd_create(layout.NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (AttributeError, OSError):  # an old C library, a sandbox, no file descriptor left
        return None, mmap.mmap(-1, layout.SIZE)
    os.ftruncate(fd, layout.SIZE)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd, mmap.mmap(fd, layout.SIZE)


_recorders: weakref.WeakSet[Recorder] = weakref.WeakSet()
_creation_lock = threading.Lock()
_process_recorder: Recorder | None = None


def process_recorder() -> Recorder:
    """This process's recorder, created by the first call."""
    global _process_recorder
    with _creation_lock:
        if _process_recorder is None:
            _process_recorder = Recorder()
            if _process_recorder.fd is not None:
                report(flight=_process_recorder.fd)
        return _process_recorder


def mark_step(n: int | None = None, *, loss: Any = None, samples: int = 0) -> None:
    """Records this rank's progress, which hang reports, `ddp-top`, `ddp-launch --metrics-port` and others show.

    n: the number of the step that this rank has just finished (0 or more); None: one more than before, starting at 1
    loss: this rank's loss, a number or an array of one element; an array on a GPU makes the call wait for the GPU
    samples: number processed since the last call, without those that a `ddp.data.DataLoader` counts itself

    A model in `ddp.DataParallel` counts its synchronized backwards itself. Reports show that count until the first call
    of this function, and then the count of this function. After a restart from a checkpoint, pass n. A call does not
    communicate and takes about a microsecond. In a world of threads all ranks share one count.

    Raises: ArgumentError if n is not an int from 0 to 2**63 - 1; TypeError or ValueError if loss or samples is not a
    number.
    """
    if n is not None and (not isinstance(n, int) or not 0 <= n < 1 << 63):
        raise ArgumentError(f"n should be the number of a step, a whole number of 0 or more, is {n!r}")
    recorder = process_recorder()
    recorder.add("samples", samples)
    if loss is not None:
        recorder.set("loss", float(loss))
    recorder.step(n)


def _after_fork() -> None:
    global _creation_lock
    _creation_lock = threading.Lock()
    for recorder in _recorders:
        recorder._detach_from_parent()


os.register_at_fork(after_in_child=_after_fork)


# Seconds between two samples.
PERIOD = 1.0

_OURS = tuple(os.path.join(ROOT, package) + os.sep for package in ("collectives", "ddp", "launcher"))
_STANDARD = os.path.dirname(os.__file__) + os.sep
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def start_sampler(recorder: Recorder, period: float = PERIOD) -> None:
    """Starts a daemon thread that samples the main thread now and every `period` seconds, until the process ends."""
    exiting = threading.Event()

    def sample() -> None:
        while True:
            position = main_thread_position()
            if position is not None:
                recorder.record_position(*position)
            if exiting.wait(period):
                return

    threading.Thread(target=sample, name="flight-sampler", daemon=True).start()
    atexit.register(exiting.set)


def main_thread_position() -> tuple[Location, Location | None] | None:
    """The main thread's position: the innermost frame of the user's code, and the innermost frame of all.

    The second is None if both are the same frame. If no frame is the user's, the first is the innermost frame of a
    library, or of all if there is no library. Returns None if the main thread has ended.
    """
    frames = _stack(threading.main_thread().ident or 0)
    if not frames:
        return None
    innermost = _location(frames[0])
    library: Location | None = None  # The innermost frame outside of our packages, but in a library.
    for frame in frames:
        file = frame.f_code.co_filename
        if not file.startswith(_OURS):
            if not _is_library(file):
                return _location(frame), None if frame is frames[0] else innermost
            if library is None:
                library = _location(frame)
    location = library or innermost
    return location, None if location == innermost else innermost


def _stack(thread: int) -> list[FrameType]:
    """The frames of another thread, the innermost first.

    That thread runs whenever the interpreter releases the GIL, and CPython 3.11 has crashed when `f_back` was read
    while it ran. A single call of a C function collects all frames, so the GIL is held throughout. In CPython 3.11 a
    new frame object may start a garbage collection, whose finalizers may release the GIL. So the same call first
    disables collections.
    """
    collects_garbage = gc.isenabled()
    # An iterator without items. It calls `gc.disable` when `chain` asks it for its first item.
    disable_gc: Iterator[None] = filter(None, itertools.starmap(gc.disable, [()]))
    frames: list[FrameType] = []
    innermost = map(operator.itemgetter(thread), itertools.starmap(sys._current_frames, [()]))
    steps: Iterator[Any] = itertools.chain(disable_gc, innermost, itertools.repeat("f_back"))
    try:
        frames.extend(itertools.accumulate(steps, getattr))
    except (KeyError, AttributeError):
        # KeyError: there is no such thread. AttributeError: all frames are read. The f_back of the outermost frame is
        # None, which is the last item of `frames`, and has no f_back itself.
        pass
    finally:
        if collects_garbage:
            gc.enable()
    return frames[:-1]


def _location(frame: FrameType) -> Location:
    return frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name


def _is_library(file: str) -> bool:
    return file.startswith((_STANDARD, "<frozen ")) or any(folder in file for folder in _INSTALLED)
