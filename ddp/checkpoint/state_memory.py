"""Keeps the state of training in memory that outlives the ranks, so that a restart does not read the disk.

`ddp-launch --max-restarts` holds two slots of anonymous memory for each rank (`collectives.world.STATE_MEMORY`). A rank
writes the contents of a checkpoint into its two slots in turn, so that one of them is always complete. After a restart
the ranks read the slots of all ranks. A slot consists of

    8 bytes    the commit word: 0 while the slot is being written, then a checksum of the header
    header     format, job, Checkpointer, rank and number of ranks, start of the job, step, position of the text
    arrays     from byte 4096 on, each at a multiple of 64
    text       JSON: the rest of the state, and the positions of the arrays

A rank may be killed between any two instructions. The commit word is cleared before anything else is written, and set
after everything else is, so it shows whether a slot is complete. The arrays have no checksum: unlike a disk, memory
does not return other bytes than were written.
"""

from __future__ import annotations

import errno
import hashlib
import json
import mmap
import os
import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from collectives import world
from collectives.backends.shm.segment import available_memory
from collectives.start import joined
from ddp._device import CPU, to_device
from ddp.checkpoint.checkpoint_files import Manifest, ShardInfo, TensorEntry, assemble_tensors, new_entry
from ddp.checkpoint.saved import Saved
from ddp.checkpoint.state import ArraySource
from ddp.errors import ArgumentError
from ddp.serialization.structure import JSON

_FORMAT = b"ddp-st01"
_WORD = struct.Struct("=Q")
# The format, the job's token, and the fields of `Stamp`.
_HEADER = struct.Struct("=8s32s16sQQQQQQ")
# Where the first array starts, in bytes; and the alignment of each.
_BEGIN = mmap.PAGESIZE
_ALIGNED = 64
# The text may grow by so many bytes before its slot has to grow.
_SPARE = 1 << 16
# At most this fraction of the time is spent on writing.
_TIME_FRACTION = 0.01


class Stamp(NamedTuple):
    """The header of a slot.

    owner: a hash that identifies the Checkpointer; start: which start of the job wrote it, from 0
    text_at, text_bytes: position and length of the text
    """

    owner: bytes
    rank: int
    size: int
    start: int
    step: int
    text_at: int
    text_bytes: int


class Slot:
    """One slot. fd: of its memory, closed by `close`; token: of the job"""

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
        """The header; None if the slot is half written, of another job, or of another format."""
        begin = os.pread(self._fd, _WORD.size + _HEADER.size, 0)
        if len(begin) < _WORD.size + _HEADER.size:
            return None
        header = begin[_WORD.size :]
        form, token, *fields = _HEADER.unpack(header)
        if _WORD.unpack(begin[: _WORD.size])[0] != _commit_word(header) or (form, token) != (_FORMAT, self._token):
            return None
        return Stamp(*fields)

    def map(self) -> mmap.mmap:
        """Maps all of its memory."""
        if self._map is None or len(self._map) < self.size:
            self._map = mmap.mmap(self._fd, self.size)
        return self._map

    def write(self, stamp: Stamp, sources: Sequence[ArraySource], starts: Sequence[int], text: bytes) -> None:
        """Replaces its contents. The size must have been reserved. starts: the position of each array"""
        memory = self.map()
        _WORD.pack_into(memory, 0, 0)
        for source, start in zip(sources, starts, strict=True):
            array = source.array
            np.ndarray(array.shape, array.dtype, memory, start)[...] = to_device(array, CPU)
        memory[stamp.text_at : stamp.text_at + stamp.text_bytes] = text
        header = _HEADER.pack(_FORMAT, self._token, *stamp)
        memory[_WORD.size : _WORD.size + len(header)] = header
        _WORD.pack_into(memory, 0, _commit_word(header))

    def text(self, stamp: Stamp) -> Any:
        """The text, decoded from JSON."""
        return json.loads(self.map()[stamp.text_at : stamp.text_at + stamp.text_bytes])


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


class StateMemory:
    """One rank's access to the slots of all ranks of a job.

    variable: the launcher's description of the slots (`collectives.world.STATE_MEMORY`)
    index: this rank's number in the job; start: which start of the job this is, from 0
    owner: the folder of the Checkpointer; rank, size: of this rank in the communicator of the Checkpointer
    due: when (monotonic, s) the state may be written again; writing takes at most a hundredth of the time

    Raises: OSError if the slots cannot be opened, or belong to another job or user.
    """

    def __init__(self, variable: str, index: int, start: int, owner: str, rank: int, size: int) -> None:
        self._token, pid, *fds = variable.split()
        self._owner = hashlib.blake2b(owner.encode(errors="surrogateescape"), digest_size=16).digest()
        self._start = start
        self._rank = rank
        self._size = size
        self._paths = [f"/proc/{pid}/fd/{fd}" for fd in fds]
        own = self._paths[2 * index : 2 * index + 2]
        if not own:
            raise OSError(errno.ENXIO, f"there are {len(fds) // 2} pairs of slots, none for rank {index}")
        self._own = [self._open(path) for path in own]
        self._turn = 0
        self.due = 0.0

    def _open(self, path: str) -> Slot:
        """Raises: OSError if it is no slot of this job: in another container, the pid is another process."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        name = os.readlink(f"/proc/self/fd/{fd}")
        if name.startswith(f"/memfd:{world.STATE_MEMORY_NAME}-{self._token}") and os.fstat(fd).st_uid == os.geteuid():
            return Slot(fd, self._token)
        os.close(fd)
        raise OSError(errno.ENXIO, f"{path} is none of the job's memory, or another user's")

    def close(self) -> None:
        """Closes the descriptors of this rank's slots. The launcher keeps their contents."""
        for slot in self._own:
            slot.close()

    # -- writing

    def _reserve(self, needed: int) -> None:
        """Makes both slots of this rank at least `needed` bytes long.

        Raises: OSError if all ranks together would take more than half of the memory that is available.
        """
        growth = sum(max(0, needed - slot.size) for slot in self._own) * self._size
        available = min([available_memory(), *control_group_memory()])
        if growth > available // 2:
            text = (
                f"{growth:,} bytes are needed on this machine, and half of the {available:,} that are left is the most"
            )
            raise OSError(errno.ENOMEM, text)
        for slot in self._own:
            slot.reserve(max(needed, slot.size))

    def write(self, step: int, sources: Sequence[ArraySource], state: JSON, own_state: JSON) -> None:
        """Writes this rank's part of the state at a step. The other slot keeps the state before it.

        Raises: OSError if there is too little memory; ArgumentError for a state that is not JSON, or an unknown dtype.
        """
        starts, text_at = lay_out_slot(sources)
        try:
            tensors = {
                source.name: new_entry(source.array, source.piece, self._rank, start)
                for source, start in zip(sources, starts, strict=True)
            }
            parts = [state if self._rank == 0 else None, own_state, tensors]
            text = json.dumps(parts, separators=(",", ":")).encode()
        except (TypeError, ValueError, KeyError, RecursionError) as error:
            raise ArgumentError(f"the state cannot be held in memory: {error!r:.200}") from error
        slot = self._own[self._turn]
        if text_at + len(text) > slot.size:
            self._reserve(text_at + len(text) + _SPARE)
        stamp = Stamp(self._owner, self._rank, self._size, self._start, step, text_at, len(text))
        slot.write(stamp, sources, starts, text)
        self._turn = 1 - self._turn

    def took(self, began: float) -> None:
        """Called after a write: sets when the next one is due. began: when the write began (monotonic, s)"""
        now = time.monotonic()
        self.due = now + (now - began) * (1 / _TIME_FRACTION - 1)

    # -- reading

    def newest(self) -> SavedInMemory | None:
        """The newest complete state of earlier starts, for which there is a slot of every rank; None if there is none.

        Every state of a later start of the job is newer than those of the starts before.
        """
        # By (start, step, number of ranks): the slots of that state, by rank.
        states: dict[tuple[int, int, int], dict[int, Slot]] = {}
        with ExitStack() as stack:
            for path in self._paths:
                slot = stack.enter_context(closing(self._open(path)))
                stamp = slot.stamp()
                if stamp is not None and stamp.owner == self._owner and stamp.start < self._start:
                    states.setdefault((stamp.start, stamp.step, stamp.size), {})[stamp.rank] = slot
            complete = [key for key, slots in states.items() if len(slots) == key[2]]
            if not complete:
                return None
            slots = states[max(complete)]
            # The next write must not replace this state.
            self._turn = int(self._own[0].stamp() in [slot.stamp() for slot in slots.values()])
            return SavedInMemory([slots[rank] for rank in sorted(slots)])


class SavedInMemory(Saved):
    """A state in slots, one for each rank in order, with the interface of a checkpoint."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        stamps = [stamp for slot in slots if (stamp := slot.stamp()) is not None]
        texts = [slot.text(stamp) for slot, stamp in zip(slots, stamps, strict=True)]
        self._maps = [slot.map() for slot in slots]
        infos = [ShardInfo(slot.size, 0, "") for slot in slots]
        tensors = assemble_tensors(
            {name: TensorEntry.decode(entry) for name, entry in table.items()} for *_, table in texts
        )
        super().__init__("memory", Manifest(stamps[0].step, infos, tensors, texts[0][0], [own for _, own, _ in texts]))

    def _open(self, rank: int) -> Any:
        return nullcontext(_SlotReader(self._maps[rank]))


class _SlotReader(NamedTuple):
    """Reads a slot with the interface of `checkpoint_files.ShardReader`."""

    memory: mmap.mmap

    def verified(
        self, name: str, offset: int, nbytes: int, sha256: str, out: memoryview | None = None, progress: Any = None
    ) -> None:
        if out is not None:
            out[:] = memoryview(self.memory)[offset : offset + nbytes]


def control_group_memory(groups: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> Iterator[int]:
    """The memory in bytes that each control group (version 2) has left. The file cache counts as free."""
    folder = Path(root, Path(groups).read_text().rpartition("0::/")[2].strip())
    for group in (folder, *folder.parents):
        try:
            limit, used, about = ((group / f"memory.{name}").read_text() for name in ("max", "current", "stat"))
            yield int(limit) - int(used) + int(dict(line.split() for line in about.splitlines())["inactive_file"])
        except (OSError, ValueError):  # no such group, or no limit ("max")
            continue


def offered() -> bool:
    """Whether the launcher holds memory for the ranks of this world."""
    return bool(os.environ.get(world.STATE_MEMORY)) and world.supervised() and joined() is not None


def take(owner: str, rank: int, size: int) -> StateMemory:
    """The launcher's memory, for the Checkpointer of the folder `owner`. Raises: OSError as `StateMemory` does."""
    world_comm = joined()
    assert world_comm is not None
    start = int(os.environ.get(world.ATTEMPT, "0"))
    return StateMemory(os.environ[world.STATE_MEMORY], world_comm.rank, start, owner, rank, size)
