"""Collectives under way as `torch.distributed.Work`, and their futures.

To PyTorch's C++ code `Future.set_exception` is a result, in which it looks for tensors, and crashes. What a callback
raises is an error there. So every future here is `started.then(...)` of another one, and errors are raised in there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.futures import Future

import collectives
from collectives.engine.waiting import spin

_THREADS = 64
# s; how long a future waits for the callbacks of the one before it, which may wait for this one.
_PATIENCE = 1.0


class FutureThreads:
    """The threads in which futures are completed.

    What PyTorch hangs on a future may wait for other calls (PowerSGD does), so this must not happen in the thread that
    carries calls out. Callbacks also start calls, which must be in the same order on every rank: so a future's
    callbacks begin when those of the one before it have ended.
    """

    def __init__(self) -> None:
        self._here = threading.local()
        self._pool = ThreadPoolExecutor(_THREADS, "collectives-futures")
        self._lock = threading.Lock()
        self._last = threading.Event()
        self._last.set()

    def are_current(self) -> bool:
        """True in one of these threads."""
        return hasattr(self._here, "completing")

    def complete(self, future: Future[None]) -> None:
        """Completes the future in one of these threads, after all futures for which this was called before."""
        with self._lock:
            before = self._last
            self._last = mine = threading.Event()
        try:
            self._pool.submit(self._complete, future, before, mine)
        except RuntimeError:  # the interpreter ends, and no thread can be started
            self._complete(future, before, mine)

    def _complete(self, future: Future[None], before: threading.Event, mine: threading.Event) -> None:
        before.wait(_PATIENCE)
        self._here.completing = True
        try:
            future.set_result(None)
        finally:
            mine.set()


_threads = FutureThreads()


class TorchWork(dist.Work):
    """Calls of collectives that PyTorch sees as one.

    calls: in the order in which they were started; result: the tensors that hold what they bring
    after: called once with their results, in the first thread that waits for them
    small: they take so little time that it is worth waiting for them when a future is asked for
    """

    def __init__(
        self,
        calls: Sequence[collectives.Work[Any]],
        result: Sequence[Any],
        after: Callable[..., object] | None = None,
        small: bool = False,
    ) -> None:
        super().__init__()
        self.calls = calls
        self._result = list(result)
        self._after = after
        self._small = small
        self._lock = threading.Lock()
        self._future: Future[Any] | None = None
        self._source = -1

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Raises: CollectiveTimeout if they are not complete by then; what ended them."""
        seconds = None if timeout is None else timeout.total_seconds() or None
        results = [call.wait(seconds) for call in self.calls]
        if self._after is not None:
            with self._lock:
                after = self._after
                if after is not None:
                    after(*results)
                    self._after = None
        return True

    def synchronize(self) -> None:
        self.wait()

    def _poll(self) -> bool:
        return all(call.poll() for call in self.calls)

    def _is_done(self) -> bool:
        return all(call.done() for call in self.calls)

    def _end(self) -> Exception | None:
        """Waits. Returns: what ended them"""
        try:
            self.wait()
        except Exception as error:
            return error
        return None

    def is_completed(self) -> bool:
        if not self._is_done():
            return False
        self._end()  # whoever sees True may read the result
        return True

    def is_success(self) -> bool:
        return self._is_done() and self._end() is None

    def exception(self) -> Exception | None:
        return self._end() if self._is_done() else None

    def result(self) -> list[Any]:
        return self._result

    def set_source(self, rank: int) -> None:
        """rank: from which a receive of any source has got its message"""
        self._source = rank

    def _source_rank(self) -> int:
        return self._source

    source_rank = _source_rank

    def get_future(self) -> Future[Any]:
        """A future of the tensors that hold the result."""
        if self._future is None:
            started: Future[None] = Future()
            if self._is_ready():
                started.set_result(None)
            else:
                self.calls[-1].add_done_callback(lambda _: _threads.complete(started))
            self._future = started.then(self._outcome)
        return self._future

    def _is_ready(self) -> bool:
        """True if the future need not be completed in another thread."""
        if _threads.are_current():
            # In a callback, which may be about to wait for this one: those threads must not wait for each other.
            self._end()
            return True
        return self._poll() or (self._small and spin(self._poll))

    def _outcome(self, _: Future[None]) -> list[Any]:
        self.wait()
        return self._result
