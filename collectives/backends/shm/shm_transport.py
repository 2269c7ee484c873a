"""Ranks of one node, in shared memory: the transport that moves arrays there, over an inner one that set it up.

What is rare, or needs no speed (point to point, duplicates, exit notices), goes through the inner transport.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collectives.backends.shm import algorithms as rounds
from collectives.backends.shm.inline import InlineCalls
from collectives.backends.shm.segment import (
    IN_PLACE_BYTES,
    NOWHERE,
    ArrayLocation,
    ControlBlock,
    SharedArrays,
    pack_header,
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
    Finish,
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
    """A generator of waits as a test: each call goes on as far as it can.

    The ranks move their tiles at the same time, so a wait that has just begun is over in a moment: a rank that polled
    again only after a sleep would be late itself.
    """

    __slots__ = ("_moves", "_wait")

    def __init__(self, moves: rounds.Waits) -> None:
        self._moves = moves
        self._wait: Callable[[], bool] = completed

    def __call__(self) -> bool:
        if not self._wait():
            return False
        for wait in self._moves:
            if not (wait() or spin(wait)):
                self._wait = wait
                return False
        self._wait = completed
        return True


class ShmTransport(LayeredTransport):
    """The transport of ranks that are all on one node.

    inner: the transport of the same ranks that set this one up; control, arrays: what the ranks of the node share
    """

    shares_memory = combines_halves = combines_in_tree = True

    def __init__(self, inner: Transport, control: ControlBlock, arrays: SharedArrays) -> None:
        super().__init__(inner)
        self.control = control
        self.shared_arrays = arrays
        self._headers: Signatures | None = None
        self._announced = False  # the headers say what the next operation moves
        self._direct = False  # and it is read straight from the others' arrays

    # Verification ----------------------------------------------------------------------------------------------------

    def inline_calls(
        self, plan: Plan, steps: Callable[..., Steps[Any]], after_exchange: Callable[..., Steps[Any]]
    ) -> InlineCalls | None:
        calls = InlineCalls(self, plan, steps, after_exchange)
        return calls if calls.fit else None

    def exchange_signatures(
        self, header: Signature, payload: Array | None = None, out: Array | None = None, prefix: Array | None = None
    ) -> Test:
        control, nbytes, before, come, go = self.control, -1, 0, NOWHERE, NOWHERE
        self._announced = False
        inline_buffer = control.inline_buffer()
        if prefix is not None:
            before = len(prefix)
            inline_buffer[:before] = prefix
        if payload is not None:
            nbytes = payload.nbytes
            if nbytes > IN_PLACE_BYTES or before + nbytes > len(inline_buffer):
                come = self.shared_arrays.find(payload)
                if out is not None and come is not NOWHERE:
                    go = come if out is payload else self.shared_arrays.find(out)
            if come is NOWHERE and before + nbytes <= len(inline_buffer):
                inline_buffer[before : before + nbytes] = payload.view(np.uint8)
        control.publish(pack_header(header.digest, header.rows, nbytes, before, *come, *go))
        return self.met

    def met(self) -> bool:
        """True once all ranks have shown their signatures of this call; reads them then."""
        if not self.control.met():
            return False
        self._headers = self.control.signatures()
        self._announced = not differ(self._headers)
        return True

    def signatures(self) -> Signatures | None:
        return self._headers

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
        mine = part_of(self.rank, nbytes)
        _, made, reason = yield from share_segment(self, segment_bytes(nbytes, self.size), reserved=mine)
        if made is None or reason:
            if self.rank == 0:
                _log.warning("comm.empty gives each rank memory of its own, and reducing it takes copies: %s", reason)
            return None
        array: Array = self.shared_arrays.add(made, nbytes)
        return array

    def root_prefix(self, buffer: Array, root: int) -> Test:
        if self.rank != root:
            buffer[:] = self.control.inline[self.control.sequence & 1][root][: len(buffer)]
        return completed

    # Reductions ------------------------------------------------------------------------------------------------------

    def all_reduce(self, x: Array, out: Array, op: ReduceOp, finish: Finish | None = None) -> Test:
        signatures, sources = self._visible(range(self.size))
        ufunc = COMBINE[op]
        if sources is None:
            return StepTest(rounds.all_reduce(self.control, x, out, ufunc, finish))
        typed = [source.view(x.dtype) for source in sources]
        if not self._direct:
            rounds.reduce_visible(typed, out, ufunc, finish)
            return completed
        assert signatures is not None
        segments = [header[OUT] for header in signatures]
        if all(segments):
            nbytes = out.nbytes
            outs = [self._array_at(rank, signatures[rank], OUT, nbytes).view(out.dtype) for rank in range(self.size)]
            rounds.reduce_into_all(typed, outs, self.rank, ufunc, finish)
        elif not any(segments):
            rounds.reduce_visible(typed, out, ufunc, finish)
        else:  # a rank's total would overwrite what others still read
            return StepTest(rounds.all_reduce(self.control, x, out, ufunc, finish))
        return self._leave()

    def reduce(self, x: Array, out: Array | None, op: ReduceOp, root: int, finish: Finish | None = None) -> Test:
        _, sources = self._visible(range(self.size))
        if sources is None:
            return StepTest(rounds.reduce(self.control, x, out, COMBINE[op], finish))
        if out is not None:
            rounds.reduce_visible([source.view(x.dtype) for source in sources], out, COMBINE[op], finish)
        return self._leave()

    def reduce_scatter(
        self, x: Array, out: Array, counts: Sequence[int], op: ReduceOp, finish: Finish | None = None
    ) -> Test:
        _, sources = self._visible(range(self.size))
        if sources is None:
            return StepTest(rounds.reduce_scatter(self.control, x, out, counts, COMBINE[op], finish))
        first = sum(counts[: self.rank])
        parts = [source.view(x.dtype)[first : first + counts[self.rank]] for source in sources]
        rounds.reduce_visible(parts, out, COMBINE[op], finish)
        return self._leave()

    # Movements -------------------------------------------------------------------------------------------------------

    def broadcast(self, x: Array, root: int) -> Test:
        _, sources = self._visible([root])
        if sources is None:
            return StepTest(rounds.broadcast(self.control, x, root))
        if self.rank != root:
            np.copyto(x, sources[0])
        return self._leave()

    def gather(self, x: Array, out: Array | None, counts: Sequence[int], root: int) -> Test:
        return self._gather(x, out, counts)

    def all_gather(self, x: Array, out: Array, counts: Sequence[int]) -> Test:
        return self._gather(x, out, counts)

    def _gather(self, x: Array, out: Array | None, counts: Sequence[int]) -> Test:
        _, sources = self._visible(range(self.size))
        if sources is None:
            return StepTest(rounds.gather(self.control, x, out, counts))
        if out is not None:
            np.concatenate(sources, out=out)
        return self._leave()

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
        """The headers, and what these ranks bring where all can see it: None if any of it must go through the stages.

        Only the first movement of a call has been announced by the headers.
        """
        signatures, announced, self._announced, self._direct = self._headers, self._announced, False, False
        if signatures is None or not announced:
            return None, None
        sources = []
        parity = self.control.sequence & 1
        for rank in ranks:
            header = signatures[rank]
            nbytes, before = header[NBYTES], header[PREFIX]
            if nbytes < 0:
                return signatures, None
            if header[IN]:
                sources.append(self._array_at(rank, header, IN, nbytes))
                self._direct = True
            elif before + nbytes <= self.control.inline_bytes:
                sources.append(self.control.inline[parity][rank][before : before + nbytes])
            else:
                return signatures, None
        return signatures, sources

    def _array_at(self, rank: int, header: Sequence[int], word: int, nbytes: int) -> Array:
        return self.shared_arrays.view(rank, ArrayLocation(header[word], header[word + 1]), nbytes)

    def _leave(self) -> Test:
        """What was read straight from the others' arrays must not change before all have read it."""
        if not self._direct:
            return completed
        self.control.advance()
        return self.control.advanced
