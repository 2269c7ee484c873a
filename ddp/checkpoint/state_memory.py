"""Keeps the state of training in memory that outlives the ranks, so that a restart does not read the disk.

`ddp-launch --max-restarts` holds two slots of anonymous memory for each rank (`collectives.world.STATE_MEMORY`). For a
rank that cannot open the launcher's memory, such as one on another host, its agent holds them. A rank writes the
contents of a checkpoint into its two slots in turn, so that once the first write has ended, one of them is always
complete. A slot consists of

    8 bytes    the commit word: 0 while the slot is being written, then a checksum of the header
    header     format, job, and the fields of `Stamp`
    arrays     from the second page on, each at a multiple of 64: first this rank's part of what is equal on all ranks
    arrays     from byte `own_at` on: those of this rank alone, and copies of pieces of ranks on other nodes
    text       the ranks whose pieces are copied here; then JSON: the rest of the state, and the positions of the arrays

The ranks of each node together write one copy of what is equal on all ranks, so that a copy survives the loss of all
other nodes. The pieces of a sharded optimizer are not equal. So before ranks write, each rank sends its pieces to a
rank on another node (`capture_with_copies`). The pieces are then in the slots of both ranks, and are complete when
these slots are. After a restart the ranks agree on the newest state that is complete (`choose_state`). A rank reads
the slots on its node. Data that it needs and that these slots lack is broadcast by a rank that can read it.

A rank may be killed between any two instructions. The commit word is cleared before anything else is written, and set
after everything else is, so it shows whether a slot is complete. The arrays have no checksum: unlike a disk, memory
does not return other bytes than were written.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import mmap
import os
import struct
import time
import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from collectives import world
from collectives.backends.shm.segment import available_memory
from collectives.communicator import Communicator
from collectives.start import joined
from ddp._device import CPU, to_device
from ddp.checkpoint.checkpoint_files import Manifest, ShardInfo, TensorEntry, assemble_tensors, new_entry
from ddp.checkpoint.checkpoint_reader import Saved
from ddp.checkpoint.rank_group import RankGroup
from ddp.checkpoint.state import ArraySource, Captured, TrainedObjects, capture, rank_array_name
from ddp.errors import ArgumentError

#: The beginning of error messages if the state cannot be written to memory or read from it.
FAILED = "a restart goes on from disk, not from memory"
_log = logging.getLogger("ddp.checkpoint")
_FORMAT = b"ddp-st03"
_WORD = struct.Struct("=Q")
# The format, the job's token, and the fields of `Stamp`. Of its last field, `copied`, it has only the length.
_HEADER = struct.Struct("=8s32s16sQQQQQQQQQQQ")
# The dtype of `Stamp.copied` in a slot.
_COPIED = np.dtype(np.uint32)
# The position of the first array in a slot, and the alignment of all arrays (bytes).
_BEGIN = mmap.PAGESIZE
_ALIGNED = 64
# Bytes by which the text may grow before its slot has to grow.
_SPARE = 1 << 16
# With memory_every="auto", at most this fraction of the time is spent on writes to memory.
_TIME_FRACTION = 0.01


class Stamp(NamedTuple):
    """The header of a slot.

    owner: a hash of the Checkpointer's folder; start: which start of the job wrote the slot, from 0
    node: the rank's node; node_size: its number of ranks. Together they wrote one copy of what is equal on all ranks
    sharded: whether this rank holds pieces of a sharded optimizer, or ranks exchange copies of such pieces
    own_at: position of the first array that this rank alone has; text_at, text_bytes: position and length of the text
    copied: the ranks on other nodes whose pieces are copied in this slot; the text begins with them
    """

    owner: bytes
    rank: int
    size: int
    start: int
    step: int
    node: int
    node_size: int
    sharded: int
    own_at: int
    text_at: int
    text_bytes: int
    copied: tuple[int, ...] = ()

    @property
    def json_at(self) -> int:
        """The position of the text's JSON."""
        return self.text_at + len(self.copied) * _COPIED.itemsize

    @property
    def end(self) -> int:
        """The length of all that was written, in bytes."""
        return self.text_at + self.text_bytes


class Slot:
    """One slot. fd: the descriptor of its memory, which `close` closes; token: the job's"""

    def __init__(self, fd: int, token: str) -> None:
        self._fd = fd
        self._token = token.encode()
        self._map: mmap.mmap | None = None

    def close(self) -> None:
        """Closes the descriptor. Memory that was mapped before stays valid."""
        os.close(self._fd)

    @property
    def size(self) -> int:
        """The length of its memory in bytes."""
        return os.fstat(self._fd).st_size

    def reserve(self, nbytes: int) -> None:
        """Allocates the memory now, so that no later write can fail. Raises: OSError if the machine has too little."""
        os.posix_fallocate(self._fd, 0, nbytes)

    def stamp(self) -> Stamp | None:
        """The header; None if the slot is empty, half written, of another job, or of another format."""
        begin = os.pread(self._fd, _WORD.size + _HEADER.size, 0)
        if len(begin) < _WORD.size + _HEADER.size:
            return None
        header = begin[_WORD.size :]
        form, token, *fields, count = _HEADER.unpack(header)
        if _WORD.unpack(begin[: _WORD.size])[0] != _commit_word(header) or (form, token) != (_FORMAT, self._token):
            return None
        stamp = Stamp(*fields)
        copied = np.frombuffer(os.pread(self._fd, count * _COPIED.itemsize, stamp.text_at), _COPIED)
        return stamp._replace(copied=tuple(copied.tolist()))

    def map(self) -> mmap.mmap:
        """Maps all of its memory."""
        if self._map is None or len(self._map) < self.size:
            self._map = mmap.mmap(self._fd, self.size)
        return self._map

    def write(self, stamp: Stamp, sources: Sequence[ArraySource], starts: Sequence[int], text: bytes) -> None:
        """Replaces the slot's contents. Enough memory must be reserved. starts: the position of each array"""
        memory = self.map()
        _WORD.pack_into(memory, 0, 0)
        for source, start in zip(sources, starts, strict=True):
            array = source.array
            np.ndarray(array.shape, array.dtype, memory, start)[...] = to_device(array, CPU)
        memory[stamp.text_at : stamp.text_at + stamp.text_bytes] = text
        header = _HEADER.pack(_FORMAT, self._token, *stamp[:-1], len(stamp.copied))
        memory[_WORD.size : _WORD.size + len(header)] = header
        _WORD.pack_into(memory, 0, _commit_word(header))


def _commit_word(header: bytes) -> int:
    """The commit word of a complete slot with this header; never 0."""
    return 1 << 32 | zlib.crc32(header)


def lay_out_slot(sources: Sequence[ArraySource]) -> tuple[list[int], int]:
    """The positions of the arrays in a slot, and of the text."""
    starts = []
    end = _BEGIN
    for source in sources:
        starts.append(end)
        end += -(-source.array.nbytes // _ALIGNED) * _ALIGNED
    return starts, end


def holders_of_copies(nodes: Sequence[int]) -> list[int]:
    """For each rank, the rank on another node that gets a copy of its pieces. nodes: the node of each rank

    Ranks choose in turn. Each takes the rank on another node that has the fewest copies so far. If several have as few,
    it takes the next one after itself in rank order, where rank 0 follows the last rank.

    `holders_of_copies([0, 0, 1, 1]) == [2, 3, 0, 1]`
    """
    size = len(nodes)
    copies = [0] * size
    holders = []
    for rank, node in enumerate(nodes):
        others = [i % size for i in range(rank, rank + size) if nodes[i % size] != node]
        holders.append(min(others, key=copies.__getitem__))
        copies[holders[-1]] += 1
    return holders


def capture_with_copies(training: TrainedObjects, ranks: RankGroup, memory: StateMemory) -> Captured:
    """Collects what this rank writes, with copies of the pieces of ranks on other nodes. Collective.

    Raises: CheckpointError on all ranks if one of them fails or has too little memory. Then no copy was sent.
    """
    comm = memory.comm
    captured: Any = None

    def describe() -> Any:
        nonlocal captured
        captured = capture(training, ranks, (comm.local_rank, comm.local_size))
        nbytes = lay_out_slot(captured.pieces)[1]
        return comm.node, nbytes, captured.own_state["pieces"], [source.name for source in captured.pieces]

    described = ranks.run_on_all_ranks(FAILED, describe)
    holders = holders_of_copies([node for node, *_ in described])
    copied = captured.own_state["copied"] = [rank for rank, holder in enumerate(holders) if holder == comm.rank]
    needed = lay_out_slot(captured.sources)[1] + sum(described[rank][1] for rank in copied)
    ranks.run_on_all_ranks(FAILED, lambda: memory.check_room(needed))
    ranks.run_on_all_ranks(FAILED, lambda: memory.reserve(needed))
    sending = [comm.send(source.array, holders[comm.rank], async_op=True) for source in captured.pieces]
    for rank in copied:
        _, _, pieces_of_optimizers, names = described[rank]
        for own_pieces, pieces in zip(captured.own_state["pieces"], pieces_of_optimizers, strict=True):
            own_pieces += pieces
        captured.pieces.extend(ArraySource(name=name, array=comm.recv(rank)) for name in names)
    for work in sending:
        work.wait()
    return captured


class StateMemory:
    """One rank's access to the slots of a job.

    variable: the launcher's description of the slots (`collectives.world.STATE_MEMORY`)
    index: this rank's number in the job; start: which start of the job this is, from 0
    held: the newest start whose ranks have all written their state; the states of later starts are incomplete
    owner: the folder of the Checkpointer; comm: its communicator
    due: the earliest time (monotonic, s) of the next write that keeps to `_TIME_FRACTION`

    Raises: OSError if this rank's slots cannot be opened, or belong to another job or user.
    """

    def __init__(self, variable: str, index: int, start: int, held: int, owner: str, comm: Communicator) -> None:
        self._token, *words = variable.split()
        self._owner = hashlib.blake2b(owner.encode(errors="surrogateescape"), digest_size=16).digest()
        self._start = start
        self._held = held
        # Whether the newest state may be that of another Checkpointer.
        self._has_other_owners = False
        self.comm = comm
        self._paths = [f"/proc/{word}" for word in words]
        own = self._paths[2 * index : 2 * index + 2]
        if not own:
            raise OSError(errno.ENXIO, f"there are {len(words) // 2} pairs of slots, none for rank {index}")
        self._own = [self._open(path) for path in own]
        self._turn = 0
        self.due = 0.0

    def _open(self, path: str) -> Slot:
        """Opens the slot at `path`, which is /proc/PID/fd/FD. Raises: OSError if that is not a slot of this job.

        On another host, PID may belong to another process, or to none.
        """
        name = f"/memfd:{world.STATE_MEMORY_NAME}-{self._token}"
        if os.readlink(path).startswith(name):  # opening another process's terminal or pipe would have side effects
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            # By now the path may lead to another file.
            if os.readlink(f"/proc/self/fd/{fd}").startswith(name) and os.fstat(fd).st_uid == os.geteuid():
                return Slot(fd, self._token)
            os.close(fd)
        raise OSError(errno.ENXIO, f"{path} is none of the job's memory, or another user's")

    def close(self) -> None:
        """Closes the descriptors of this rank's slots. The launcher or the agent keeps their contents."""
        for slot in self._own:
            slot.close()

    # -- writing

    def check_room(self, needed: int) -> None:
        """Checks that there is memory to make both slots of this rank `needed` bytes long.

        Raises: OSError if the slots' growth, times the number of ranks on this machine, is more than half of the
        available memory.
        """
        if all(slot.size >= needed for slot in self._own):
            return
        growth = sum(max(0, needed + _SPARE - slot.size) for slot in self._own) * self.comm.local_size
        available = min([available_memory(), *control_group_memory()])
        if growth > available // 2:
            text = (
                f"{growth:,} bytes are needed on this machine, and half of the {available:,} that are left is the most"
            )
            raise OSError(errno.ENOMEM, text)

    def reserve(self, needed: int) -> None:
        """Makes both slots of this rank at least `needed` bytes long, and a little longer for the text.

        Raises: OSError if there is too little memory.
        """
        for slot in self._own:
            if slot.size < needed:
                slot.reserve(needed + _SPARE)

    def write(self, step: int, captured: Captured) -> None:
        """Writes this rank's part of the state at a step. The other slot keeps the previous state.

        Raises: OSError if there is too little memory; ArgumentError for a state that is not JSON, or an unknown dtype.
        """
        comm = self.comm
        sources = captured.sources
        count = len(captured.equal)
        starts, text_at = lay_out_slot(sources)
        try:
            entries = [
                (source.name, new_entry(source.array, source.piece, comm.rank, start))
                for source, start in zip(sources, starts, strict=True)
            ]
            state = captured.state if comm.local_rank == 0 else None
            parts = [state, captured.own_state, entries[:count], entries[count:]]
            copied = np.array(captured.own_state.get("copied", ()), _COPIED)
            text = copied.tobytes() + json.dumps(parts, separators=(",", ":")).encode()
        except (TypeError, ValueError, KeyError, RecursionError) as error:
            raise ArgumentError(f"the state cannot be held in memory: {error!r:.200}") from error
        slot = self._own[self._turn]
        self.check_room(text_at + len(text))
        self.reserve(text_at + len(text))
        stamp = Stamp(
            owner=self._owner,
            rank=comm.rank,
            size=comm.size,
            start=self._start,
            step=step,
            node=comm.node,
            node_size=comm.local_size,
            # Copies are made only if an optimizer is sharded. This rank may have no piece of it.
            sharded=bool(captured.pieces) or "copied" in captured.own_state,
            own_at=[*starts, text_at][count],
            text_at=text_at,
            text_bytes=len(text),
            copied=tuple(copied.tolist()),
        )
        slot.write(stamp, sources, starts, text)
        self._turn = 1 - self._turn

    def took(self, began: float) -> None:
        """Called after a write: sets when the next one is due. began: when the write began (monotonic, s)"""
        now = time.monotonic()
        self.due = now + (now - began) * (1 / _TIME_FRACTION - 1)

    # -- reading

    def newest(self, ranks: RankGroup, same_pieces: bool = True) -> SavedInMemory | None:
        """The newest complete state of earlier starts; None if there is none. Collective.

        same_pieces: whether each rank needs the same pieces of a sharded optimizer again if the number of ranks is
        unchanged

        Every state of a later start of the job is newer than all states of earlier starts.

        Raises: CheckpointError on all ranks if one of them cannot read its slots, or has too little memory.
        """
        slots: dict[Stamp, Slot] = {}
        memories: dict[int, Any] = {}

        def find() -> list[Stamp]:
            slots.update(self._readable(stack))
            return [*slots]

        def map_slots(stamps: Sequence[Stamp]) -> None:
            for stamp in stamps:
                slot = slots.get(stamp)
                memories[stamp.rank] = np.empty(stamp.end, np.uint8) if slot is None else slot.map()

        with ExitStack() as stack:
            choice = choose_state(ranks.run_on_all_ranks(FAILED, find), same_pieces)
            if choice is None:
                if self._held >= 0 and not self._has_other_owners and self.comm.rank == 0:
                    _log.warning("no complete state is left in memory: training goes on from disk")
                return None
            ranks.run_on_all_ranks(FAILED, lambda: map_slots(choice.stamps))
            # The next write must not replace this state.
            self._turn = int(self._own[0].stamp() in choice.stamps)
        for stamp, root, begin, end in choice.moves:
            self.comm.broadcast(np.frombuffer(memories[stamp.rank], np.uint8)[begin:end], root)
        return SavedInMemory(choice.stamps, choice.copies[ranks.rank], choice.own[ranks.rank], memories)

    def _readable(self, stack: ExitStack) -> Iterator[tuple[Stamp, Slot]]:
        """The slots on this machine that hold a complete part of a state of an earlier start. stack: closes them"""
        for path in self._paths:
            try:
                slot = stack.enter_context(closing(self._open(path)))
            except OSError:  # it is on another host, or its holder has ended
                continue
            stamp = slot.stamp()
            if stamp is None:
                continue
            if stamp.owner != self._owner:
                self._has_other_owners = True
            elif stamp.start <= self._held:
                yield stamp, slot


class Choice(NamedTuple):
    """A complete state in memory.

    stamps: of its slots, one for each rank that wrote it, in order, without ranks that were lost
    copies: for each rank that loads it, the slots from which it takes what is equal on all ranks
    own: for each rank that loads it, the slots from which it takes arrays that are not equal on all ranks
    moves: (slot, rank, begin, end): `rank` broadcasts bytes `begin` to `end` of the slot to the others
    """

    stamps: Sequence[Stamp]
    copies: Sequence[Sequence[Stamp]]
    own: Sequence[Collection[Stamp]]
    moves: Sequence[tuple[Stamp, int, int, int]]


def choose_state(slots_by_rank: Sequence[Collection[Stamp]], same_pieces: bool = True) -> Choice | None:
    """Chooses the newest complete state; None if there is none.

    slots_by_rank: the stamps of the slots that each rank can read; same_pieces: as for `StateMemory.newest`

    If no slot of a rank can be read, the rank was lost with its host, or its agent, which held the slots, has ended. A
    state is complete without these slots if other slots hold the data that is equal on all ranks, and copies of the
    lost rank's pieces of sharded optimizers.

    With same_pieces, if there are as many ranks as before and each can read the slot that it wrote, the arrays that
    only one rank has stay on their host. Only the texts of these slots are sent to the others.
    """
    everything = set().union(*slots_by_rank)
    for start, step, size in sorted({(stamp.start, stamp.step, stamp.size) for stamp in everything}, reverse=True):
        of_start = [stamp for stamp in everything if (stamp.start, stamp.size) == (start, size)]
        stamps = sorted((stamp for stamp in of_start if stamp.step == step), key=lambda stamp: stamp.rank)
        if len(stamps) < len({stamp.rank for stamp in of_start}):
            continue  # a rank that is not lost has not written this step
        available = {stamp.rank for stamp in stamps}.union(*(stamp.copied for stamp in stamps))
        if len(available) < size and any(stamp.sharded for stamp in stamps):
            continue
        nodes: dict[int, list[Stamp]] = {}
        for stamp in stamps:
            nodes.setdefault(stamp.node, []).append(stamp)
        complete = [copy for copy in nodes.values() if len(copy) == copy[0].node_size]
        copies = [next((copy for copy in complete if set(copy) <= set(slots)), []) for slots in slots_by_rank]
        first = next(filter(None, copies), None)
        if first is None:
            continue
        # For each slot that some rank cannot read, the first rank that can.
        readers = {}
        for stamp in stamps:
            if any(stamp not in slots for slots in slots_by_rank):
                readers[stamp] = next(rank for rank, slots in enumerate(slots_by_rank) if stamp in slots)
        own = [[stamp for stamp in stamps if stamp in slots] for slots in slots_by_rank]
        stayed = same_pieces and len(slots_by_rank) == size
        stayed = stayed and all(rank in {stamp.rank for stamp in slots} for rank, slots in enumerate(own))
        moves = [(stamp, rank, stamp.text_at if stayed else stamp.own_at, stamp.end) for stamp, rank in readers.items()]
        if [] in copies:
            copies = [first] * len(slots_by_rank)
            moves += [(stamp, readers[stamp], _BEGIN, stamp.own_at) for stamp in first if stamp in readers]
        return Choice(stamps, copies, own if stayed else [stamps] * len(slots_by_rank), moves)
    return None


class SavedInMemory(Saved):
    """A state in slots, with the interface of a checkpoint.

    stamps: of all slots of the state; copy: of the slots from which to take what is equal on all ranks; own: of the
    slots from which to take other arrays
    memories: the memory of each slot, by rank

    A rank that was lost gets the own state of the first rank of `copy`.
    """

    def __init__(
        self, stamps: Sequence[Stamp], copy: Sequence[Stamp], own: Collection[Stamp], memories: dict[int, Any]
    ) -> None:
        self._memories = memories
        texts = {
            stamp.rank: json.loads(bytes(memoryview(memories[stamp.rank])[stamp.json_at : stamp.end]))
            for stamp in stamps
        }
        readable = {stamp.rank for stamp in own}
        own_table: dict[str, Any] = {}  # an array and its copy have the same name
        own_states = []
        for rank in range(stamps[0].size):
            origin = rank if rank in texts else copy[0].rank
            _, own_state, _, entries = texts[origin]
            own_states.append(own_state)
            old_prefix = rank_array_name(origin, "")
            new_prefix = rank_array_name(rank, "")
            if origin in readable:
                own_table |= {name.replace(old_prefix, new_prefix, 1): entry for name, entry in entries}
        tables = [*(texts[stamp.rank][2] for stamp in copy), own_table.items()]
        tensors = assemble_tensors({name: TensorEntry.decode(entry) for name, entry in table} for table in tables)
        infos = [ShardInfo(0, 0, "")] * stamps[0].size
        super().__init__("memory", Manifest(stamps[0].step, infos, tensors, texts[copy[0].rank][0], own_states))

    def _open(self, rank: int) -> Any:
        return nullcontext(_SlotReader(self._memories[rank]))


class _SlotReader(NamedTuple):
    """Reads a slot with the interface of `checkpoint_files.ShardReader`."""

    memory: Any

    def verified(
        self, name: str, offset: int, nbytes: int, sha256: str, out: memoryview | None = None, progress: Any = None
    ) -> None:
        if out is not None:
            out[:] = memoryview(self.memory)[offset : offset + nbytes]


def control_group_memory(groups: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> Iterator[int]:
    """Yields the free bytes of each control group (version 2) of this process that has a memory limit.

    Inactive file cache counts as free.
    """
    folder = Path(root, Path(groups).read_text().rpartition("0::/")[2].strip())
    for group in (folder, *folder.parents):
        try:
            limit, used, about = ((group / f"memory.{name}").read_text() for name in ("max", "current", "stat"))
            yield int(limit) - int(used) + int(dict(line.split() for line in about.splitlines())["inactive_file"])
        except (OSError, ValueError):  # no such group, or no limit ("max")
            continue


def offered() -> bool:
    """Whether the launcher holds memory for the ranks of this world, and this process has joined the world."""
    return bool(os.environ.get(world.STATE_MEMORY)) and world.supervised() and joined() is not None


def take(owner: str, comm: Communicator) -> StateMemory:
    """Opens the launcher's memory for the Checkpointer of the folder `owner`. Raises: OSError as `StateMemory` does."""
    world_comm = joined()
    assert world_comm is not None
    start = int(os.environ.get(world.ATTEMPT, "0"))
    held = int(os.environ.get(world.STATE_HELD, "-1"))
    return StateMemory(os.environ[world.STATE_MEMORY], world_comm.rank, start, held, owner, comm)
