"""The transport of ranks on one node, which moves arrays through shared memory.

If all ranks of the communicator are on one node, an inner transport of the same ranks sets up the shared memory. It
also does everything that is rare or not time-critical: point to point, new communicators, exit notices. If there are
ranks on other nodes, the inner transport holds only the ranks' numbers.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec

import numpy as np

from collectives.backends.shm import algorithms as rounds
from collectives.backends.shm.inline import InlineCalls
from collectives.backends.shm.segment import (
    IN_PLACE_BYTES,
    NOWHERE,
    ArrayLocation,
    ControlBlock,
    SharedArrays,
    pack_signature,
    part_of,
    segment_bytes,
    share_segment,
)
from collectives.engine.call import Plan
from collectives.engine.waiting import spin
from collectives.reduction import COMBINE, Array, ReduceOp
from collectives.transport import (
    IN,
    NBYTES,
    OUT,
    PREFIX,
    Epilogue,
    LayeredTransport,
    Signature,
    Signatures,
    Steps,
    Test,
    Transport,
    completed,
    differ,
)

_log = logging.getLogger("collectives")


class StepTest:
    """A `Test` that runs a generator of waits: each call advances the generator as far as possible.

    The ranks move their tiles at the same time, so a wait that has just begun usually ends very soon. Therefore the
    test spins at each wait that begins, before it returns False: a rank that tested again only after a sleep would
    delay the others.
    """

    __slots__ = ("_wait", "_waits")

    def __init__(self, waits: rounds.Waits) -> None:
        self._waits = waits
        self._wait: Callable[[], bool] = completed

    def __call__(self) -> bool:
        if not self._wait():
            return False
        for wait in self._waits:
            if not (wait() or spin(wait)):
                self._wait = wait
                return False
        self._wait = completed
        return True


P = ParamSpec("P")


def in_steps(waits: Callable[P, rounds.Waits]) -> Callable[P, Test]:
    """Decorator for a method written as a generator of waits: the method returns a `Test` that runs the generator."""

    @functools.wraps(waits)
    def start(*args: P.args, **kwargs: P.kwargs) -> Test:
        return StepTest(waits(*args, **kwargs))

    return start


class ShmTransport(LayeredTransport):
    """The transport of ranks that are all on one node.

    inner: another transport of the same ranks, or, if there are other nodes, only the ranks' numbers
    control: this rank's view of the control block; arrays: the shared arrays of the ranks
    """

    shares_memory = True
    combines_halves = True
    combines_in_tree = True

    def __init__(self, inner: Transport, control: ControlBlock, arrays: SharedArrays) -> None:
        super().__init__(inner)
        self.control = control
        self.shared_arrays = arrays
        self._shown: Signatures | None = None
        self._announced = False  # Whether the signatures describe the arrays of the next operation.
        self._direct = False  # Whether the operation reads the others' arrays in place.

    # Verification ----------------------------------------------------------------------------------------------------

    def inline_calls(
        self, plan: Plan, steps: Callable[..., Steps[Any]], after_exchange: Callable[..., Steps[Any]]
    ) -> InlineCalls | None:
        calls = InlineCalls(self, plan, steps, after_exchange)
        return calls if calls.fits else None

    def exchange_signatures(
        self, signature: Signature, payload: Array | None = None, out: Array | None = None, prefix: Array | None = None
    ) -> Test:
        nbytes = -1
        prefix_bytes = 0
        x_location = NOWHERE
        out_location = NOWHERE
        self._announced = False
        inline_buffer = self.control.inline_buffer()
        if prefix is not None:
            prefix_bytes = len(prefix)
            inline_buffer[:prefix_bytes] = prefix
        if payload is not None:
            nbytes = payload.nbytes
            if nbytes > IN_PLACE_BYTES or prefix_bytes + nbytes > len(inline_buffer):
                x_location = self.shared_arrays.find(payload)
                if out is not None and x_location is not NOWHERE:
                    out_location = x_location if out is payload else self.shared_arrays.find(out)
            if x_location is NOWHERE and prefix_bytes + nbytes <= len(inline_buffer):
                inline_buffer[prefix_bytes : prefix_bytes + nbytes] = payload.view(np.uint8)
        words = pack_signature(signature.digest, signature.rows, nbytes, prefix_bytes, *x_location, *out_location)
        self.control.publish(words)
        return self.all_arrived

    def all_arrived(self) -> bool:
        """True once all ranks have shown their signatures of this call; then reads them."""
        if not self.control.all_arrived():
            return False
        self._shown = self.control.signatures()
        self._announced = not differ(self._shown)
        return True

    def signatures(self) -> Signatures | None:
        return self._shown

    def all_prefixes(self, prefix: Array, buffer: Array) -> Test:
        if not self._announced:
            return super().all_prefixes(prefix, buffer)
        parity = self.control.sequence & 1
        for rank, row in enumerate(buffer):
            row[:] = self.control.inline[parity][rank][: len(row)]
        return completed

    def late(self) -> list[int]:
        return self.control.missing()

    def empty(self, nbytes: int) -> Steps[Array | None]:
        part = part_of(self.rank, nbytes)
        _, segment, reason = yield from share_segment(self, segment_bytes(nbytes, self.size), reserved=part)
        if segment is None or reason:
            if self.rank == 0:
                _log.warning("comm.empty gives each rank memory of its own, and reducing it takes copies: %s", reason)
            return None
        array: Array = self.shared_arrays.add(segment, nbytes)
        return array

    def root_prefix(self, buffer: Array, root: int) -> Test:
        if self.rank != root:
            buffer[:] = self.control.inline[self.control.sequence & 1][root][: len(buffer)]
        return completed

    # Reductions ------------------------------------------------------------------------------------------------------

    def all_reduce(self, x: Array, out: Array, op: ReduceOp, epilogue: Epilogue | None = None) -> Test:
        signatures, sources = self._visible(range(self.size))
        ufunc = COMBINE[op]
        if sources is None:
            return StepTest(rounds.all_reduce(self.control, x, out, ufunc, epilogue))
        typed = [source.view(x.dtype) for source in sources]
        if not self._direct:
            rounds.reduce_visible(typed, out, ufunc, epilogue)
            return completed
        assert signatures is not None
        segments = [signature[OUT] for signature in signatures]
        if all(segments):
            nbytes = out.nbytes
            outs = [self._array_at(rank, signatures[rank], OUT, nbytes).view(out.dtype) for rank in range(self.size)]
            rounds.reduce_into_all(typed, outs, self.rank, ufunc, epilogue)
        elif not any(segments):
            rounds.reduce_visible(typed, out, ufunc, epilogue)
        else:  # Some ranks' totals go to shared memory, maybe in place: they would overwrite what others still read.
            return StepTest(rounds.all_reduce(self.control, x, out, ufunc, epilogue))
        return self._leave()

    def reduce(self, x: Array, out: Array | None, op: ReduceOp, root: int, epilogue: Epilogue | None = None) -> Test:
        _, sources = self._visible(range(self.size))
        if sources is None:
            return StepTest(rounds.reduce(self.control, x, out, COMBINE[op], epilogue))
        if out is not None:
            rounds.reduce_visible([source.view(x.dtype) for source in sources], out, COMBINE[op], epilogue)
        return self._leave()

    def reduce_scatter(
        self, x: Array, out: Array, counts: Sequence[int], op: ReduceOp, epilogue: Epilogue | None = None
    ) -> Test:
        _, sources = self._visible(range(self.size))
        if sources is None:
            return StepTest(rounds.reduce_scatter(self.control, x, out, counts, COMBINE[op], epilogue))
        first = sum(counts[: self.rank])
        parts = [source.view(x.dtype)[first : first + counts[self.rank]] for source in sources]
        rounds.reduce_visible(parts, out, COMBINE[op], epilogue)
        return self._leave()

    # Movements -------------------------------------------------------------------------------------------------------

    def broadcast(self, x: Array, root: int) -> Test:
        _, sources = self._visible([root])
        if sources is None:
            return StepTest(rounds.broadcast(self.control, x, root))
        if self.rank != root:
            np.copyto(x, sources[0])
        return self._leave()

    def gather(self, x: Array, out: Array | None, counts: Sequence[int], root: int = 0) -> Test:
        _, sources = self._visible(range(self.size))
        if sources is None:
            return StepTest(rounds.gather(self.control, x, out, counts))
        if out is not None:
            np.concatenate(sources, out=out)
        return self._leave()

    all_gather = gather

    def scatter(self, x: Array | None, out: Array, counts: Sequence[int], root: int) -> Test:
        _, sources = self._visible([root])
        if sources is None:
            return StepTest(rounds.scatter(self.control, x, out, counts, root))
        first = sum(counts[: self.rank])
        np.copyto(out, sources[0][first : first + len(out)])
        return self._leave()

    def all_to_all(self, x: Array, out: Array, table: Sequence[Sequence[int]]) -> Test:
        _, sources = self._visible(range(self.size))
        if sources is None:
            return StepTest(rounds.all_to_all(self.control, x, out, table))
        me = self.rank
        parts = [source[sum(sends[:me]) :][: sends[me]] for source, sends in zip(sources, table, strict=True)]
        np.concatenate(parts, out=out)
        return self._leave()

    def barrier(self) -> Test:
        self.control.advance()
        return self.control.advanced

    # Shared parts ----------------------------------------------------------------------------------------------------

    def _visible(self, ranks: Sequence[int]) -> tuple[Signatures | None, list[Array] | None]:
        """The signatures, and the arrays of these ranks; None instead of the arrays if not all of them are visible.

        (None, None) for every operation of a call but the first: the signatures describe the arrays of the first alone.
        """
        signatures = self._shown
        announced = self._announced
        self._announced = False
        self._direct = False
        if signatures is None or not announced:
            return None, None
        sources = []
        parity = self.control.sequence & 1
        for rank in ranks:
            signature = signatures[rank]
            nbytes = signature[NBYTES]
            prefix_bytes = signature[PREFIX]
            if nbytes < 0:
                return signatures, None
            if signature[IN]:
                sources.append(self._array_at(rank, signature, IN, nbytes))
                self._direct = True
            elif prefix_bytes + nbytes <= self.control.inline_bytes:
                sources.append(self.control.inline[parity][rank][prefix_bytes : prefix_bytes + nbytes])
            else:
                return signatures, None
        return signatures, sources

    def _array_at(self, rank: int, signature: Sequence[int], word: int, nbytes: int) -> Array:
        return self.shared_arrays.view(rank, ArrayLocation(signature[word], signature[word + 1]), nbytes)

    def _leave(self) -> Test:
        """Ends an operation. Returns: a test. If ranks read arrays in place, it is True when all have read them."""
        if not self._direct:
            return completed
        self.control.advance()
        return self.control.advanced
