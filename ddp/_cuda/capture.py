"""The capture of a CUDA graph, and the callbacks that Python code registers with it.

A replay does not run Python, but repeats only the work of the device: values that the host computed are constants of
the graph, and what the host counts or stores does not change. Code that depends on such state registers callbacks
with this thread's capture. `now()` returns that capture, or None outside of one.

    now().guard_value(read)   the graph is valid as long as `read()` returns an equal value; else `graphed_step`
                              captures the step anew
    now().before(run)         calls `run()` before every launch, on the launch's stream: updates memory that the graph
                              reads
    now().after(run)          calls `run()` after every launch: updates state of the host as the step itself would
    now().undo(run)           calls `run()` if the capture fails: restores state of the host
    now().keep_alive(object)  the object lives as long as the graph: the graph's kernels use the object's memory
    now().persistent(xp)      a context: arrays allocated in it keep their values between launches. Other memory of a
                              capture comes from the graph's pool, where kernels share it

Generators have their state in device memory, so that every replay draws new numbers. A kernel that computes random
numbers from a counter reads its key from device memory, too: a number from the host would be a constant of the graph.

Example: an optimizer holds its settings in persistent memory, uploads changed ones in `before`, and guards the list of
its parameters.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator
from typing import Any

from ddp import _device
from ddp._cuda import stream_order
from ddp.errors import CaptureError

# cudaStreamCaptureMode.
MODES = {"global": 0, "thread_local": 1, "relaxed": 2}

# cudaErrorStreamCapture...: Invalidated, Unmatched, Unjoined, WrongThread.
_BROKEN = (901, 903, 904, 908)

# From cudaErrorStreamCaptureUnsupported to cudaErrorStreamCaptureWrongThread.
_REFUSED = range(900, 909)


class Capture:
    """The callbacks, guarded values and objects that belong to one CUDA graph.

    make_pool: returns a pool with a method `malloc`, for persistent memory; called at most once
    """

    def __init__(self, make_pool: Callable[[], Any]) -> None:
        self.guarded: list[tuple[Callable[[], Any], Any]] = []
        self.befores: list[Callable[[], object]] = []
        self.afters: list[Callable[[], object]] = []
        self.undos: list[Callable[[], object]] = []
        self.kept: list[Any] = []
        # By id of a generator that was drawn from: the generator, and the stream that drew last.
        self._drawn: dict[int, tuple[Any, stream_order.DeviceStream]] = {}
        self._persistent_pool = functools.cache(make_pool)

    @contextlib.contextmanager
    def persistent(self, xp: Any) -> Iterator[None]:
        """A context in which arrays are allocated in memory that nothing else in the graph uses."""
        with xp.cuda.using_allocator(self._persistent_pool().malloc):
            yield

    def guard_value(self, read: Callable[[], Any]) -> None:
        """Makes the graph valid only as long as `read()` returns a value equal to the present one."""
        self.guarded.append((read, read()))

    def before(self, run: Callable[[], object]) -> None:
        """Calls `run` before every launch."""
        self.befores.append(run)

    def after(self, run: Callable[[], object]) -> None:
        """Calls `run` after every launch."""
        self.afters.append(run)

    def undo(self, run: Callable[[], object]) -> None:
        """Calls `run` if the capture fails. The functions are called in reverse order."""
        self.undos.append(run)

    def keep_alive(self, *objects: Any) -> None:
        """Keeps the objects alive as long as the graph."""
        self.kept.extend(objects)

    def is_valid(self) -> bool:
        """Whether every guarded value is still equal to that at the capture. `CUDAGraph.replay` does not check this."""
        return all(read() == value for read, value in self.guarded)

    def drawn(self, generator: Any) -> None:
        """Prepares `generator`, from which captured code draws, for launches. Does nothing for a generator on the CPU.

        Every launch reads and writes the state of a generator on a GPU. Before each launch, a new seed or a restored
        state is copied to where the graph reads it.
        Raises: CaptureError for a generator that was never drawn from: its state would begin anew with every launch.
        """
        if generator.device.type == "cpu":
            return
        stream = stream_order.current(generator.device.xp, generator.device.index)
        entry = self._drawn.get(id(generator))
        if entry is not None:
            last = entry[1]
            if stream != last and stream.capturing:  # another stream of the graph
                if last.capturing:
                    stream.wait_for(last)
                self._drawn[id(generator)] = (generator, stream)
            return
        if generator._rng is None:
            raise CaptureError(
                "a generator that was never drawn from on the GPU would begin anew with every replay: draw from it "
                "once before the capture"
            )
        self._drawn[id(generator)] = (generator, stream)
        rng = generator._rng

        def update_state() -> None:
            if generator._rng is not rng:  # seeded or restored since: copies the new state to where the graph reads it
                rng.bit_generator._state[...] = generator.rng.bit_generator._state
                generator._rng = rng
            _ = generator.rng  # makes the current stream wait for the last draw

        self.before(update_state)


def now() -> Capture | None:
    """This thread's capture, or None."""
    return _device.capturing.now


@contextlib.contextmanager
def inside(capture: Capture) -> Iterator[None]:
    """A context in which `capture` is this thread's capture."""
    previous = _device.capturing.now
    _device.capturing.now = capture
    try:
        yield
    finally:
        _device.capturing.now = previous


def stream_is_capturing(xp: Any) -> bool:
    """Whether the current stream is being captured."""
    handle = xp.cuda.get_current_stream().ptr
    # `CUDAGraph.capture_begin` refuses default streams (handles 0 to 2), so none of them is being captured. For one of
    # them, `streamIsCapturing` may raise an error.
    return handle > 2 and bool(xp.cuda.runtime.streamIsCapturing(handle))


def refused(error: BaseException) -> bool:
    """Whether CUDA or CuPy raised this because an operation cannot be captured."""
    if isinstance(error, CaptureError):
        return False  # our own error names the cause already
    code = getattr(error, "status", None)
    if isinstance(code, int) and code in _REFUSED:
        return True
    return isinstance(error, RuntimeError) and "captur" in str(error).lower()


def broken(error: BaseException) -> bool:
    """Whether this is CUDA's error at the end of a broken capture: its traceback does not show what broke it."""
    return getattr(error, "status", None) in _BROKEN


@contextlib.contextmanager
def relaxed() -> Iterator[None]:
    """A context in which this thread may allocate memory and load kernels during a capture; neither is captured."""
    mode = ctypes.c_int(MODES["relaxed"])
    exchange = _exchange()
    exchange(ctypes.byref(mode))  # writes the previous mode to `mode`
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


@functools.cache
def _exchange() -> Any:
    """The driver's function cuThreadExchangeStreamCaptureMode, which CuPy does not offer."""
    return ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
