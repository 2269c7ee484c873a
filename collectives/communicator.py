"""A communicator as users hold it: every collective by its family, and its life from duplicate or split to close.

Every method checks its arguments in the caller, describes its steps as a generator over the transport's nonblocking
operations, and hands them to the communicator's queue, which runs them now (`async_op=False`) or starts them.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from collectives.arrays import as_array, is_device_array
from collectives.backends.shm.hierarchy import share
from collectives.backends.shm.inline import Layout, PrefixOf, nothing
from collectives.engine.array_header import exchange_numbers
from collectives.engine.call import CollectiveOp, Plan
from collectives.engine.communicator_base import check_timeout, whole
from collectives.engine.registry import CommunicatorRegistry
from collectives.errors import ArgumentError, DtypeError
from collectives.ops.data_movement import DataMovement
from collectives.ops.objects import Objects
from collectives.ops.p2p import LARGEST_TAG, PointToPoint
from collectives.ops.reductions import Reductions
from collectives.reduction import Array
from collectives.transport import ExitNotice, Signatures, Steps, Transport, all_of, make_group, spans

if TYPE_CHECKING:
    from collectives.backends.device.device_communicator import DeviceCommunicator


class Communicator(Reductions, DataMovement, Objects, PointToPoint):
    """A group of ranks that call the same collectives in the same order.

    rank, size: this rank and how many there are
    ranks: which rank of `init()`'s communicator each rank of this one is
    local_rank, local_size, node: the same among the ranks of this node, and which node it is
    backend: "single", "mpi", "threads", or "nccl" if that was asked for by name
    timeout: seconds after which a collective raises CollectiveTimeout

    Every collective takes `async_op=True` to return a `Work` at once. Arrays may be anything that NumPy can read
    without a copy; they may be 0-d, empty, strided, or read-only where they are only read. Results are new
    C-contiguous arrays unless `out` is given.

    Before data moves the ranks compare what they call: another collective, op, root, scale, dtype or shape on one of
    them is a MismatchError on all, after which the communicator can be used as before. Ranks of one node compare every
    call, ranks on different nodes the first 100 of each communicator, or all (`init(check="always")`).

    Raises: ArgumentError on this rank alone for arguments that no rank could mean; MismatchError on every rank;
    CollectiveTimeout, PeerLeft and CollectivesError when the ranks do not meet, after which the communicator raises the
    same error for ever; CommunicatorClosed after `close`.
    """

    def __init__(
        self,
        transport: Transport,
        timeout: float,
        registry: CommunicatorRegistry | None = None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        super().__init__(transport, timeout, registry)
        self.ranks = tuple(range(self.size) if ranks is None else ranks)
        self._descendants = itertools.count()
        self._groups: Counter[tuple[int, ...]] = Counter()
        self._groups_lock = threading.Lock()
        self._group_numbers = itertools.count()
        self._device_communicator: DeviceCommunicator | None = None  # made when the first array on a GPU comes

    def __repr__(self) -> str:
        return f"<Communicator rank {self.rank} of {self.size}, {self.backend}>"

    def _device(self, x: Any) -> DeviceCommunicator:
        if self._device_communicator is None:
            # Here: host arrays need nothing of it.
            from collectives.backends.device.device_communicator import open_device

            self._device_communicator = open_device(self, self.transport, x)
        return self._device_communicator

    def watch_device(self, name: str, keep: Any = None) -> None:
        """What is on the current stream has to end: a graph with captured collectives of this communicator, say.

        Where it does not within the communicator's time limit, it is treated as a collective that does not.
        keep: kept until then
        Raises: what has gone wrong on the device before.
        """
        if self._device_communicator is not None:
            self._device_communicator.watch_stream(name, keep)

    def connect_nccl(self) -> None:
        """Has the ranks meet in NCCL if it was asked for by name. Collective.

        Raises: BackendError on every rank if one of them cannot use it.
        """
        if self.registry.wanted == "nccl":
            from collectives.backends.device.device_communicator import connect_nccl

            self._device_communicator = connect_nccl(self, self.transport)

    def _ended(self) -> None:
        if self._device_communicator is not None:
            self._device_communicator.close()
        super()._ended()

    def barrier(self, *, async_op: bool = False) -> Any:
        """Returns once every rank has called it."""
        return self._host.start(self._plan(self._plan_barrier, ("", "barrier")), None, async_op=async_op)

    def _plan_barrier(self, where: str, name: str) -> Plan:
        def body(call: CollectiveOp[None], transport: Any, sent: Any, received: Any) -> Steps[None]:
            if call.signatures is None:  # else the ranks have met just now
                yield self.transport.barrier()

        def layout(signatures: Signatures, prefix_of: PrefixOf) -> Layout:
            return Layout(None, [], nothing)

        return Plan(name, body=body, layout=layout)

    def empty(self, shape: int | Sequence[int], dtype: Any = np.float32, like: Any = None) -> Any:
        """An array in memory that the ranks of a node share, so that reducing and gathering it needs no copy.

        like: an array on a GPU: then the new one is an ordinary array there, and the call is not collective

        Collective, as every rank needs the others' memory: all ranks call it, with the same shape and dtype. What it
        holds at first is zero. The memory is given back when every rank has let go of its array and all its views.
        Where memory cannot be shared (a node with one rank, a system that forbids it, which the log says) it is this
        rank's own.

        Returns: (shape) of that dtype, C-contiguous
        Raises: ArgumentError if a length is no number of at least 0; DtypeError if the dtype holds no numbers;
        MismatchError on every rank if shapes or dtypes differ.
        """
        lengths = tuple(shape) if isinstance(shape, Iterable) else (shape,)
        if not all(isinstance(length, (int, np.integer)) and length >= 0 for length in lengths):
            raise ArgumentError(f"shape should be lengths of at least 0, is {shape!r}")
        lengths = tuple(map(int, lengths))  # NumPy's numbers have other texts
        try:
            asked = np.dtype(dtype)
        except TypeError:
            raise DtypeError(f"dtype should be one of NumPy's or ml_dtypes.bfloat16, is {dtype!r}") from None
        kind = as_array(np.empty(0, asked)).dtype
        if is_device_array(like):
            return self._device(like).empty(lengths, kind)
        nbytes = math.prod(lengths) * kind.itemsize

        def steps(call: CollectiveOp[Array]) -> Steps[Array]:
            yield from self.verify(call)
            memory = (yield from self.transport.empty(nbytes)) if nbytes else None
            if memory is None:
                return np.zeros(lengths, kind)
            return memory.view(kind).reshape(lengths)

        return self.queue.run(self._described(Plan("empty", f"{kind} {lengths}"), steps))

    def duplicate(self, purpose: str = "") -> Communicator:
        """A communicator of the same ranks whose calls never mix with this one's. Collective.

        purpose: what this rank uses it for; errors and reports name it beside the key
        """

        def steps(call: CollectiveOp[Communicator]) -> Steps[Communicator]:
            yield from self.verify(call)
            transport = yield from self._descendant(range(self.size))
            assert transport is not None
            transport = yield from share(transport, self.transport)
            transport.purpose = purpose
            return Communicator(transport, self.timeout, self.registry, self.ranks)

        return self.queue.run(self._described(Plan("duplicate"), steps))

    def split(self, color: int | None, key: int | None = None, *, timeout: float | None = None) -> Communicator | None:
        """A communicator of the ranks that give the same color. Collective: every rank of this one calls it.

        color: any whole number; None: this rank is in none of the new communicators
        key: ranks are ordered by it, equal ones as they are here; None: this rank's number here
        timeout: seconds, of each call of the new communicator; None: as here
        Returns: this rank's new communicator, or None
        Raises: ArgumentError if color or key is no whole number, or timeout is no number above 0.
        """
        limit = self.timeout if timeout is None else check_timeout(timeout)
        for what, number in (("color", color), ("key", key)):
            if not isinstance(number, (int, np.integer, type(None))) or not -(2**63) <= (number or 0) < 2**63:
                raise ArgumentError(f"{what} should be a whole number of 64 bits or None, is {number!r}")
        mine = [color is not None, color or 0, self.rank if key is None else key]

        def steps(call: CollectiveOp[Communicator | None]) -> Steps[Communicator | None]:
            yield from self.verify(call)
            everyones = yield from exchange_numbers(self.transport, mine)
            members = None if color is None else plan_split(everyones, int(color))
            transport = yield from self._descendant(members, "" if color is None else f":{int(color)}")
            if transport is None or members is None:
                return None
            return (yield from self._child(transport, members, limit))

        return self.queue.run(self._described(Plan("split"), steps))

    def create_group(self, ranks: Sequence[int], *, timeout: float | None = None) -> Communicator:
        """A communicator of these ranks, made by them alone: each of them calls it, and no other rank needs to.

        ranks: of this communicator, each once, in the order that they have in the new one; the same on all of them
        timeout: seconds, of each call of the new communicator; None: as here
        Raises: ArgumentError if this rank is not among them, one of them does not exist or comes twice, or timeout is
        no number above 0; CollectiveTimeout if not all of them call it; PeerLeft if one of them leaves without.
        """
        members = tuple(whole(rank, 0, self.size - 1, "ranks should hold ranks") for rank in ranks)
        if len(set(members)) != len(members) or self.rank not in members:
            raise ArgumentError(
                f"rank {self.rank}: ranks should name each member once, the calling rank among them, is {ranks!r}"
            )
        limit = self.timeout if timeout is None else check_timeout(timeout)
        with self._groups_lock:
            number = self._groups[members]
            self._groups[members] += 1
        # Members alone count the groups they make, so that theirs must be part of the key.
        digest = hashlib.blake2b(repr(members).encode(), digest_size=8).hexdigest()
        key = f"{self.transport.key}.group {digest}.{number}"

        missing = [rank for rank in members if rank != self.rank]

        def steps(call: CollectiveOp[Communicator]) -> Steps[Communicator]:
            number = yield from self._meet(members, key, missing)
            transport = yield from self.transport.group(members, key, number)
            return (yield from self._child(transport, members, limit))

        def gone(exit_notices: Mapping[int, ExitNotice]) -> list[int]:
            left = {rank: each for rank, each in exit_notices.items() if rank in members}
            return [rank for rank, each in sorted(left.items()) if each.failed or key not in each.calls]

        call = self._described(Plan("create_group", f"ranks {spans(sorted(members))}"), steps)
        call.gone = gone
        call.peers = missing
        made = self.queue.run(call, ordered=False)
        made.connect_nccl()
        return made

    def _child(self, transport: Transport, members: Sequence[int], limit: float) -> Steps[Communicator]:
        """A communicator of these ranks of this one."""
        ranks = [self.ranks[rank] for rank in members]
        return Communicator((yield from share(transport)), limit, self.registry, ranks)

    def _descendant(self, members: Sequence[int] | None, color: str = "") -> Steps[Transport | None]:
        """The transport of a communicator that all ranks of this one make together: see `make_group`."""
        # Counted when all have met: a call that only some of them make has no number.
        number = next(self._descendants)
        return (yield from make_group(self.transport, members, f"{self.transport.key}.{number}{color}", 2 * number))

    def _meet(self, members: Sequence[int], key: str, missing: list[int]) -> Steps[int]:
        """Waits until each other member of a group has come. Returns: the number of the group for `Transport.group`.

        missing: the other members; those that have come are taken out of it
        """
        # MPI cannot end the making of a group before all members have come, not even when the process exits. The second
        # round is for a member that gave up after the first: what it sent there still arrives.
        others = list(missing)
        mine = np.array([next(self._group_numbers)])
        numbers = {self.rank: mine}
        for round_ in range(2):
            tag = group_tag(key, round_)
            received = {rank: self._p2p.post(rank, tag) for rank in others}
            sent = all_of([self._send_eager(mine, rank, tag) for rank in others])
            yield functools.partial(self._p2p.all_matched, received, missing)
            yield sent
            for rank, receive in received.items():
                assert receive.message is not None
                numbers[rank] = receive.message.body.view(np.int64)
        # The first member's number, with that rank in it: no two groups that any rank makes at once have the same one.
        leader = members[0]
        return 2 * (int(numbers[leader][0]) * self.size + leader) + 1

    def close(self) -> None:
        """Takes no further calls; those under way are finished. May be called at any time, in any order, repeatedly."""
        self.queue.close()

    @property
    def key(self) -> str:
        """The same text on every rank, and another one for each communicator of a world."""
        return self.transport.key


def group_tag(key: str, round_: int) -> int:
    """The tag of the messages by which the members of a group meet: beyond those of users, and another for each key."""
    digest = hashlib.blake2b(f"{key} {round_}".encode(), digest_size=7).digest()
    return LARGEST_TAG + 1 + int.from_bytes(digest, "little")


def plan_split(everyones: Sequence[Sequence[int]], color: int) -> list[int]:
    """The ranks of one color in their new order. everyones: [takes part, color, key] of each rank.

    `plan_split([[1, 7, 5], [1, 7, 2], [0, 0, 0], [1, 8, 0]], 7) == [1, 0]`
    """
    ranks = [rank for rank, (takes_part, theirs, _) in enumerate(everyones) if takes_part and theirs == color]
    return sorted(ranks, key=lambda rank: everyones[rank][2])
