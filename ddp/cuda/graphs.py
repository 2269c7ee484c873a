"""CUDA graphs: device work that is recorded once and launched as one, so that the host's time per kernel is gone.

As in PyTorch: `with ddp.cuda.graph(g): y = f(x)` captures, `g.replay()` runs it again on the same memory.
"""

from __future__ import annotations

import contextlib
import gc
from typing import Any

from ddp import _device, _precision
from ddp._cuda import capture, memory_pool
from ddp._cuda.capture import MODES, Capture
from ddp._cuda.stream_order import StreamGuard
from ddp._device import device
from ddp.cuda.streams import device_stream_of
from ddp.errors import ArgumentError, CaptureError, DtypeError


def is_current_stream_capturing() -> bool:
    """Whether what this thread launches now becomes part of a CUDA graph, and does not run. False without a GPU."""
    xp = _device.found_cupy()
    return xp is not None and capture.stream_is_capturing(xp)


def graph_pool_handle() -> Any:
    """A pool of memory for graphs that share it: `graph(g, pool=...)`. Raises: DeviceError without a GPU."""
    return capture.private_pool(device("cuda").xp)


class CUDAGraph:
    """Work of the device that was captured, and that `replay` launches again, on the same memory.

    What was allocated during the capture is in a pool of the graph's own, which nobody else allocates from; graphs that
    share one are replayed one after the other, in the order of their captures. Memory from elsewhere (parameters,
    gradients, optimizer state, inputs) must live as long as the graph. The host's part of what was captured does not
    happen again: Python's numbers are constants of the graph.

    Raises: DeviceError without a GPU.
    """

    def __init__(self) -> None:
        self._xp = device("cuda").xp
        self._reset()

    def _reset(self) -> None:
        self._graph: Any = None
        self._pool: Any = None
        self._stream: Any = None
        self._inside: Any = None
        self.told = Capture()  # what the captured code tells of itself: what to do around every launch

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "thread_local") -> None:
        """From now on, what this thread launches on the current stream is recorded, and does not run.

        pool: of `graph_pool_handle()`, or another graph's `pool()`; None: one of its own
        capture_error_mode: "global": other threads may meanwhile neither allocate nor free; "thread_local", "relaxed":
        they may. This thread may always, and may load kernels: the graph has no part of it.

        Raises: ArgumentError for an unknown mode, or on the default stream; DtypeError for what is no pool;
        CaptureError if this graph has been captured, or the thread is in another capture.
        """
        if capture_error_mode not in MODES:
            raise ArgumentError(f"capture_error_mode is one of {', '.join(MODES)}, not {capture_error_mode!r}")
        if pool is not None and not hasattr(pool, "malloc"):
            raise DtypeError(f"pool: expected a graph's pool() or graph_pool_handle(), got {type(pool).__name__}")
        if self._graph is not None:
            raise CaptureError("capture_begin: this graph has been captured; reset() it first")
        _alone()
        stream = self._xp.cuda.get_current_stream()
        if stream.ptr in (0, 1, 2):
            raise ArgumentError("capture_begin: the default stream cannot be captured; use ddp.cuda.graph()")
        for each in _device.thread_generators():  # one that is made within the graph would begin anew with each replay
            _ = each.rng
        self._pool = capture.private_pool(self._xp) if pool is None else pool
        self._stream = stream
        self.told = Capture()
        self.told.fix(lambda: _precision.matmul.tf32)
        stream.begin_capture(MODES[capture_error_mode])
        self._inside = contextlib.ExitStack()
        self._inside.enter_context(capture.inside(self.told))
        self._inside.enter_context(capture.relaxed())
        self._inside.enter_context(self._xp.cuda.using_allocator(self._pool.malloc))

    def capture_end(self) -> None:
        """Ends the capture; the graph can be replayed. Raises: CaptureError if something has broken it."""
        if self._inside is None:
            raise CaptureError("capture_end: nothing is being captured")
        inside, self._inside = self._inside, None
        inside.close()
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
        self.told.keep(self._pool)
        self.told.undos.clear()

    def abandon(self) -> None:
        """Ends a capture that came to nothing; the stream is as it was before."""
        if self._inside is not None:
            self._inside.close()
            with contextlib.suppress(Exception):  # what broke it is being raised already
                self._stream.end_capture()
        self._undo()

    def _undo(self) -> None:
        undos = self.told.undos
        self._reset()
        while undos:
            undos.pop()()

    def replay(self) -> None:
        """Launches the graph on the current stream. Raises: CaptureError if nothing was captured."""
        if self._graph is None:
            raise CaptureError("replay: nothing has been captured")
        for run in self.told.befores:
            run()
        self._graph.launch()
        for run in self.told.afters:
            run()

    def reset(self) -> None:
        """Lets go of the graph and its memory, which results that still live keep. It may be captured anew.

        The memory goes back to CUDA at the next capture, in `empty_cache`, or before an allocation fails.
        """
        if self._inside is not None:
            raise CaptureError("reset: the capture is under way")
        self._reset()

    def pool(self) -> Any:
        """The pool of its memory, for other graphs to share. Raises: CaptureError before a capture."""
        if self._pool is None:
            raise CaptureError("pool: nothing has been captured")
        return self._pool


def _alone() -> None:
    if capture.now() is not None:
        raise CaptureError("capture_begin: this thread is in a capture already")


class graph:
    """Captures the body into `cuda_graph`, on a stream of its own: `with ddp.cuda.graph(g): y = model(x)`.

    pool, capture_error_mode: see `CUDAGraph.capture_begin`; stream: to capture on, a `ddp.cuda.Stream` or CuPy's

    Nothing of the body runs before the first replay. If it raises, the capture is ended and nothing is kept.
    Raises: CaptureError where the body does what no graph can contain, with the reason as its cause; DtypeError.
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
        self._inside = StreamGuard(device_stream_of(stream, "graph"))

    def __enter__(self) -> None:
        _alone()
        xp = self._graph._xp
        gc.collect()  # what it would free in the middle of the capture
        xp.cuda.Device().synchronize()
        # What a warm-up on this stream has freed: the graph allocates from a pool of its own, and replays not at all.
        memory_pool.allocator(xp).release(self._inside.lane.stream)
        self._inside.__enter__()
        try:
            self._graph.capture_begin(self._pool, self._mode)
        except BaseException:
            self._inside.__exit__(None, None, None)
            raise

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            if error is None:
                self._graph.capture_end()
            else:
                self._graph.abandon()
        finally:
            self._inside.__exit__(None, None, None)
        if error is not None and capture.refused(error):
            raise CaptureError(f"this cannot be part of a CUDA graph: {error}") from error
