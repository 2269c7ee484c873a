"""Small calls that are made again and again: checked once, prepared, and then run in a few microseconds.

A call is prepared by where it stands in the code and by what it is called with: op, root, dtype, shape. The general way
has carried out the first one and found nothing wrong with it, so that of the next only what may have changed needs a
look. Between the ranks the two ways are the same, and ranks may take different ones in one call. What is out of the
ordinary (a rank that is late, another call on another rank, longer rows) is left to the general way, which takes over
with the header already published.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Hashable, Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple

import numpy as np

from collectives.arrays import flat, is_plain
from collectives.backends.shm.control_block import INLINE_BYTES, ControlBlock
from collectives.backends.shm.shm_transport import ShmTransport
from collectives.backends.shm.takes import Result, inline_arrays
from collectives.backends.transport import Test
from collectives.engine.call import CollectiveOp, Steps
from collectives.engine.progress import spin
from collectives.engine.queue import CallQueue
from collectives.engine.verify import HASH, NBYTES, PREFIX, ROWS, SEQUENCE, Signature, Signatures
from collectives.flight.recorder import FAILED
from collectives.reduction import Array

#: What a prepared call returns that has not been carried out.
LEFT: Any = object()

# Looks at a header before its rank is called late: about 5 microseconds.
_LOOKS = 100
# Beyond that many the oldest are forgotten: calls of ever new shapes are not made again.
_KEPT = 4096
# Bytes beyond which a few microseconds do not matter, and other threads should not be kept from queueing their calls.
_LARGEST = 8 << 20
_WORDS = struct.Struct("<4q").pack_into  # agreed, rows, nbytes, prefix


Move = Callable[[Any, Any, "float | None"], tuple[Test, Any]]


class Recipe(NamedTuple):
    """What the general way knows of a call that the next one like it can use.

    option: op, root and the like, as the caller gave them
    wire: the dtype in which this rank's x lies in its slot, None if it brings nothing
    result: says how the result is made out of the slots, from the board and all ranks' headers
    move: starts moving what does not fit into slots, as the general way does after the ranks have met, from x, out and
    scale; returns its test and the result. None: large arrays are left to the general way
    prefix: what lies in the slot before x
    writes: x is written
    """

    option: Hashable
    wire: np.dtype[Any] | None
    result: Callable[[ControlBlock, Signatures], Result]
    move: Move | None = None
    prefix: Array | None = None
    writes: bool = False


class Quick:
    """The prepared calls of one communicator."""

    def __init__(self, transport: ShmTransport, queue: CallQueue) -> None:
        self._transport = transport
        self._queue = queue
        self._prepared: dict[Hashable, _Prepared] = {}

    def run(self, name: str, x: Any, option: Hashable, out: Any, scale: Any) -> Any:
        """The result of the call that the caller's caller makes, or LEFT: the general way must be taken."""
        frame = sys._getframe(2)
        code = frame.f_code
        try:
            if x is None:
                prepared = self._prepared.get((name, id(code), frame.f_lasti, option, None, None))
            else:
                prepared = self._prepared.get((name, id(code), frame.f_lasti, option, x.shape, x.dtype))
        except TypeError:  # an option that cannot be hashed: an array of lengths, or nothing that makes sense
            return LEFT
        if prepared is None or prepared.code is not code:
            return LEFT
        return prepared.run(x, out, scale)

    def learn(self, call: CollectiveOp[Any], x: Array | None, recipe: Recipe) -> None:
        """Prepares the call that has just been carried out, for the caller of the caller's caller."""
        frame = sys._getframe(3)
        if frame.f_code.co_filename != call.site.file or frame.f_lineno != call.site.line:
            return  # called from our own code, on behalf of more than one place
        signatures = call.signatures
        assert signatures is not None
        small = max(header[NBYTES] + header[PREFIX] for header in signatures) <= INLINE_BYTES
        if not small and (recipe.move is None or max(header[NBYTES] for header in signatures) > _LARGEST):
            return
        while len(self._prepared) >= _KEPT:
            self._prepared.pop(next(iter(self._prepared)), None)  # another thread may have been faster
        shape, dtype = (None, None) if x is None else (x.shape, x.dtype)
        key = (call.name, id(frame.f_code), frame.f_lasti, recipe.option, shape, dtype)
        kind = _Small if small else _Large
        self._prepared[key] = kind(self._transport, self._queue, call, frame.f_code, x, recipe)


class _Prepared:
    """One call at one place of the user's code.

    code: the caller's, so that no other at the same address is taken for it
    """

    __slots__ = (
        "_begin",
        "_call",
        "_control",
        "_dtype",
        "_expected",
        "_given_up",
        "_header",
        "_prefix",
        "_queue",
        "_scalable",
        "_shape",
        "_signature",
        "_timeout",
        "_transport",
        "_writes",
        "code",
    )

    def __init__(
        self,
        transport: ShmTransport,
        queue: CallQueue,
        call: CollectiveOp[Any],
        code: CodeType,
        x: Array | None,
        recipe: Recipe,
    ) -> None:
        assert call.signatures is not None
        control = transport.control
        self.code = code
        self._transport, self._control, self._queue = transport, control, queue
        self._call, self._timeout = (call.name, call.what, call.site), call.timeout
        self._header = tuple(call.signatures[control.me][word] for word in (HASH, ROWS, NBYTES, PREFIX))
        # Where each other rank's header is, and what it should say.
        self._expected = [
            [
                (control.header(parity, rank), call.signatures[rank][ROWS], call.signatures[rank][NBYTES])
                for rank in control.others
            ]
            for parity in (0, 1)
        ]
        self._prefix, self._writes = recipe.prefix, recipe.writes
        self._scalable = recipe.wire is not None and recipe.wire.kind in "fc"
        self._begin = queue.recorder.begin
        self._given_up = self._signature = -1
        result = recipe.result(control, call.signatures)
        self._shape, self._dtype = result.shape, result.dtype
        self._prepare(x, recipe, result)

    def _prepare(self, x: Array | None, recipe: Recipe, result: Result) -> None:
        """What each kind keeps besides."""
        raise NotImplementedError

    def run(self, x: Any, out: Any, scale: Any) -> Any:
        """The result, or LEFT."""
        raise NotImplementedError

    def _suits(self, x: Any, out: Any, scale: Any) -> bool:
        """True if these can be used as they are."""
        if out is not None and not (
            type(out) is np.ndarray and out.shape == self._shape and out.dtype == self._dtype and out.flags.writeable
        ):
            return False
        if scale is not None and not (type(scale) is float and self._scalable):
            return False
        return not self._writes or x.flags.writeable

    def _enlist(self) -> int:
        if self._queue.recorder.evictions != self._given_up:
            self._sign()
        return self._begin(self._queue.communicator, self._queue.started, self._signature)

    def _sign(self) -> None:
        self._given_up, self._signature = self._queue.recorder.evictions, self._queue.intern(*self._call)

    def _all_agree(self, sequence: int) -> bool:
        """True if all ranks have come soon, and call what this one calls."""
        words, signature_hash = self._control.words, self._header[0]
        for other, rows, nbytes in self._expected[sequence & 1]:
            looks = _LOOKS
            while words[other] < sequence:
                looks -= 1
                # The general way takes so long that the others would wait for this rank next, and so on for ever.
                if not looks and not spin(self._control.met):
                    return False
            if words[other + HASH] != signature_hash or words[other + ROWS] != rows or words[other + NBYTES] != nbytes:
                return False
        return True

    def _hand_over(self, index: int) -> Any:
        self._control.published = True
        self._queue.hand_over(index, _collective())
        return LEFT

    def _interrupt(self, index: int, error: BaseException) -> None:
        name, what, site = self._call
        self._queue.interrupt(f"{name} #{self._queue.started} ({site}) {what}", index, error)


class _Small(_Prepared):
    """What all ranks bring fits into slots: one look at the others, and the result is there."""

    __slots__ = ("_mine", "_take")

    def _prepare(self, x: Array | None, recipe: Recipe, result: Result) -> None:
        self._mine: Sequence[Array] | None = None
        if recipe.wire is not None and x is not None:
            self._mine = inline_arrays(self._control, self._control.me, recipe.wire, x.shape, self._header[3])
        self._take = result.make()

    def run(self, x: Any, out: Any, scale: Any) -> Any:
        if (out is not None or scale is not None or self._writes) and not self._suits(x, out, scale):
            return LEFT
        queue = self._queue
        index, half_way = -1, False
        with queue.lock:  # the others hold it for a moment only
            if queue.occupied():  # or inside: a signal's handler calls in the middle of another call
                return LEFT
            queue.inside = True
            try:
                # This is `_enlist`, written out here: a call in Python costs as much as a look at another rank.
                control = self._control
                if queue.recorder.evictions != self._given_up:
                    self._sign()
                index = self._begin(queue.communicator, queue.started, self._signature)
                sequence = control.sequence + 1
                parity = sequence & 1
                if self._mine is not None:
                    self._mine[parity][...] = x
                if self._prefix is not None:
                    control.inline[parity][control.me][: len(self._prefix)] = self._prefix
                at = control.header(parity, control.me)
                _WORDS(control.bytes, (at + HASH) * 8, *self._header)
                half_way = True
                control.sequence = control.words[at + SEQUENCE] = sequence
                if not self._all_agree(sequence):
                    return self._hand_over(index)
                queue.started += 1
                half_way = False
                result = self._take(parity, x, out, scale)
                queue.recorder.end(index)
                return result
            except BaseException as error:
                if half_way:
                    self._interrupt(index, error)
                else:
                    queue.recorder.end(index, FAILED)
                raise
            finally:
                queue.inside = False


class _Large(_Prepared):
    """What is brought goes through the stages, or is read where it lies: only the meeting is quick."""

    __slots__ = ("_move", "_shown")

    def _prepare(self, x: Array | None, recipe: Recipe, result: Result) -> None:
        assert recipe.move is not None
        self._move = recipe.move
        self._shown = Signature(self._header[0], self._header[1])

    def run(self, x: Any, out: Any, scale: Any) -> Any:
        if not self._suits(x, out, scale) or (x is not None and not is_plain(x)):
            return LEFT
        if out is not None and out is not x and not (is_plain(out) and not _overlap(x, out)):
            return LEFT
        queue = self._queue
        index, half_way = -1, False
        with queue.lock:  # the others hold it for a moment only
            if queue.occupied():  # or inside: a signal's handler calls in the middle of another call
                return LEFT
            queue.inside = True
            try:
                index, transport = self._enlist(), self._transport
                brought = None if self._header[2] < 0 else flat(x)
                given = None if out is None else brought if out is x else flat(out)
                half_way = True
                met = transport.exchange_signatures(self._shown, brought, given, self._prefix)
                if not self._all_agree(self._control.sequence):
                    return self._hand_over(index)
                met()
                with np.errstate(all="ignore"):  # as in `CallQueue.drive`
                    test, result = self._move(x, out, scale)
                    complete = test() or spin(test)
                if complete:
                    queue.started += 1
                    half_way = False
                    queue.recorder.end(index)
                    return result
                queue.hand_over(index, sys._getframe())
            except BaseException as error:
                if half_way:
                    self._interrupt(index, error)
                else:
                    queue.recorder.end(index, FAILED)
                raise
            finally:
                queue.inside = False
        name, what, site = self._call
        rest: CollectiveOp[Any] = CollectiveOp(name, what, site, self._timeout)
        rest.steps = _rest(test, result)
        return queue.run(rest)


def _collective() -> FrameType:
    """The frame of the collective that called `Quick.run`."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code is not Quick.run.__code__:
        frame = frame.f_back
    assert frame.f_back is not None
    return frame.f_back


def _rest(test: Test, result: Any) -> Steps[Any]:
    yield test
    return result


def _overlap(x: Any, out: Array) -> bool:
    return x is not None and bool(np.may_share_memory(x, out))
