"""Ranks of one node, in shared memory: the transport that moves arrays there, over another one that set it up.

What is rare, or has no need of speed (point to point, duplicates, departures), goes on over the transport below.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from collectives.backends.layered import Above
from collectives.backends.shm import algorithms as rounds
from collectives.backends.shm.control_block import SLOT, Board
from collectives.backends.shm.shared_arrays import NOWHERE, Place, SharedArrays
from collectives.backends.transport import Finish, Test, Transport
from collectives.engine.progress import spin
from collectives.engine.verify import IN, NBYTES, OUT, PREFIX, Header, Headers, differ
from collectives.reduction import COMBINE, Array, ReduceOp


def _done() -> bool:
    return True


class Advance:
    """A generator of waits as a test: each call goes on as far as it can.

    The ranks move their tiles side by side, so a wait that has just begun is over in a moment: whoever only came back
    to it after a sleep would be late himself.
    """

    __slots__ = ("_moves", "_wait")

    def __init__(self, moves: rounds.Moves) -> None:
        self._moves = moves
        self._wait: Callable[[], bool] = _done

    def __call__(self) -> bool:
        if not self._wait():
            return False
        for wait in self._moves:
            if not (wait() or spin(wait)):
                self._wait = wait
                return False
        self._wait = _done
        return True


class SharedTransport(Above):
    """The transport of ranks that all stand on one node.

    below: the transport of the same ranks that set this one up; board, shared: what the ranks of the node share
    """

    def __init__(self, below: Transport, board: Board, shared: SharedArrays) -> None:
        super().__init__(below)
        self.board = board
        self.shared = shared
        self._headers: Headers | None = None
        self._announced = False  # the headers say what the next operation moves
        self._direct = False  # and it is read straight from the others' arrays

    # Meeting ---------------------------------------------------------------------------------------------------------

    def meet(
        self, header: Header, payload: Array | None = None, out: Array | None = None, prefix: Array | None = None
    ) -> Test:
        board, nbytes, before, come, go = self.board, -1, 0, NOWHERE, NOWHERE
        self._announced = False
        if board.published:  # a prepared call has begun this one
            board.published = False
            return self._met
        slot = board.slot()
        if prefix is not None:
            before = len(prefix)
            slot[:before] = prefix
        if payload is not None:
            nbytes = payload.nbytes
            if before + nbytes <= SLOT:
                slot[before : before + nbytes] = payload.view(np.uint8)
            else:
                come = self.shared.find(payload)
                if out is not None and come is not NOWHERE:
                    go = come if out is payload else self.shared.find(out)
        board.publish([header.agreed, header.rows, nbytes, before, *come, *go])
        return self._met

    def _met(self) -> bool:
        if not self.board.met():
            return False
        self._headers = self.board.headers()
        self._announced = not differ(self._headers)
        return True

    def headers(self) -> Headers | None:
        return self._headers

    def all_told(self, prefix: Array, room: Array) -> Test:
        if not self._announced:
            return self.all_gather(prefix, room.reshape(-1), [prefix.nbytes] * self.size)
        parity = self.board.sequence & 1
        for rank, row in enumerate(room):
            row[:] = self.board.slots[parity][rank][: len(row)]
        return _done

    def late(self) -> list[int]:
        return self.board.missing()

    def told(self, room: Array, root: int) -> Test:
        if self.rank != root:
            room[:] = self.board.slots[self.board.sequence & 1][root][: len(room)]
        return _done

    # Reductions ------------------------------------------------------------------------------------------------------

    def all_reduce(self, x: Array, out: Array, op: ReduceOp, finish: Finish | None = None) -> Test:
        headers, sources = self._visible(range(self.size))
        ufunc = COMBINE[op]
        if sources is None:
            return Advance(rounds.all_reduce(self.board, x, out, ufunc, finish))
        typed = [source.view(x.dtype) for source in sources]
        if not self._direct:
            rounds.reduce_visible(typed, out, ufunc, finish)
            return _done
        assert headers is not None
        segments = [header[OUT] for header in headers]
        if all(segments):
            nbytes = out.nbytes
            outs = [self._there(rank, headers[rank], OUT, nbytes).view(out.dtype) for rank in range(self.size)]
            rounds.reduce_into_all(typed, outs, self.rank, ufunc, finish)
        elif not any(segments):
            rounds.reduce_visible(typed, out, ufunc, finish)
        else:  # somebody's total would overwrite what others still read
            return Advance(rounds.all_reduce(self.board, x, out, ufunc, finish))
        return self._leave()

    def reduce(self, x: Array, out: Array | None, op: ReduceOp, root: int, finish: Finish | None = None) -> Test:
        _, sources = self._visible(range(self.size))
        if sources is None:
            return Advance(rounds.reduce(self.board, x, out, COMBINE[op], finish))
        if out is not None:
            rounds.reduce_visible([source.view(x.dtype) for source in sources], out, COMBINE[op], finish)
        return self._leave()

    def reduce_scatter(
        self, x: Array, out: Array, counts: Sequence[int], op: ReduceOp, finish: Finish | None = None
    ) -> Test:
        _, sources = self._visible(range(self.size))
        if sources is None:
            return Advance(rounds.reduce_scatter(self.board, x, out, counts, COMBINE[op], finish))
        first = sum(counts[: self.rank])
        parts = [source.view(x.dtype)[first : first + counts[self.rank]] for source in sources]
        rounds.reduce_visible(parts, out, COMBINE[op], finish)
        return self._leave()

    # Movements -------------------------------------------------------------------------------------------------------

    def broadcast(self, x: Array, root: int) -> Test:
        _, sources = self._visible([root])
        if sources is None:
            return Advance(rounds.broadcast(self.board, x, root))
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
            return Advance(rounds.gather(self.board, x, out, counts))
        if out is not None:
            at = 0
            for source in sources:
                out[at : at + len(source)] = source
                at += len(source)
        return self._leave()

    def scatter(self, x: Array | None, out: Array, counts: Sequence[int], root: int) -> Test:
        _, sources = self._visible([root])
        if sources is None:
            return Advance(rounds.scatter(self.board, x, out, counts, root))
        first = sum(counts[: self.rank])
        np.copyto(out, sources[0][first : first + len(out)])
        return self._leave()

    def all_to_all(self, x: Array, out: Array, table: Sequence[Sequence[int]]) -> Test:
        _, sources = self._visible(range(self.size))
        if sources is None:
            return Advance(rounds.all_to_all(self.board, x, out, table))
        at = 0
        for source, sends in zip(sources, table, strict=True):
            first, count = sum(sends[: self.rank]), sends[self.rank]
            out[at : at + count] = source[first : first + count]
            at += count
        return self._leave()

    def barrier(self) -> Test:
        self.board.advance()
        return self.board.advanced

    # Shared parts ----------------------------------------------------------------------------------------------------

    def _visible(self, ranks: Sequence[int]) -> tuple[Headers | None, list[Array] | None]:
        """The headers, and what these ranks bring where all can see it: None if any of it must go through the stages.

        Only the first movement of a call has been announced by the headers.
        """
        headers, announced, self._announced, self._direct = self._headers, self._announced, False, False
        if headers is None or not announced:
            return None, None
        sources = []
        parity = self.board.sequence & 1
        for rank in ranks:
            header = headers[rank]
            nbytes, before = header[NBYTES], header[PREFIX]
            if nbytes < 0:
                return headers, None
            if before + nbytes <= SLOT:
                sources.append(self.board.slots[parity][rank][before : before + nbytes])
            elif header[IN]:
                sources.append(self._there(rank, header, IN, nbytes))
                self._direct = True
            else:
                return headers, None
        return headers, sources

    def _there(self, rank: int, header: Sequence[int], word: int, nbytes: int) -> Array:
        return self.shared.view(rank, Place(header[word], header[word + 1]), nbytes)

    def _leave(self) -> Test:
        """What was read straight from the others' arrays must not change before all have read it."""
        if not self._direct:
            return _done
        self.board.advance()
        return self.board.advanced
