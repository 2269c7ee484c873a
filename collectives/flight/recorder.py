"""The writing side of the flight recorder: well under a microsecond a call, so that it is never switched off.

The memory is a memfd of this process: no name that could be left behind, found by others as /proc/PID/fd/N. Nothing
here waits, and nothing but a new signature takes a lock, since calls come from several threads.

A rank that never reaches a collective is in some loop of the user's code, and its peers, which run into their time
limit, should be able to say in which. So a thread of this process samples once a second where the main thread's Python
stands. Where the main thread computes without letting go of the GIL there is no sample, and the age of the last one
tells so.
"""

from __future__ import annotations

import atexit
import fcntl
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

from collectives.errors import ArgumentError
from collectives.flight import layout
from collectives.flight.layout import CALL, CALLS, CALLS_AT, DONE, FAILED, QUEUED, STARTED, STATE_BITS
from collectives.world import report

__all__ = ["DONE", "FAILED", "QUEUED", "STARTED", "Recorder", "mark_step", "process_recorder"]

Location = tuple[str, int, str]  # file, line, function
_SIZE, _WORDS, _FIRST_WORD = CALL.size, CALL.size // 8, CALLS_AT // 8


class Recorder:
    """The flight record of this process, being written.

    rank, size: of the world, -1 while they are not known
    fd: of the memfd, None where the system refuses one; then only this process can read the record, by `peek`
    oldest: signatures up to this number may soon be overwritten, and have to be interned anew before they are used
    """

    def __init__(self, rank: int = -1, size: int = -1) -> None:
        self.fd, memory = _shared_memory()
        self._use(memory)
        self._indices = itertools.count(1)  # its `next` cannot be torn by another thread
        self._lock = threading.Lock()
        self._signatures: dict[tuple[Hashable, ...], int] = {}
        self._newest = self.oldest = 0
        known = layout.MAGIC, layout.VERSION, layout.SIZE, os.getpid(), rank, size
        layout.HEADER.pack_into(memory, 0, *known, -1, -1, 0, 0, 0, 0, layout.NOT_KNOWN, layout.NOT_KNOWN)
        _recorders.add(self)

    def identify(self, rank: int, size: int) -> None:
        """Says which rank of how many this process is."""
        self._words[layout.RANK_WORD] = rank
        self._words[layout.SIZE_WORD] = size

    def step(self, number: int | None = None) -> None:
        """Says that the program has finished step `number`, or one more than before; the first is 1."""
        self._words[layout.STEP_WORD] = number if number is not None else max(0, self._words[layout.STEP_WORD]) + 1

    def count_backwards(self, number: int) -> None:
        """Says how many synchronized backwards have ended; it counts as the step where the program counts none."""
        self._words[layout.BACKWARDS_WORD] = number

    def add(self, name: str, amount: float) -> None:
        """Adds to one of `layout.FIGURES`, a sum."""
        self._floats[layout.FIGURES[name]] += amount

    def set(self, name: str, figure: float) -> None:
        """Says what one of `layout.FIGURES`, which is no sum, is now."""
        self._floats[layout.FIGURES[name]] = figure

    def begin(
        self,
        signature: int,
        number: int,
        state: int = STARTED,
        _pack_into: Callable[..., None] = CALL.pack_into,  # bound here: a local name is found faster
    ) -> int:
        """Enters a call; its index, for `start` and `end`.

        signature: from `intern`; number: the call's sequence number on its communicator; state: STARTED, or QUEUED
        """
        index = next(self._indices)
        now = monotonic_ns()
        started = now if state == STARTED else 0
        at = CALLS_AT + index % CALLS * _SIZE
        _pack_into(self._bytes, at, index, signature, number, now, started, 0, index << STATE_BITS | state)
        return index

    # After CALLS others have begun, a call has no record any more. Should they begin between the look and the writing,
    # where a thread may lose the GIL, the two ends of that record disagree, and no reader believes it.

    def start(self, index: int) -> None:
        """A queued call is being carried out."""
        words, first = self._words, _FIRST_WORD + index % CALLS * _WORDS
        if words[first] == index:
            words[first + 4] = monotonic_ns()
            words[first + 6] = index << STATE_BITS | STARTED

    def end(self, index: int, state: int = DONE) -> None:
        """A call is DONE, or FAILED."""
        words, first = self._words, _FIRST_WORD + index % CALLS * _WORDS
        if words[first] == index:
            words[first + 5] = monotonic_ns()
            words[first + 6] = index << STATE_BITS | state

    def times(self, index: int) -> tuple[int, int, int] | None:
        """When a call was entered, started and ended, in nanoseconds of CLOCK_MONOTONIC; 0: not yet.

        None once CALLS others have begun since.
        """
        at = _FIRST_WORD + index % CALLS * _WORDS
        found, _, _, queued, started, ended, _ = self._words[at : at + _WORDS].tolist()
        return (queued, started, ended) if found == index == self._words[at] else None

    def intern(
        self, communicator: str, name: str, dtype: Hashable, shape: Hashable, more: str, file: str, line: int
    ) -> int:
        """The number of a signature, for the `begin` that follows.

        dtype, shape: anything that is hashable and says by `str` what it is; None where there is no array
        more: the op, the root; file, line: of the user's code
        """
        key = (communicator, name, dtype, shape, more, file, line)
        number = self._signatures.get(key, 0)
        if number > self.oldest:
            return number
        texts = ["" if each is None else str(each) for each in key]
        fields = [layout.truncate(text, limit) for text, limit in zip(texts[:5], (96, 32, 24, 64, 48), strict=True)]
        with self._lock:
            self._newest = number = self._newest + 1
            # Its slot is overwritten after SIGNATURES others, but it is not used any more after half of them: so it
            # outlasts the calls of the ring that point to it.
            self.oldest = max(0, number - layout.SIGNATURES // 2)
            if len(self._signatures) >= layout.SIGNATURES:
                self._signatures.clear()
            packed = layout.pack_text(
                number, [*fields, layout.truncate(file, 112, keep_end=True), str(line)], layout.SIGNATURE_SIZE
            )
            self._bytes[layout.signature_at(number) : layout.signature_at(number) + layout.SIGNATURE_SIZE] = packed
            self._signatures[key] = number
        return number

    def record_position(self, at: Location, within: Location | None = None) -> None:
        """Says where the Python code of this process stands now: in the user's file, and within whose function."""
        fields = []
        for file, line, function in (at, within or ("", 0, "")):
            fields += [layout.truncate(file, 256, keep_end=True), str(line), layout.truncate(function, 112)]
        packed = layout.pack_text(monotonic_ns(), fields, layout.POSITION_SIZE)
        self._bytes[layout.POSITION_AT : layout.POSITION_AT + layout.POSITION_SIZE] = packed

    def peek(self, offset: int, length: int) -> bytes:
        """A part of the record, for a reader in this process: `FlightReader(recorder.peek)`."""
        return bytes(self._bytes[offset : offset + length])

    def _use(self, memory: mmap.mmap) -> None:
        self._bytes = memoryview(memory)
        self._words = self._bytes.cast("q")
        self._floats = self._bytes.cast("d")

    def _detach_from_parent(self) -> None:
        """In a forked child: the memory is the parent's, so this process goes on in a private copy."""
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
_made = threading.Lock()
_mine: Recorder | None = None


def process_recorder() -> Recorder:
    """This process's recorder; made at the first call."""
    global _mine
    with _made:
        if _mine is None:
            _mine = Recorder()
            if _mine.fd is not None:
                report(flight=_mine.fd)
        return _mine


def mark_step(n: int | None = None, *, loss: Any = None, samples: int = 0) -> None:
    """Records how far this rank is, which hang reports, `ddp-top`, `ddp-launch --metrics-port` and others show.

    n: the step that it has just finished, by the program's own count (0 or more); None: one more than before, 1 first
    loss: of this rank, a number or what has one element; one on a GPU is waited for
    samples: that it took in since the last call, beside those that a `ddp.data.DataLoader` counts by itself

    A model in `ddp.DataParallel` counts its synchronized backwards by itself; this goes before it, which is of use
    after a restart from a checkpoint. It asks nothing of other ranks, takes about a microsecond and changes
    nothing else. In a world of threads all share one count.

    Raises: ArgumentError if n is no whole number of 0 or more.
    """
    if n is not None and (not isinstance(n, int) or not 0 <= n < 1 << 63):
        raise ArgumentError(f"n should be the number of a step, a whole number of 0 or more, is {n!r}")
    recorder = process_recorder()
    recorder.add("samples", samples)
    if loss is not None:
        recorder.set("loss", float(loss))
    recorder.step(n)


def _after_fork() -> None:
    global _made
    _made = threading.Lock()
    for recorder in _recorders:
        recorder._detach_from_parent()


os.register_at_fork(after_in_child=_after_fork)


PERIOD = 1.0  # s

#: The folder that holds the three packages.
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_OURS = tuple(os.path.join(ROOT, package) + os.sep for package in ("collectives", "ddp", "launcher"))
_STANDARD = os.path.dirname(os.__file__) + os.sep
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def start_sampler(recorder: Recorder, period: float = PERIOD) -> None:
    """Starts a daemon thread that samples the main thread now and every `period` seconds, until the process ends."""
    over = threading.Event()

    def sample() -> None:
        while True:
            where = main_thread_position()
            if where is not None:
                recorder.record_position(*where)
            if over.wait(period):
                return

    threading.Thread(target=sample, name="flight-sampler", daemon=True).start()
    atexit.register(over.set)


def main_thread_position() -> tuple[Location, Location | None] | None:
    """Where the main thread stands: the innermost frame of the user's code, and that of a library below it, if any.

    None if there is no main thread any more.
    """
    frames = _stack(threading.main_thread().ident or 0)
    if not frames:
        return None
    innermost = _location(frames[0])
    outside: Location | None = None  # of our packages, but a library's
    for each in frames:
        file = each.f_code.co_filename
        if not file.startswith(_OURS):
            if not _is_library(file):
                at = _location(each)
                return at, None if each is frames[0] else innermost
            if outside is None:
                outside = _location(each)
    at = outside or innermost
    return at, None if at == innermost else innermost


def _stack(thread: int) -> list[FrameType]:
    """The frames of another thread, the innermost first.

    That thread goes on whenever the interpreter's lock changes hands, and CPython 3.11 has crashed where `f_back` was
    asked for between two of its steps. One call of a function in C finds them all, so that the lock stays here.
    """
    found: list[FrameType] = []
    innermost = map(operator.itemgetter(thread), itertools.starmap(sys._current_frames, [()]))
    steps: Iterator[Any] = itertools.chain(innermost, itertools.repeat("f_back"))
    try:
        found.extend(itertools.accumulate(steps, getattr))
    except (KeyError, AttributeError):
        pass  # no such thread; and behind the outermost frame comes None, which has none
    return found[:-1]


def _location(frame: FrameType) -> Location:
    return frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name


def _is_library(file: str) -> bool:
    return file.startswith((_STANDARD, "<frozen ")) or any(folder in file for folder in _INSTALLED)
