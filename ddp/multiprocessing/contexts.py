"""The three ways to start a process, with our pipes and queues; the default is the one that is safe.

`fork` copies locks that threads hold, MPI's and CUDA's state: children hang or crash. So the default is `spawn`, where
the standard library's own, and PyTorch's, is what the system prefers.
"""

from __future__ import annotations

from multiprocessing import context
from typing import Any

from ddp.multiprocessing.connections import JoinableQueue, Queue, SharingConnection, SimpleQueue, make_pipe
from ddp.multiprocessing.pickling import share_small_tensors


class _SharingContext(context.BaseContext):
    """What our contexts make of their own."""

    def Pipe(self, duplex: bool = True) -> tuple[SharingConnection, SharingConnection]:
        """The two ends of a new pipe: both send and receive; with duplex off the first receives, the second sends."""
        return make_pipe(duplex)

    def Queue(self, maxsize: int = 0) -> Queue:
        """A queue of at most `maxsize` objects; 0: of any number."""
        return Queue(maxsize, ctx=self.get_context())

    def JoinableQueue(self, maxsize: int = 0) -> JoinableQueue:
        """A queue that can be waited for: `join` returns when `task_done` was called for each object."""
        return JoinableQueue(maxsize, ctx=self.get_context())

    def SimpleQueue(self) -> SimpleQueue:
        """A pipe with a lock at each end."""
        return SimpleQueue(ctx=self.get_context())

    def get_context(self, method: str | None = None) -> Any:
        """The context of that start method: "spawn", "forkserver" or "fork"; this one for None.

        It has all that this module has. Raises: ValueError for another method.
        """
        if method is None:
            return self
        try:
            return _BY_METHOD[method]
        except KeyError:
            raise ValueError(f"cannot find context for {method!r}: expected one of {', '.join(_BY_METHOD)}") from None


class SpawnProcess(context.SpawnProcess):
    """A process that starts in a new interpreter; tensors in its arguments go by handle."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        return _start(context.SpawnProcess, process_obj)


class ForkServerProcess(context.ForkServerProcess):
    """A process that a server forks, which was started before anything else was; tensors as above."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        return _start(context.ForkServerProcess, process_obj)


def _start(kind: Any, process_obj: Any) -> Any:
    share_small_tensors((process_obj._args, process_obj._kwargs))
    popen = kind._Popen(process_obj)
    vars(popen).pop("fd_owners", None)
    return popen


class SpawnContext(_SharingContext, context.SpawnContext):
    """Starts processes by spawn."""

    Process = SpawnProcess


class ForkServerContext(_SharingContext, context.ForkServerContext):
    """Starts processes by forkserver."""

    Process = ForkServerProcess


class ForkContext(_SharingContext, context.ForkContext):
    """Starts processes by fork."""


_BY_METHOD: dict[str, Any] = {"spawn": SpawnContext(), "forkserver": ForkServerContext(), "fork": ForkContext()}


class Process(context.Process):
    """A process that runs `target(*args, **kwargs)`, or `run` of a subclass, in the way set by `set_start_method`.

    As the standard library's; tensors in its arguments go by handle, and are shared from then on.
    """

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        return default.get_context().Process._Popen(process_obj)


class DefaultContext(_SharingContext, context.DefaultContext):
    """The context behind the names of this module: spawn, until `set_start_method` says otherwise.

    That sets ours alone: the standard library's own setting stays.
    """

    Process = Process  # which asks this context for its method
    _default_context: Any
    _actual_context: Any

    def get_context(self, method: str | None = None) -> Any:
        """The context of that start method: "spawn", "forkserver" or "fork"; the one in use for None.

        It has all that this module has. Raises: ValueError for another method.
        """
        if method is not None:
            return super().get_context(method)
        if self._actual_context is None:
            self._actual_context = self._default_context
        return self._actual_context

    def set_start_method(self, method: str | None, force: bool = False) -> None:
        """Sets how processes are started: "spawn", the default, "forkserver" or "fork"; once, unless `force`.

        Raises: RuntimeError if it is set already; ValueError.
        """
        super().set_start_method(method, force)

    def get_start_method(self, allow_none: bool = False) -> Any:
        """How processes are started; with `allow_none`, None while it was neither set nor asked for."""
        return super().get_start_method(allow_none)

    def get_all_start_methods(self) -> list[str]:
        """The methods that there are, the default first."""
        return list(_BY_METHOD)


default = DefaultContext(_BY_METHOD["spawn"])
