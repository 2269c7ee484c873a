"""What every collective shares: the ranks it runs among, and the way from checked arguments to a call in the line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeVar, overload

from collectives.errors import ArgumentError
from collectives.family import Family
from collectives.progress import Call, CallQueue, Steps, Work
from collectives.reduction import Array
from collectives.site import user_site
from collectives.transport import Transport

T = TypeVar("T")
Scale = float | Callable[[], float] | None
Lengths = Sequence[int] | Literal["equal"] | None


class Calls:
    """One rank's end of a communicator, without any collective: each family of them inherits this."""

    def __init__(self, transport: Transport, timeout: float, family: Family | None = None) -> None:
        self._transport = transport
        self.family = Family() if family is None else family
        self.queue = CallQueue(transport, self._ended)
        self.family.join(transport.key, self.queue)
        self.timeout = timeout
        self.rank = transport.rank
        self.size = transport.size
        self.local_rank = transport.local_rank
        self.local_size = transport.local_size
        self.node = transport.node
        self.backend = transport.name

    def _ended(self) -> None:
        self.family.leave(self._transport.key)

    @overload
    def _run(self, name: str, x: Array | None, steps: Steps[T], async_op: Literal[False], more: str = "") -> T: ...
    @overload
    def _run(self, name: str, x: Array | None, steps: Steps[T], async_op: bool, more: str = "") -> T | Work[T]: ...
    def _run(self, name: str, x: Array | None, steps: Steps[T], async_op: bool, more: str = "") -> T | Work[T]:
        call = Call(name, Words(x, more), user_site(), steps, self.timeout)
        if not async_op:
            return self.queue.run(call)
        self.queue.submit(call)
        return Work(call)

    def _check_root(self, root: int) -> None:
        if not isinstance(root, int) or not 0 <= root < self.size:
            raise ArgumentError(f"root should be a rank from 0 to {self.size - 1}, is {root!r}")


class Words:
    """A call's dtype, shape and options, put into words only when an error needs them."""

    __slots__ = ("dtype", "more", "shape")

    def __init__(self, x: Array | None, more: str) -> None:
        self.dtype = None if x is None else x.dtype
        self.shape = None if x is None else x.shape
        self.more = more

    def __str__(self) -> str:
        array = "" if self.dtype is None else f"{self.dtype} {self.shape}"
        return " ".join(part for part in (self.more, array) if part)
