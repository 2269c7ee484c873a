"""What is known of a CUDA graph while it is captured: a graph replays work of the device, and nothing of the host.

Whatever the host decides, counts or remembers in a captured step stands still when the graph is launched again. So
whoever keeps such a thing tells the capture that its thread is in: `now()` is None outside of one.

    now().fix(look)     `look()` is a value of the host that the graph has taken in, compared with `==`: where it is
                        another one before a launch, the graph does not fit, and the step is captured anew
    now().before(run)   `run()` is called before every launch, on its stream: what the graph reads is brought up to date
    now().after(run)    `run()` is called after every launch: what the step's own code would have noted on the host
    now().keep(thing)   lives as long as the graph, because kernels of it read or write there
    now().undo(run)     `run()` is called if the capture comes to nothing: what its Python code has noted did not happen
    now().lasting(xp)   in the body, memory is allocated that keeps its numbers from launch to launch. Elsewhere in a
                        capture it comes from the graph's own pool, and earlier kernels of the graph may use it before

Generators have their state in device memory, so that replays go on drawing. A kernel that makes random numbers of a
counter takes its key from a generator on the device, and no number from the host: that would be one for all replays.

An optimizer, for example, whose learning rate is in device memory has that in lasting memory, uploads it in `before`,
and fixes which parameters there are.
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

MODES = {"global": 0, "thread_local": 1, "relaxed": 2}  # cudaStreamCaptureMode
_BROKEN = (901, 903, 904, 908)  # cudaErrorStreamCapture...: Invalidated, Unmatched, Unjoined, WrongThread
_REFUSED = range(900, 909)  # cudaErrorStreamCaptureUnsupported ... cudaErrorStreamCaptureWrongThread


class Capture:
    """One capture under way: what its graph will have to be told."""

    def __init__(self) -> None:
        self.fixed: list[tuple[Callable[[], Any], Any]] = []
        self.befores: list[Callable[[], object]] = []
        self.afters: list[Callable[[], object]] = []
        self.undos: list[Callable[[], object]] = []
        self.kept: list[Any] = []
        self._drawn: dict[int, tuple[Any, stream_order.DeviceStream]] = {}  # generators, and the streams that drew last
        self._lasting: Any = None

    @contextlib.contextmanager
    def lasting(self, xp: Any) -> Iterator[None]:
        """In the body, memory is allocated that nothing else in the graph uses."""
        if self._lasting is None:
            self._lasting = private_pool(xp)
        with xp.cuda.using_allocator(self._lasting.malloc):
            yield

    def fix(self, look: Callable[[], Any]) -> None:
        """The graph holds for as long as `look()` gives what it gives now."""
        self.fixed.append((look, look()))

    def before(self, run: Callable[[], object]) -> None:
        """Calls `run` before every launch."""
        self.befores.append(run)

    def after(self, run: Callable[[], object]) -> None:
        """Calls `run` after every launch."""
        self.afters.append(run)

    def undo(self, run: Callable[[], object]) -> None:
        """Calls `run` if the capture fails, the last one first."""
        self.undos.append(run)

    def keep(self, *things: Any) -> None:
        """Keeps these as long as the graph."""
        self.kept.extend(things)

    def fits(self) -> bool:
        """Whether everything that the graph has taken in is as it was."""
        return all(look() == value for look, value in self.fixed)

    def drawn(self, stream: Any) -> None:
        """Random numbers were drawn: their generator's state is in device memory, and must be the one that goes on.

        Raises: CaptureError for a generator that has not been drawn from before, as the graph would begin it anew.
        """
        if stream.device.type == "cpu":
            return
        here = stream_order.current(stream.device.xp, stream.device.index)
        if (known := self._drawn.get(id(stream))) is not None:
            if here != known[1] and here.capturing:  # another stream of the graph
                if known[1].capturing:
                    here.after(known[1])
                self._drawn[id(stream)] = stream, here
            return
        if stream._rng is None:
            raise CaptureError(
                "a generator that was never drawn from on the GPU would begin anew with every replay: draw from it "
                "once before the capture"
            )
        self._drawn[id(stream)] = stream, here
        rng = stream._rng

        def go_on() -> None:
            if stream._rng is not rng:  # seeded anew, or put back to a snapshot
                rng.bit_generator._state[...] = stream.rng.bit_generator._state
                stream._rng = rng
            _ = stream.rng  # the launch comes after the last draw, on whichever stream that was

        self.before(go_on)


def now() -> Capture | None:
    """The capture that this thread is in."""
    return _device.capturing.now


@contextlib.contextmanager
def inside(capture: Capture) -> Iterator[None]:
    """In the body, this thread is in `capture`."""
    before, _device.capturing.now = _device.capturing.now, capture
    try:
        yield
    finally:
        _device.capturing.now = before


def stream_is_capturing(xp: Any) -> bool:
    """Whether the current stream is being captured; the default stream never is, and must not be asked."""
    pointer = xp.cuda.get_current_stream().ptr
    return pointer > 2 and bool(xp.cuda.runtime.streamIsCapturing(pointer))


def refused(error: BaseException) -> bool:
    """Whether CUDA or CuPy raised this because it cannot be part of a graph."""
    if isinstance(error, CaptureError):
        return False  # is one, and says more
    code = getattr(error, "status", None)
    if isinstance(code, int) and code in _REFUSED:
        return True
    return isinstance(error, RuntimeError) and "captur" in str(error).lower()


def broken(error: BaseException) -> bool:
    """Whether this is what CUDA says at the end of a capture that something had broken before: no line is to blame."""
    return getattr(error, "status", None) in _BROKEN


def private_pool(xp: Any) -> Any:
    """A pool of device memory that nobody else allocates from; it may grow during a capture."""
    from ddp._cuda import memory_pool  # it asks here whether a graph is captured

    return memory_pool.allocator(xp).private_pool()


@contextlib.contextmanager
def relaxed() -> Iterator[None]:
    """In the body this thread may do what captures forbid, as allocate or load a kernel: it is no part of the graph."""
    mode = ctypes.c_int(MODES["relaxed"])
    exchange = _exchange()
    exchange(ctypes.byref(mode))  # gives back the mode that was
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


@functools.cache
def _exchange() -> Any:
    """cuThreadExchangeStreamCaptureMode, which CuPy does not have."""
    return ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
