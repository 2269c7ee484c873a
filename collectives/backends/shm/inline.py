"""Small collectives in shared memory: each rank's array travels with its header, and is combined from there.

The ranks of a node wait for each other's headers in any case. Where every rank's array lies in its inline buffer, they
need nothing else: a call is a copy into this rank's buffer, a look at the others' headers, and one NumPy function on
their buffers. The views of buffers, and where each header is, are made once for a plan.

Anything unusual (a call that differs, an array in shared memory or too large, an `out` that does not fit) goes on as on
other transports, from where the ranks have shown each other their signatures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from collectives.arrays import flat, is_plain
from collectives.backends.shm.algorithms import combine_halves
from collectives.backends.shm.segment import IN_PLACE_BYTES, NOWHERE, ControlBlock, pack_header
from collectives.engine.call import CollectiveOp, Plan
from collectives.engine.waiting import spin
from collectives.reduction import COMBINE, HALVES, Array, ReduceOp, combine_in_tree, finish, wire_op
from collectives.transport import HASH, IN, NBYTES, PREFIX, ROWS, Steps

if TYPE_CHECKING:
    from collectives.backends.shm.shm_transport import ShmTransport

#: Makes a call's result: of the pieces of inline buffers, and the caller's array, out and scale.
Combine = Callable[[Sequence[Array], Any, Any, "float | None"], Any]
#: That rank's prefix, (n,) uint8.
PrefixOf = Callable[[int], Array]


class Piece(NamedTuple):
    """Rows `first` to `last`, or all, of an array of this shape at byte `start` of a rank's inline buffer."""

    rank: int
    shape: tuple[int, ...]
    first: int | None = None
    last: int | None = None
    start: int = 0

    def views(self, control: ControlBlock, dtype: np.dtype[Any]) -> list[Array]:
        """The piece in each of the two inline buffers of its rank."""
        stop = self.start + math.prod(self.shape) * dtype.itemsize
        whole = [control.inline[parity][self.rank][self.start : stop].view(dtype) for parity in (0, 1)]
        shaped = [each.reshape(self.shape) for each in whole]
        return shaped if self.first is None else [each[self.first : self.last] for each in shaped]


def nothing(parts: Sequence[Array], x: Any, out: Any, scale: float | None) -> None:
    """No result on this rank."""


def unchanged(parts: Sequence[Array], x: Any, out: Any, scale: float | None) -> Any:
    """x as it is."""
    return x


def filled(parts: Sequence[Array], x: Any, out: Any, scale: float | None) -> Any:
    """Copies the only piece into x, and returns x."""
    x[...] = parts[0]
    return x


def joined(dtype: np.dtype[Any]) -> Combine:
    """The pieces, joined along axis 0."""
    kept = None if dtype.isnative else dtype  # joining would turn the bytes round

    def combine(parts: Sequence[Array], x: Any, out: Any, scale: float | None) -> Any:
        return np.concatenate(parts, dtype=kept) if out is None else np.concatenate(parts, out=out)

    return combine


def reduced(op: ReduceOp, wire: np.dtype[Any], dtype: np.dtype[Any], size: int) -> Combine:
    """The reduction of the pieces, one a rank."""
    ufunc, mean, same = COMBINE[wire_op(op)], op is ReduceOp.MEAN, wire == dtype

    def combine_widened(parts: Sequence[Array], x: Any, out: Any, scale: float | None) -> Any:
        y = out if out is not None and is_plain(out) else np.empty(parts[0].shape, wire)
        combine_halves([flat(each) for each in parts], flat(y), ufunc, lambda total: finish(total, op, size, scale))
        if out is None or out is y:
            return y
        np.copyto(out, y)
        return out

    def combine(parts: Sequence[Array], x: Any, out: Any, scale: float | None) -> Any:
        target = out if same else None
        # Two ranks' small arrays take little longer than the calls in between.
        y = ufunc(parts[0], parts[1], out=target) if size == 2 else combine_in_tree(parts, ufunc, target)
        if out is None or not same:
            y = np.asarray(y)  # without dimensions it is a scalar, which cannot be added to
        if mean or scale is not None:
            finish(y, op, size, scale)
        if same:
            return y
        if out is None:
            return y.astype(dtype)
        np.copyto(out, y, casting="unsafe")
        return out

    return combine_widened if wire in HALVES else combine


class Layout(NamedTuple):
    """What the result of a call is made of, where every rank's array lies in its inline buffer.

    dtype: of what lies in them; pieces: what this rank reads; combine: what it makes of these
    result: the shape that `out` must have, where the call has not checked it
    """

    dtype: np.dtype[Any] | None
    pieces: Sequence[Piece]
    combine: Combine
    result: tuple[int, ...] | None = None


def _fits(target: Array, layout: Layout) -> bool:
    return target.shape == layout.result and target.dtype == layout.dtype and target.flags.writeable


class InlineCalls:
    """The calls of one plan on one rank.

    steps: all steps of a call, on any transport; after_exchange: those from where ranks have shown each other their
    signatures
    fit: this rank's array fits into its inline buffer; else there is no use for this
    """

    def __init__(
        self,
        transport: ShmTransport,
        plan: Plan,
        steps: Callable[[CollectiveOp[Any]], Steps[Any]],
        after_exchange: Callable[[CollectiveOp[Any]], Steps[Any]],
    ) -> None:
        self._transport, self._plan = transport, plan
        self._all_steps, self._after_exchange = steps, after_exchange
        self._control = control = transport.control
        self._prefix = plan.prefix
        before = 0 if plan.prefix is None else len(plan.prefix)
        nbytes = -1
        dtype = plan.wire
        if plan.shown and plan.shape is not None:
            nbytes = math.prod(plan.shape) * dtype.itemsize
        self.fit = before + nbytes <= control.inline_bytes
        self._large = nbytes > IN_PLACE_BYTES
        self._mine: list[Array] | None = None
        if plan.shown and plan.shape is not None and self.fit:
            self._mine = Piece(control.me, plan.shape, start=before).views(control, dtype)
        self._words = (plan.rows, nbytes, before, *NOWHERE, *NOWHERE)
        self._header = pack_header(plan.digest, *self._words)
        # Rows, bytes and prefix in the others' headers, and what has been made for them.
        self._shown: list[list[int]] | None = None
        self._layout = Layout(None, [], nothing)
        self._parts: list[list[Array]] = []

    def is_done_at_once(self, call: CollectiveOp[Any]) -> bool:
        """Shows the others this call. True if they come within microseconds, and it is finished; else it gets steps."""
        if self._large and self._transport.shared_arrays.find(call.source) is not NOWHERE:
            call.steps = self._all_steps(call)  # the others read it where it lies
            return False
        digest = self._plan.digest
        header = self._header
        if call.scale is not None:
            if callable(call.scale):
                call.ask_scale()
            digest = call.digest
            header = pack_header(digest, *self._words)
        control = self._control
        parity = (control.sequence + 1) & 1
        if self._mine is not None:
            self._mine[parity][...] = call.source
        if self._prefix is not None:
            control.inline[parity][control.me][: len(self._prefix)] = self._prefix
        control.publish(header)
        if (control.met_soon() or (call.waited_for and spin(control.met))) and self._combine(call, digest):
            return True
        call.steps = self._steps(call, digest)
        return False

    def _steps(self, call: CollectiveOp[Any], digest: int) -> Steps[Any]:
        yield self._control.met
        if self._combine(call, digest):
            return call.result
        self._transport.met()
        return (yield from self._after_exchange(call))

    def _combine(self, call: CollectiveOp[Any], digest: int) -> bool:
        """Finishes the call if all ranks call the same, their arrays lie in their inline buffers, and the result fits.

        Returns: whether that is so
        """
        control = self._control
        parity = control.sequence & 1
        words = control.words
        shown = []
        for at in control.heads[parity]:
            if words[at + HASH] != digest or words[at + IN]:
                return False
            shown.append(words[at + ROWS : at + IN].tolist())
        if call.failure is not None or (shown != self._shown and not self._lay_out(shown)):
            return False
        layout = self._layout
        target = call.target
        if target is not None and layout.result is not None and not _fits(target, layout):
            return False
        result = layout.combine(self._parts[parity], call.source, target, call.scale)
        call.finish(result if call.out is None else call.out, None)
        return True

    def _lay_out(self, shown: list[list[int]]) -> bool:
        """Makes the layout for what ranks bring now; False if not all of it lies in inline buffers."""
        control = self._control
        signatures = control.signatures()
        if any(signature[NBYTES] + signature[PREFIX] > control.inline_bytes for signature in signatures):
            return False
        inline = control.inline[control.sequence & 1]
        layout = self._plan.layout(signatures, lambda rank: inline[rank][: signatures[rank][PREFIX]])
        if layout is None:
            return False
        views = [piece.views(control, layout.dtype) for piece in layout.pieces]
        self._parts = [[each[parity] for each in views] for parity in (0, 1)]
        self._shown, self._layout = shown, layout
        return True
