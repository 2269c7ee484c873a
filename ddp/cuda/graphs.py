"""CUDA graphs: work that is captured once and launched as a whole, so that the host does not launch each kernel.

As in PyTorch, `with ddp.cuda.graph(g): y = f(x)` captures `f`, and `g.replay()` runs its kernels on the same memory.
"""

from __future__ import annotations

import contextlib
import gc
from functools import partial
from typing import Any

from ddp import _device, _precision
from ddp._cuda import capture, memory_pool
from ddp._cuda.capture import MODES, Capture
from ddp._cuda.stream_order import StreamGuard
from ddp._device import device
from ddp.cuda.streams import device_stream_of
from ddp.errors import ArgumentError, CaptureError, DtypeError


def is_current_stream_capturing() -> bool:
    """Whether this thread's current stream is being captured into a CUDA graph. False without a GPU."""
    xp = _device.found_cupy()
    return xp is not None and capture.stream_is_capturing(xp)


def graph_pool_handle() -> Any:
    """A memory pool that several graphs can share: `graph(g, pool=...)`. Raises: DeviceError without a GPU."""
    return memory_pool.private_pool(device("cuda").xp)


class CUDAGraph:
    """Captured work of a GPU that `replay` launches again, on the same memory.

    Memory that was allocated during the capture is in the graph's pool, from which only graphs that share the pool
    allocate. Such graphs have to be replayed in the order of their captures, and not at the same time. Other memory
    (parameters, gradients, optimizer state, inputs) must live as long as the graph. A replay does not run Python code:
    numbers that the host computed during the capture are constants of the graph.

    captured: the callbacks and guarded values of the captured code; see `ddp._cuda.capture`

    Raises: DeviceError without a GPU.
    """

    def __init__(self) -> None:
        self._xp = device("cuda").xp
        self._reset()

    def _reset(self) -> None:
        self._graph: Any = None
        self._pool: Any = None
        self._stream: Any = None
        self._contexts: Any = None
        self.captured = Capture(partial(memory_pool.private_pool, self._xp))

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "thread_local") -> None:
        """Begins to capture the work that this thread launches on the current stream. That work does not run now.

        pool: from `graph_pool_handle()`, or another graph's `pool()`; None: a new one
        capture_error_mode: "global": other threads must not allocate or free memory during the capture; "thread_local",
        "relaxed": they may. This thread may allocate memory and load kernels in every mode; neither is captured.

        Raises: ArgumentError for an unknown mode, or on the default stream; DtypeError for an invalid pool;
        CaptureError if this graph has been captured, or the thread is in another capture.
        """
        if capture_error_mode not in MODES:
            raise ArgumentError(f"capture_error_mode is one of {', '.join(MODES)}, not {capture_error_mode!r}")
        if pool is not None and not hasattr(pool, "malloc"):
            raise DtypeError(f"pool: expected a graph's pool() or graph_pool_handle(), got {type(pool).__name__}")
        if self._graph is not None:
            raise CaptureError("capture_begin: this graph has been captured; reset() it first")
        _check_not_capturing()
        stream = self._xp.cuda.get_current_stream()
        if stream.ptr in (0, 1, 2):
            raise ArgumentError("capture_begin: the default stream cannot be captured; use ddp.cuda.graph()")
        for generator in _device.thread_generators():
            _ = generator.rng  # creates its state: a state created in the capture would begin anew at every replay
        self._pool = memory_pool.private_pool(self._xp) if pool is None else pool
        self._stream = stream
        self.captured = Capture(partial(memory_pool.private_pool, self._xp))
        self.captured.guard_value(lambda: _precision.matmul.tf32)
        stream.begin_capture(MODES[capture_error_mode])
        self._contexts = contextlib.ExitStack()
        self._contexts.enter_context(capture.inside(self.captured))
        self._contexts.enter_context(capture.relaxed())
        self._contexts.enter_context(self._xp.cuda.using_allocator(self._pool.malloc))

    def capture_end(self) -> None:
        """Ends the capture. Raises: CaptureError if no capture was begun, or an operation cannot be captured."""
        if self._contexts is None:
            raise CaptureError("capture_end: nothing is being captured")
        contexts = self._contexts
        self._contexts = None
        contexts.close()
        try:
            self._graph = self._stream.end_capture()
        except Exception as error:
            self._undo()
            if not isinstance(error, RuntimeError):
                raise
            raise CaptureError(
                f"the capture was broken: {error}. A stream that took part must have been joined by an event, and "
                "nothing may have asked a captured event or stream whether it is done"
            ) from error
        self.captured.keep_alive(self._pool)
        self.captured.undos.clear()

    def abandon(self) -> None:
        """Ends a capture after an error, and discards it."""
        if self._contexts is not None:
            self._contexts.close()
            with contextlib.suppress(Exception):  # the error that broke the capture is being raised already
                self._stream.end_capture()
        self._undo()

    def _undo(self) -> None:
        undos = self.captured.undos
        self._reset()
        while undos:
            undos.pop()()

    def replay(self) -> None:
        """Launches the graph on the current stream. Raises: CaptureError if nothing was captured."""
        if self._graph is None:
            raise CaptureError("replay: nothing has been captured")
        for run in self.captured.befores:
            run()
        self._graph.launch()
        for run in self.captured.afters:
            run()

    def reset(self) -> None:
        """Drops the graph, so that another one can be captured. Results that are still used keep their memory.

        Other memory of the graph is freed now if possible, otherwise at the next capture, by `empty_cache`, or before
        an allocation fails. Raises: CaptureError during the capture.
        """
        if self._contexts is not None:
            raise CaptureError("reset: the capture is under way")
        self._reset()

    def pool(self) -> Any:
        """The graph's memory pool, which other graphs can share. Raises: CaptureError before a capture has begun."""
        if self._pool is None:
            raise CaptureError("pool: nothing has been captured")
        return self._pool


def _check_not_capturing() -> None:
    if capture.now() is not None:
        raise CaptureError("capture_begin: this thread is in a capture already")


class graph:
    """A context whose work is captured into `cuda_graph`: `with ddp.cuda.graph(g): y = model(x)`.

    pool, capture_error_mode: see `CUDAGraph.capture_begin`
    stream: the stream to capture on, a `ddp.cuda.Stream` or a CuPy stream; None: a new one

    The work does not run before the first replay. If the body raises, the capture is discarded.
    Raises: CaptureError for an operation that cannot be captured, with CUDA's error as its cause; DtypeError for a
    graph or a stream of another type; what `capture_begin` raises.
    """

    def __init__(
        self, cuda_graph: CUDAGraph, pool: Any = None, stream: Any = None, capture_error_mode: str = "thread_local"
    ) -> None:
        self._graph = cuda_graph
        self._pool = pool
        self._mode = capture_error_mode
        if not isinstance(cuda_graph, CUDAGraph):
            raise DtypeError(f"graph: expected a ddp.cuda.CUDAGraph, got {type(cuda_graph).__name__}")
        xp = cuda_graph._xp
        if stream is None:
            stream = xp.cuda.Stream(non_blocking=True)
        self._guard = StreamGuard(device_stream_of(stream, "graph"))

    def __enter__(self) -> None:
        _check_not_capturing()
        xp = self._graph._xp
        gc.collect()  # now, so that a garbage collection during the capture finds hardly any memory to free
        xp.cuda.Device().synchronize()
        # Frees cached blocks of this stream, from a warm-up for example: the graph allocates from another pool.
        memory_pool.allocator(xp).release(self._guard.stream.cupy_stream)
        self._guard.__enter__()
        try:
            self._graph.capture_begin(self._pool, self._mode)
        except BaseException:
            self._guard.__exit__(None, None, None)
            raise

    def __exit__(self, error_type: Any, error: BaseException | None, trace: Any) -> None:
        try:
            if error is None:
                self._graph.capture_end()
            else:
                self._graph.abandon()
        finally:
            self._guard.__exit__(None, None, None)
        if error is not None and capture.refused(error):
            raise CaptureError(f"this cannot be part of a CUDA graph: {error}") from error
