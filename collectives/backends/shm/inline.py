"""Small collectives of ranks on one node: each rank's array travels with its signature through shared memory.

The ranks wait for each other's signatures in any case. If every rank's array is in its inline buffer, the ranks
exchange nothing else: a call copies its array into this rank's buffer, checks the others' signatures, and makes the
result from their buffers with NumPy. The views of buffers are computed once for a plan, and again only if the others'
signatures show other lengths or checksums.

A call takes the same steps as on other transports if its signature differs, its arrays are too large or are read in
place, or its `out` does not fit. If the ranks have already shown each other their signatures, the call continues from
that point.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from collectives.arrays import flat, is_plain
from collectives.backends.shm.algorithms import combine_halves
from collectives.backends.shm.segment import IN_PLACE_BYTES, NOWHERE, ControlBlock, pack_signature
from collectives.engine.call import CollectiveOp, Plan
from collectives.engine.waiting import spin
from collectives.reduction import COMBINE, HALVES, Array, ReduceOp, combine_in_tree, divide_and_scale, wire_op
from collectives.transport import DIGEST, IN, NBYTES, PREFIX, ROWS, Steps

if TYPE_CHECKING:
    from collectives.backends.shm.shm_transport import ShmTransport

#: Makes a call's result. Takes the pieces of inline buffers, the caller's array, `out` and the scale.
Combine = Callable[[Sequence[Array], Any, Any, "float | None"], Any]
#: Returns a rank's prefix, (n,) uint8.
PrefixOf = Callable[[int], Array]


class Piece(NamedTuple):
    """Rows `first` to `last` - 1, or all rows, of an array in a rank's inline buffer.

    shape: the whole array's shape; start: the byte of the inline buffer at which the array begins
    """

    rank: int
    shape: tuple[int, ...]
    first: int | None = None
    last: int | None = None
    start: int = 0

    def views(self, control: ControlBlock, dtype: np.dtype[Any]) -> list[Array]:
        """The piece in each of the two inline buffers of its rank."""
        stop = self.start + math.prod(self.shape) * dtype.itemsize
        buffers = [control.inline[parity][self.rank][self.start : stop] for parity in (0, 1)]
        arrays = [buffer.view(dtype).reshape(self.shape) for buffer in buffers]
        return arrays if self.first is None else [array[self.first : self.last] for array in arrays]


def no_result(parts: Sequence[Array], x: Any, out: Any, scale: float | None) -> None:
    """Returns None, for ranks without a result."""


def keep_input(parts: Sequence[Array], x: Any, out: Any, scale: float | None) -> Any:
    """Returns x unchanged."""
    return x


def copy_piece(parts: Sequence[Array], x: Any, out: Any, scale: float | None) -> Any:
    """Copies the only piece into x, and returns x."""
    x[...] = parts[0]
    return x


def make_join(dtype: np.dtype[Any]) -> Combine:
    """A function that joins the pieces along axis 0."""
    byte_order = None if dtype.isnative else dtype  # By default NumPy would convert to native byte order.

    def combine(parts: Sequence[Array], x: Any, out: Any, scale: float | None) -> Any:
        return np.concatenate(parts, dtype=byte_order) if out is None else np.concatenate(parts, out=out)

    return combine


def make_reduction(op: ReduceOp, wire: np.dtype[Any], dtype: np.dtype[Any], size: int) -> Combine:
    """A function that reduces the pieces, one from each rank."""
    ufunc = COMBINE[wire_op(op)]
    mean = op is ReduceOp.MEAN
    same = wire == dtype

    def combine_widened(parts: Sequence[Array], x: Any, out: Any, scale: float | None) -> Any:
        y = out if out is not None and is_plain(out) else np.empty(parts[0].shape, wire)
        combine_halves(
            [flat(part) for part in parts], flat(y), ufunc, lambda total: divide_and_scale(total, op, size, scale)
        )
        if out is None or out is y:
            return y
        np.copyto(out, y)
        return out

    def combine(parts: Sequence[Array], x: Any, out: Any, scale: float | None) -> Any:
        target = out if same else None
        # Not `combine_in_tree` for two ranks: for small arrays its Python calls would take almost as long as the ufunc.
        y = ufunc(parts[0], parts[1], out=target) if size == 2 else combine_in_tree(parts, ufunc, target)
        if out is None or not same:
            y = np.asarray(y)  # For 0-d arrays a ufunc returns a scalar, which cannot be an `out`.
        if mean or scale is not None:
            divide_and_scale(y, op, size, scale)
        if same:
            return y
        if out is None:
            return y.astype(dtype)
        np.copyto(out, y, casting="unsafe")
        return out

    return combine_widened if wire in HALVES else combine


class Layout(NamedTuple):
    """How the result of a call is made if every rank's array is in its inline buffer.

    dtype: the dtype of these arrays; pieces: what this rank reads; combine: makes the result from the pieces
    result: the shape that `out` must have; None if the call has checked that already
    """

    dtype: np.dtype[Any] | None
    pieces: Sequence[Piece]
    combine: Combine
    result: tuple[int, ...] | None = None


def _fits(target: Array, layout: Layout) -> bool:
    return target.shape == layout.result and target.dtype == layout.dtype and target.flags.writeable


class InlineCalls:
    """The fast path for the calls of one plan on one rank.

    steps: returns all steps of a call; after_exchange: returns those after the exchange of signatures. They are for
        calls that cannot take the fast path
    fits: whether this rank's prefix and array fit into its inline buffer; if not, this object must not be used
    """

    def __init__(
        self,
        transport: ShmTransport,
        plan: Plan,
        steps: Callable[[CollectiveOp[Any]], Steps[Any]],
        after_exchange: Callable[[CollectiveOp[Any]], Steps[Any]],
    ) -> None:
        self._transport = transport
        self._plan = plan
        self._all_steps = steps
        self._after_exchange = after_exchange
        control = transport.control
        self._control = control
        self._prefix = plan.prefix
        prefix_bytes = 0 if plan.prefix is None else len(plan.prefix)
        nbytes = -1
        dtype = plan.wire
        if plan.shown and plan.shape is not None:
            nbytes = math.prod(plan.shape) * dtype.itemsize
        self.fits = prefix_bytes + nbytes <= control.inline_bytes
        self._large = nbytes > IN_PLACE_BYTES
        self._own_views: list[Array] | None = None
        if plan.shown and plan.shape is not None and self.fits:
            self._own_views = Piece(control.me, plan.shape, start=prefix_bytes).views(control, dtype)
        self._words = (plan.checksum, nbytes, prefix_bytes, *NOWHERE, *NOWHERE)
        self._signature = pack_signature(plan.digest, *self._words)
        # Rows, bytes and prefix in the others' signatures, and the layout that was made for them.
        self._shown: list[list[int]] | None = None
        self._layout = Layout(None, [], no_result)
        self._parts: list[list[Array]] = []

    def complete_now(self, call: CollectiveOp[Any]) -> bool:
        """Shows this call to the other ranks, and completes it if all of them soon show the same call.

        A large array in shared memory is left to `call.steps`: they show the call, and the others read the array there.

        Returns: whether the call is complete; if not, `call.steps` has been set to the steps that remain
        """
        if self._large and self._transport.shared_arrays.find(call.source) is not NOWHERE:
            call.steps = self._all_steps(call)  # These show the call, so that the others read the array in place.
            return False
        digest = self._plan.digest
        signature = self._signature
        if call.scale is not None:
            if callable(call.scale):
                call.compute_scale()
            digest = call.digest
            signature = pack_signature(digest, *self._words)
        control = self._control
        parity = (control.sequence + 1) & 1
        if self._own_views is not None:
            self._own_views[parity][...] = call.source
        if self._prefix is not None:
            control.inline[parity][control.me][: len(self._prefix)] = self._prefix
        control.publish(signature)
        arrived = control.all_arrive_soon() or (call.waited_for and spin(control.all_arrived))
        if arrived and self._combine(call, digest):
            return True
        call.steps = self._steps(call, digest)
        return False

    def _steps(self, call: CollectiveOp[Any], digest: int) -> Steps[Any]:
        yield self._control.all_arrived
        if self._combine(call, digest):
            return call.result
        self._transport.all_arrived()
        return (yield from self._after_exchange(call))

    def _combine(self, call: CollectiveOp[Any], digest: int) -> bool:
        """Completes the call if all ranks make the same call, with arrays in their inline buffers, and `out` fits.

        Returns: whether the call is complete
        """
        control = self._control
        parity = control.sequence & 1
        words = control.words
        descriptions = []
        for start in control.other_signatures[parity]:
            if words[start + DIGEST] != digest or words[start + IN]:
                return False
            descriptions.append(words[start + ROWS : start + IN].tolist())
        if call.failure is not None or (descriptions != self._shown and not self._lay_out(descriptions)):
            return False
        layout = self._layout
        target = call.target
        if target is not None and layout.result is not None and not _fits(target, layout):
            return False
        result = layout.combine(self._parts[parity], call.source, target, call.scale)
        call.set_outcome(result if call.out is None else call.out, None)
        return True

    def _lay_out(self, descriptions: list[list[int]]) -> bool:
        """Makes the layout for the arrays that ranks show now. Returns: whether the fast path can make the result"""
        control = self._control
        signatures = control.signatures()
        if any(signature[NBYTES] + signature[PREFIX] > control.inline_bytes for signature in signatures):
            return False
        inline = control.inline[control.sequence & 1]
        layout = self._plan.layout(signatures, lambda rank: inline[rank][: signatures[rank][PREFIX]])
        if layout is None:
            return False
        views = [piece.views(control, layout.dtype) for piece in layout.pieces]
        self._parts = [[by_parity[parity] for by_parity in views] for parity in (0, 1)]
        self._shown = descriptions
        self._layout = layout
        return True
