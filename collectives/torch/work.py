"""Collectives under way as `torch.distributed.Work`, and their futures.

PyTorch's C++ code treats an exception from `Future.set_exception` as a result, looks for tensors in it, and crashes. It
treats an exception that a callback raises as an error. So `get_future` returns `started.then(callback)`, and the
callback raises the errors.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import graph
from torch.futures import Future

from collectives.engine.call import Work
from collectives.time_limit import Deadline
from collectives.torch.tensors import Tensors


def in_backward(caller: FrameType) -> bool:
    """Whether C++ code made this call during a backward, as DistributedDataParallel does; False for Python code."""
    return torch._C._current_graph_task_id() >= 0 and caller.f_code.co_filename == graph.__file__


class ProfilerEvent:
    """An event of PyTorch's profiler for one call: its name, the shapes of its inputs, and the time that it takes.

    `end` ends the event in a new thread. Because that is not the thread in which the event began, the profiler takes
    it for an asynchronous call, as it does with the calls of PyTorch's own backends.
    """

    def __init__(self, name: str, inputs: Tensors) -> None:
        event = torch.autograd._record_function_with_args_enter(name, *inputs)
        self._completed: Future[None] = Future()
        end = torch.ops.profiler._call_end_callbacks_on_jit_fut._RecordFunction
        self.ended = end(event, self._completed)

    def end(self, _: Work[Any] | None = None) -> None:
        try:
            threading.Thread(target=self._completed.set_result, args=(None,), daemon=True).start()
        except RuntimeError:  # No more threads can start.
            self._completed.set_result(None)


class TorchWork(dist.Work):  # type: ignore[misc]  # Any to mypy
    """Calls of collectives that PyTorch sees as one call.

    calls: in the order in which they were started; none if all is done; result: the tensors that will hold the result
    after: called once with the calls' results, in the first thread that waits for them
    in_order: False for sends and receives, which have no place in the order of calls
    event: the event in PyTorch's profiler, if the profiler is running; `wait` returns after the end of the event
    default_timeout: used by `wait` if it is called without a timeout; None: only the time limits of the calls hold
    """

    def __init__(
        self,
        calls: Sequence[Work[Any]],
        result: Sequence[Any],
        after: Callable[..., object] | None = None,
        in_order: bool = True,
        event: ProfilerEvent | None = None,
    ) -> None:
        super().__init__()
        self.calls = calls
        self._result = list(result)
        self._after = after
        self._in_order = in_order
        self._lock = threading.Lock()
        self._future: Future[Any] | None = None
        self._event = event
        self.default_timeout: timedelta | None = None
        if event is not None and calls:
            calls[-1].add_done_callback(event.end)
        elif event is not None:  # a coalesced collective without tensors
            event.end()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits until all calls are complete.

        timeout: for all calls together; None or 0: `default_timeout`
        Raises: CollectiveTimeout if a call is not complete in time; the error of a failed call; what `after` raises.
        """
        timeout = timeout or self.default_timeout
        seconds = 0.0 if timeout is None else timeout.total_seconds()
        deadline = Deadline(seconds) if seconds else None
        results = [call.wait(deadline) for call in self.calls]
        if self._after is not None:
            with self._lock:
                after = self._after
                if after is not None:
                    after(*results)
                    self._after = None
        if self._event is not None:
            self._event.ended.wait()
        return True

    def synchronize(self) -> None:
        self.wait()

    def _is_done(self) -> bool:
        return all(call.done() for call in self.calls)

    def _end(self) -> Exception | None:
        """Waits until all calls are complete. Returns: the error of a failed call, or None"""
        try:
            self.wait()
        except Exception as error:
            return error
        return None

    def is_completed(self) -> bool:
        if not self._is_done():
            return False
        self._end()  # a caller that sees True may read the result
        return True

    def is_success(self) -> bool:
        return self._is_done() and self._end() is None

    def exception(self) -> Exception | None:
        return self._end() if self._is_done() else None

    def result(self) -> list[Any]:
        return self._result

    def _source_rank(self) -> int:
        """The sender's rank, for a receive from any source; -1 for other calls."""
        result = self.calls[0].wait() if self.calls else None
        return result[1] if isinstance(result, tuple) else -1

    source_rank = _source_rank

    def get_future(self) -> Future[Any]:
        """A future of the tensors that hold the result.

        C++ code that calls this during backward, as DDP does, gets a future that may complete later, and continues
        computing. Python code may add callbacks that start further calls (PowerSGD does). The place of these calls in
        the order of calls must not depend on when this call ends. So for a collective, Python code waits here, and gets
        a complete future, whose callbacks run at once. Sends and receives have no place in the order. So their future
        may complete later.
        """
        if self._future is None:
            started: Future[None] = Future()
            later = not self._in_order or in_backward(sys._getframe(1))
            if later and not self._is_done():
                self.calls[-1].add_done_callback(lambda _: started.set_result(None))
            else:
                self._end()
                started.set_result(None)
            self._future = started.then(self._outcome)
        return self._future

    def _outcome(self, _: Future[None]) -> list[Any]:
        self.wait()
        return self._result
