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
from types import CodeType
from typing import Any, NamedTuple

import numpy as np

from collectives._shared.board import SLOT, Board
from collectives._shared.takes import Shape, Take, slot_arrays
from collectives.meeting import HASH, NBYTES, PREFIX, ROWS, SEQUENCE, Headers
from collectives.progress import Call, CallQueue
from collectives.reduction import Array

#: What a prepared call returns that has not been carried out.
LEFT: Any = object()

# Looks at a header before its rank is called late: about 20 microseconds.
_LOOKS = 400
# Beyond that many the oldest are forgotten: calls of ever new shapes are not made again.
_KEPT = 4096
_WORDS = struct.Struct("<4q").pack_into  # agreed, rows, nbytes, prefix


class Recipe(NamedTuple):
    """What the general way knows of a call that the next one like it can use.

    option: op, root and the like, as the caller gave them
    wire: the dtype in which this rank's x lies in its slot, None if it brings nothing
    shape, dtype: of the result on this rank, None if there is none
    take: makes the result's maker from the board and all ranks' headers; None: this call cannot be prepared
    prefix: what lies in the slot before x
    writes: x is written
    """

    option: Hashable
    wire: np.dtype[Any] | None
    shape: Shape | None
    dtype: np.dtype[Any] | None
    take: Callable[[Board, Headers], Take]
    prefix: Array | None = None
    writes: bool = False


class Quick:
    """The prepared calls of one communicator."""

    def __init__(self, board: Board, queue: CallQueue) -> None:
        self._board = board
        self._queue = queue
        self._prepared: dict[Hashable, _Prepared] = {}

    def run(self, name: str, x: Any, option: Hashable, out: Any, scale: Any) -> Any:
        """The result of the call that the caller's caller makes, or LEFT: the general way must be taken."""
        frame = sys._getframe(2)
        code = frame.f_code
        if x is None:
            prepared = self._prepared.get((name, id(code), frame.f_lasti, option, None, None))
        else:
            prepared = self._prepared.get((name, id(code), frame.f_lasti, option, x.shape, x.dtype))
        if prepared is None or prepared.code is not code:
            return LEFT
        return prepared.run(x, out, scale)

    def learn(self, call: Call[Any], x: Array | None, recipe: Recipe) -> None:
        """Prepares the call that has just been carried out, for the caller of the caller's caller."""
        frame = sys._getframe(3)
        if frame.f_code.co_filename != call.site.file or frame.f_lineno != call.site.line:
            return  # called from our own code, on behalf of more than one place
        headers = call.headers
        assert headers is not None
        if max(header[NBYTES] + header[PREFIX] for header in headers) > SLOT:
            return
        while len(self._prepared) >= _KEPT:
            del self._prepared[next(iter(self._prepared))]
        shape, dtype = (None, None) if x is None else (x.shape, x.dtype)
        key = (call.name, id(frame.f_code), frame.f_lasti, recipe.option, shape, dtype)
        self._prepared[key] = _Prepared(self._board, self._queue, call, frame.f_code, x, recipe)


class _Prepared:
    """One call at one place of the user's code.

    code: the caller's, so that no other at the same address is taken for it
    """

    __slots__ = (
        "_begin",
        "_board",
        "_brings",
        "_bytes",
        "_call",
        "_dtype",
        "_given_up",
        "_header",
        "_mine",
        "_others",
        "_prefix",
        "_queue",
        "_shape",
        "_signature",
        "_take",
        "_words",
        "_writes",
        "code",
    )

    def __init__(
        self, board: Board, queue: CallQueue, call: Call[Any], code: CodeType, x: Array | None, recipe: Recipe
    ) -> None:
        assert call.headers is not None
        headers = call.headers
        self.code = code
        self._board, self._queue = board, queue
        self._call = call.name, call.what, call.site
        self._header = tuple(headers[board.me][word] for word in (HASH, ROWS, NBYTES, PREFIX))
        # Where each other rank's header is, and what it should say.
        self._others = [
            [(board.header(parity, rank), headers[rank][ROWS], headers[rank][NBYTES]) for rank in board.others]
            for parity in (0, 1)
        ]
        self._mine: Sequence[Array] | None = None
        if recipe.wire is not None and x is not None:
            self._mine = slot_arrays(board, board.me, recipe.wire, x.shape, headers[board.me][PREFIX])
        self._prefix = recipe.prefix
        self._shape, self._dtype, self._writes = recipe.shape, recipe.dtype, recipe.writes
        self._take = recipe.take(board, headers)
        self._words, self._bytes = board.words, board.bytes
        self._begin = queue.recorder.begin
        self._given_up = -1
        self._signature = -1

    def run(self, x: Array | None, out: Any, scale: Any) -> Any:
        """The result, or LEFT. Raises: what NumPy raises where warnings are errors."""
        if out is not None and not self._fits(x, out):
            return LEFT
        if scale is not None and type(scale) is not float:
            return LEFT
        if self._writes and not x.flags.writeable:  # type: ignore[union-attr]  # what is written is there
            return LEFT
        queue = self._queue
        if not queue.lock.acquire(False):
            return LEFT
        index, half_way = -1, False
        try:
            if queue.occupied():
                return LEFT
            recorder, board, words = queue.recorder, self._board, self._words
            if recorder.given_up != self._given_up:
                self._given_up, self._signature = recorder.given_up, queue.intern(*self._call)
            number = queue.started
            index = self._begin(queue.communicator, number, self._signature)
            sequence = board.sequence + 1
            parity = sequence & 1
            if self._mine is not None:
                np.copyto(self._mine[parity], x)  # type: ignore[arg-type]  # what is brought is there
            if self._prefix is not None:
                board.slots[parity][board.me][: len(self._prefix)] = self._prefix
            at = board.header(parity, board.me)
            agreed, *_ = header = self._header
            _WORDS(self._bytes, (at + HASH) * 8, *header)
            half_way = True
            board.sequence = words[at + SEQUENCE] = sequence
            for other, rows, nbytes in self._others[parity]:
                looks = _LOOKS
                while words[other] < sequence:
                    looks -= 1
                    if not looks:
                        return self._hand_over(index)
                if words[other + HASH] != agreed or words[other + ROWS] != rows or words[other + NBYTES] != nbytes:
                    return self._hand_over(index)
            queue.started = number + 1
            half_way = False
            result = self._take(parity, x, out, scale)
            recorder.end(index)
            return result
        except BaseException as error:
            if half_way:
                name, what, site = self._call
                queue.interrupt(f"{name} #{queue.started} ({site}) {what}", index, error)
            raise
        finally:
            queue.lock.release()

    def _fits(self, x: Any, out: Any) -> bool:
        return (
            type(out) is np.ndarray
            and self._shape is not None
            and out.shape == self._shape
            and out.dtype == self._dtype
            and out.flags.writeable
        )

    def _hand_over(self, index: int) -> Any:
        self._board.published = True
        self._queue.hand_over(index)
        return LEFT
