"""Point to point: send and recv, for what only two ranks have to do with.

A letter goes first: dtype and shape, and the array itself if it is small. A large array follows under a tag that the
letter names, so that it can go straight into its place whatever else is under way between the two ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Literal, TypeGuard, TypeVar, overload

import numpy as np

from collectives import header
from collectives.arrays import as_array, as_bytes, check_out, contiguous, is_device_array
from collectives.call import Call, Steps, Words, Work
from collectives.calls import Calls, whole
from collectives.family import Family
from collectives.mail import Mail
from collectives.reduction import Array
from collectives.site import user_site
from collectives.transport import LETTER, TAGS, Transport

T = TypeVar("T")


class Pairs(Calls):
    """The point-to-point calls of a communicator."""

    def __init__(self, transport: Transport, timeout: float, family: Family | None = None) -> None:
        super().__init__(transport, timeout, family)
        self._mail = Mail(self.queue, transport)
        self._apart = itertools.count()
        self._to_myself: dict[tuple[int, int], Array] = {}

    def send(self, x: Any, dst: int, *, tag: int = 0, async_op: bool = False) -> Any:
        """Sends x to rank dst, which receives it by `recv`.

        x: (...), of any dtype; dst: a rank; tag: 0 to 16,383, letters of different tags do not mix
        What is sent to one rank under one tag arrives in order. An array of up to about 4,000 bytes is on its way when
        this returns; a larger one is complete only when dst receives it, so two ranks that exchange large arrays must
        send with `async_op=True`, or one of them receive first. What a rank sends to itself is copied.

        Returns: None
        Raises: ArgumentError if there is no such rank or tag; PeerLeft if dst leaves without receiving it.
        """
        dst, tag = self._check_letter(dst, "dst", tag)
        source = self._device(x).letter(x) if is_device_array(x) else as_array(x)
        moved = contiguous(source)

        def steps(call: Call[None]) -> Steps[None]:
            if dst == self.rank:
                self._to_myself[tag, call.number] = moved.copy()
                return
            letter, apart = header.encode_letter(moved, TAGS + next(self._apart) % TAGS)
            first = self._transport.send(letter, dst, tag)
            second = self._transport.send(as_bytes(moved), dst, apart) if apart else None
            yield first
            if second is not None:
                yield second

        call = self._letter_call("send", source, steps, dst, f"to {dst} tag {tag}")
        call.line = self._line(self.rank, dst, tag, "received")
        return self._post(call, self._line(self.rank, dst, tag, "sent"), async_op)

    def recv(self, src: int, *, tag: int = 0, out: Any = None, async_op: bool = False) -> Any:
        """What rank src sends to this one.

        src, tag: as in `send`; out: (...) of the sender's shape and dtype
        Returns: a new array of the sender's shape and dtype, or out
        Raises: ArgumentError if there is no such rank or tag, or out does not fit, in which case the letter is lost;
        PeerLeft if src leaves without sending it.
        """
        src, tag = self._check_letter(src, "src", tag)
        if is_device_array(out):
            door = self._device(out)
            if async_op:
                return door.delivered(self.recv(src, tag=tag, async_op=True), out)
            return door.deliver(self.recv(src, tag=tag), out)
        target = None if out is None else as_array(out, "out")

        def steps(call: Call[Any]) -> Steps[Any]:
            if src == self.rank:
                place = (tag, call.number)
                yield lambda: place in self._to_myself
                return _hand_over(self._to_myself.pop(place), target, out)
            letter = np.empty(LETTER, np.uint8)
            yield self._transport.recv(letter, src, tag)
            dtype, shape, apart, body = header.decode_letter(letter)
            came = target if _takes(target, shape, dtype) else np.empty(shape, dtype)
            if apart:
                yield self._transport.recv(as_bytes(came), src, apart)
            else:
                as_bytes(came)[:] = body[: came.nbytes]
            return _hand_over(came, target, out)

        call = self._letter_call("recv", target, steps, src, f"from {src} tag {tag}")
        call.line = self._line(src, self.rank, tag, "sent")
        return self._post(call, self._line(src, self.rank, tag, "received"), async_op)

    def _letter_call(
        self, name: str, x: Array | None, steps: Callable[[Call[T]], Steps[T]], peer: int, more: str
    ) -> Call[T]:
        call: Call[T] = Call(name, Words(x, more), user_site(), self.timeout)
        call.steps = steps(call)
        call.peer = peer
        return call

    @overload
    def _post(self, call: Call[T], line: str, async_op: Literal[False]) -> T: ...
    @overload
    def _post(self, call: Call[T], line: str, async_op: bool) -> T | Work[T]: ...
    def _post(self, call: Call[T], line: str, async_op: bool) -> T | Work[T]:
        if not async_op:
            return self._mail.run(call, line)
        self._mail.submit(call, line)
        return Work(call)

    def _check_letter(self, peer: Any, what: str, tag: Any) -> tuple[int, int]:
        rank = whole(peer, 0, self.size - 1, f"{what} should be a rank")
        return rank, whole(tag, 0, TAGS - 1, "tag should be a number")

    def _line(self, src: int, dst: int, tag: int, end: str) -> str:
        return f"{self._transport.key} {src}>{dst} #{tag} {end}"

    def _ended(self) -> None:
        self._mail.end()
        super()._ended()


def _takes(target: Array | None, shape: tuple[int, ...], dtype: np.dtype[Any]) -> TypeGuard[Array]:
    """True if an array of that shape and dtype can arrive in `target` itself."""
    if target is None or target.shape != shape or target.dtype != dtype:
        return False
    return target.flags.c_contiguous and target.flags.writeable


def _hand_over(came: Array, target: Array | None, out: Any) -> Any:
    """The result: what came, or `out` as the caller gave it, whose array is `target`."""
    if target is None:
        return came
    if target is not came:
        np.copyto(check_out(target, came.shape, came.dtype), came)
    return out
