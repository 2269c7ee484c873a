"""The communicator that users hold: all collectives, and the methods that make and close communicators.

A method for a collective checks its arguments in the calling thread. It describes the steps of the call as a generator
over the transport's nonblocking operations, and passes the call to the communicator's queue. The queue runs the call
now (`async_op=False`), or starts it.
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
from collectives.backends.shm.hierarchy import use_shared_memory
from collectives.backends.shm.inline import Layout, PrefixOf, no_result
from collectives.engine.array_header import exchange_numbers
from collectives.engine.call import CollectiveOp, Plan
from collectives.engine.communicator_base import check_int, check_timeout
from collectives.engine.registry import CommunicatorRegistry
from collectives.errors import ArgumentError, DtypeError, name_ranks
from collectives.ops.data_movement import DataMovement
from collectives.ops.objects import Objects
from collectives.ops.p2p import LARGEST_TAG, PointToPoint
from collectives.ops.reductions import Reductions
from collectives.reduction import Array
from collectives.transport import ExitNotice, Signatures, Steps, Transport, all_of, make_group

if TYPE_CHECKING:
    from collectives.backends.device.device_communicator import DeviceCommunicator


class Communicator(Reductions, DataMovement, Objects, PointToPoint):
    """A group of ranks that call the same collectives in the same order.

    rank, size: this rank and the number of ranks
    ranks: for each rank of this communicator, its rank in `init()`'s communicator
    local_rank, local_size, node: this rank's number on its node, how many ranks the node has, and the node's number
    backend: "single", "mpi", "threads", or "nccl" if that was requested by name
    timeout: seconds that a step of a collective may take; after that the collective raises CollectiveTimeout

    With `async_op=True`, methods that have this parameter return a `Work` and do not wait for other ranks. Arrays may
    be what `collectives.arrays.as_array` accepts, or arrays on a GPU. They may be empty or strided, 0-d unless axis 0
    is split, and read-only if they are only inputs. Results are new C-contiguous arrays unless `out` is given;
    `broadcast` returns x.

    Before data moves the ranks compare their calls. If the collectives differ, or their op, root, scale, dtype or
    shape, all ranks raise MismatchError, and the communicator remains usable. If all ranks are on one node, they
    compare every call. On several nodes, all ranks compare the first 100 calls of each communicator, or every call
    (`init(check="always")`), and ranks that share memory on a node compare the later calls among themselves. If such a
    later call differs, only these ranks raise MismatchError, and the communicator is broken.

    Raises: ArgumentError on this rank only, for arguments that are invalid whatever the other ranks pass; MismatchError
    on every rank that compared the call; CollectiveTimeout, PeerLeft or CollectivesError if ranks do not take part, and
    the same error at every later call on this communicator; CollectiveInterrupted after a call that Ctrl-C interrupted;
    CommunicatorClosed after `close`; WorldError in a process that a rank has forked; BackendError or NcclError if
    arrays on a GPU cannot be moved.
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
        # Made for the first array on a GPU, or by `connect_nccl`.
        self._device_communicator: DeviceCommunicator | None = None

    def __repr__(self) -> str:
        return f"<Communicator rank {self.rank} of {self.size}, {self.backend}>"

    def _device(self, x: Any) -> DeviceCommunicator:
        if self._device_communicator is None:
            # Imported late: host arrays do not need it.
            from collectives.backends.device.device_communicator import open_device

            self._device_communicator = open_device(self, self.transport, x)
        return self._device_communicator

    def watch_device(self, name: str, keep: Any = None) -> None:
        """Watches the work on the current stream, e.g. a graph with captured collectives of this communicator.

        Over NCCL, work that does not end within the communicator's time limit is treated like a collective that timed
        out. Before the first collective on a GPU, this method does nothing, unless `connect_nccl` has connected the
        ranks.

        keep: an object that is kept alive until the work ends
        Raises: an earlier failure on the device, or the error that broke the communicator; CommunicatorClosed after
        `close`.
        """
        if self._device_communicator is not None:
            self._device_communicator.watch_stream(name, keep)

    def connect_nccl(self) -> None:
        """Connects the ranks over NCCL if it was requested by name. Collective.

        Raises: BackendError on every rank if one of them cannot use it.
        """
        if self.registry.requested == "nccl":
            from collectives.backends.device.device_communicator import connect_nccl

            self._device_communicator = connect_nccl(self, self.transport)

    def _on_closed(self) -> None:
        if self._device_communicator is not None:
            self._device_communicator.close()
        super()._on_closed()

    def barrier(self, *, async_op: bool = False, timeout: float | None = None) -> Any:
        """Returns once every rank has called it.

        timeout: seconds that it may take on this rank, after which the communicator is broken; None: the communicator's
        time limit
        Raises: ArgumentError if timeout is not a number above 0.
        """
        seconds = None if timeout is None else check_timeout(timeout)
        plan = self._plan(self._plan_barrier, ("", "barrier"))
        return self._host.start(plan, None, async_op=async_op, timeout=seconds)

    def _plan_barrier(self, device_text: str, name: str) -> Plan:
        def body(call: CollectiveOp[None], transport: Any, sent: Any, received: Any) -> Steps[None]:
            if call.signatures is None:  # Otherwise the exchange of signatures was a barrier.
                yield self.transport.barrier()

        def layout(signatures: Signatures, prefix_of: PrefixOf) -> Layout:
            return Layout(None, [], no_result)

        return Plan(name, body=body, layout=layout)

    def empty(self, shape: int | Sequence[int], dtype: Any = np.float32, like: Any = None) -> Any:
        """An array in memory that the ranks of a node share. A large one is reduced and gathered without a copy.

        like: an array on a GPU: then the result is an ordinary array there, and the call is not collective

        Collective, as every rank needs the others' memory: all ranks call it, with the same shape and dtype. The array
        is zero at first. Once every rank has dropped its array and all views of it, the next call of `empty` frees the
        memory. If memory cannot be shared (only one rank on the node, ranks that are threads, or a system that forbids
        it, which is logged), the array is in this rank's own memory.

        Returns: an array of this shape and dtype, C-contiguous
        Raises: ArgumentError if a length is not an integer of at least 0; DtypeError if the dtype does not hold
        numbers; MismatchError on every rank if shapes or dtypes differ.
        """
        lengths = tuple(shape) if isinstance(shape, Iterable) else (shape,)
        if not all(isinstance(length, (int, np.integer)) and length >= 0 for length in lengths):
            raise ArgumentError(f"shape should be lengths of at least 0, is {shape!r}")
        lengths = tuple(map(int, lengths))  # Ranks compare lengths as text; NumPy's integers print differently.
        try:
            requested = np.dtype(dtype)
        except TypeError:
            raise DtypeError(f"dtype should be one of NumPy's or ml_dtypes.bfloat16, is {dtype!r}") from None
        dtype = as_array(np.empty(0, requested)).dtype
        if is_device_array(like):
            return self._device(like).empty(lengths, dtype)
        nbytes = math.prod(lengths) * dtype.itemsize

        def steps(call: CollectiveOp[Array]) -> Steps[Array]:
            yield from self.verify(call)
            memory = (yield from self.transport.empty(nbytes)) if nbytes else None
            if memory is None:
                return np.zeros(lengths, dtype)
            return memory.view(dtype).reshape(lengths)

        return self.queue.run(self._new_call(Plan("empty", f"{dtype} {lengths}"), steps))

    def duplicate(self, purpose: str = "") -> Communicator:
        """Makes a communicator of the same ranks. Its calls never mix with those of this one. Collective.

        purpose: what this rank uses the new communicator for; errors and reports show this text after the key
        Raises: TooManyCommunicators on every rank if MPI has no room for another communicator.
        """

        def steps(call: CollectiveOp[Communicator]) -> Steps[Communicator]:
            yield from self.verify(call)
            transport = yield from self._descendant(range(self.size))
            assert transport is not None
            transport = yield from use_shared_memory(transport, self.transport)
            transport.purpose = purpose
            return Communicator(transport, self.timeout, self.registry, self.ranks)

        return self.queue.run(self._new_call(Plan("duplicate"), steps))

    def split(self, color: int | None, key: int | None = None, *, timeout: float | None = None) -> Communicator | None:
        """Splits this communicator. Makes one communicator for each color, of the ranks that pass it. Collective.

        color: an integer of 64 bits; None: this rank is in none of the new communicators
        key: the new communicator orders its ranks by key, and by their rank here if keys are equal; None: the rank here
        timeout: the new communicator's time limit of each call (s); None: that of this communicator
        Returns: this rank's new communicator, or None
        Raises: ArgumentError if color or key is not an integer of 64 bits, or timeout is not a number above 0;
        TooManyCommunicators on every rank if MPI has no room for another communicator.
        """
        child_timeout = self.timeout if timeout is None else check_timeout(timeout)
        for name, number in (("color", color), ("key", key)):
            if not isinstance(number, (int, np.integer, type(None))) or not -(2**63) <= (number or 0) < 2**63:
                raise ArgumentError(f"{name} should be a whole number of 64 bits or None, is {number!r}")
        numbers = [color is not None, color or 0, self.rank if key is None else key]

        def steps(call: CollectiveOp[Communicator | None]) -> Steps[Communicator | None]:
            yield from self.verify(call)
            all_numbers = yield from exchange_numbers(self.transport, numbers)
            members = None if color is None else plan_split(all_numbers, int(color))
            transport = yield from self._descendant(members, "" if color is None else f":{int(color)}")
            if transport is None or members is None:
                return None
            return (yield from self._child(transport, members, child_timeout))

        return self.queue.run(self._new_call(Plan("split"), steps))

    def create_group(self, ranks: Sequence[int], *, timeout: float | None = None) -> Communicator:
        """Makes a communicator of `ranks`. Each of these ranks must call this, and no other rank.

        ranks: ranks of this communicator, each once, in the order of the new communicator; the same on all members
        timeout: the new communicator's time limit of each call (s); None: that of this communicator
        Raises: ArgumentError if this rank is not among them, one of them does not exist or is repeated, or timeout is
        not a number above 0; CollectiveTimeout if a member does not call it in time; PeerLeft if one has left;
        TooManyCommunicators if MPI has no room for another communicator; what `connect_nccl` raises.
        """
        members = tuple(check_int(rank, 0, self.size - 1, "ranks should hold ranks") for rank in ranks)
        if len(set(members)) != len(members) or self.rank not in members:
            raise ArgumentError(
                f"rank {self.rank}: ranks should name each member once, the calling rank among them, is {ranks!r}"
            )
        child_timeout = self.timeout if timeout is None else check_timeout(timeout)
        with self._groups_lock:
            number = self._groups[members]
            self._groups[members] += 1
        # Groups are counted for each list of members, since a rank sees only its own groups. So the key has their hash.
        digest = hashlib.blake2b(repr(members).encode(), digest_size=8).hexdigest()
        key = f"{self.transport.key}.group {digest}.{number}"

        missing = [rank for rank in members if rank != self.rank]

        def steps(call: CollectiveOp[Communicator]) -> Steps[Communicator]:
            number = yield from self._meet(members, key, missing)
            transport = yield from self.transport.group(members, key, number)
            return (yield from self._child(transport, members, child_timeout))

        def exited(exit_notices: Mapping[int, ExitNotice]) -> list[int]:
            notices = {rank: notice for rank, notice in exit_notices.items() if rank in members}
            return [rank for rank, notice in sorted(notices.items()) if notice.failed or key not in notice.calls]

        call = self._new_call(Plan("create_group", name_ranks(sorted(members))), steps)
        call.ended_by = exited
        call.peers = missing
        group = self.queue.run(call, ordered=False)
        group.connect_nccl()
        return group

    def _child(self, transport: Transport, members: Sequence[int], timeout: float) -> Steps[Communicator]:
        """A communicator of `members`, which are ranks of this one."""
        ranks = [self.ranks[rank] for rank in members]
        return Communicator((yield from use_shared_memory(transport)), timeout, self.registry, ranks)

    def _descendant(self, members: Sequence[int] | None, color: str = "") -> Steps[Transport | None]:
        """Makes the transport of a new communicator. Every rank of this communicator takes part: see `make_group`."""
        # The count changes only now that all ranks are here: a call that only some ranks make must not change it.
        number = next(self._descendants)
        return (yield from make_group(self.transport, members, f"{self.transport.key}.{number}{color}", 2 * number))

    def _meet(self, members: Sequence[int], key: str, missing: list[int]) -> Steps[int]:
        """Waits until all members of a group have called `create_group`. Returns: the group's number for the transport.

        missing: the other members; set to those whose messages have not arrived
        """
        # MPI's call that makes a group cannot be aborted while a member is missing, not even when the process exits. So
        # the members first exchange messages. There are two rounds, because a member may send its message of the first
        # round and then give up.
        others = list(missing)
        own_number = np.array([next(self._group_numbers)])
        numbers = {self.rank: own_number}
        for round_ in range(2):
            tag = group_tag(key, round_)
            received = {rank: self._p2p.post(rank, tag) for rank in others}
            sent = all_of([self._send_eager(own_number, rank, tag) for rank in others])
            yield functools.partial(self._p2p.all_matched, received, missing)
            yield sent
            for rank, receive in received.items():
                assert receive.message is not None
                numbers[rank] = receive.message.body.view(np.int64)
        # The first member's number, combined with its rank: unique among all groups being made at once.
        leader = members[0]
        return 2 * (int(numbers[leader][0]) * self.size + leader) + 1

    def close(self) -> None:
        """Ends the communicator: later calls raise CommunicatorClosed, calls in progress are finished.

        May be called at any time, and repeatedly.
        """
        self.queue.close()

    @property
    def key(self) -> str:
        """A text that identifies the communicator: the same on all its ranks, unique in its world."""
        return self.transport.key


def group_tag(key: str, round_: int) -> int:
    """The tag of the messages by which the members of a group meet: a hash of the key, above the tags of users."""
    digest = hashlib.blake2b(f"{key} {round_}".encode(), digest_size=7).digest()
    return LARGEST_TAG + 1 + int.from_bytes(digest, "little")


def plan_split(numbers: Sequence[Sequence[int]], color: int) -> list[int]:
    """The ranks of one color in their new order. numbers: [takes part, color, key] of each rank

    `plan_split([[1, 7, 5], [1, 7, 2], [0, 0, 0], [1, 8, 0]], 7) == [1, 0]`
    """
    ranks = [rank for rank, (takes_part, its_color, _) in enumerate(numbers) if takes_part and its_color == color]
    return sorted(ranks, key=lambda rank: numbers[rank][2])
