"""The state of training in memory that outlives the ranks, so that a restart does without the disk.

`ddp-launch --max-restarts` holds two slots for each rank, anonymous memory of its own
(`collectives.world.STATE_MEMORY`). A rank writes into them in turn what it would write into a checkpoint, so that one
of the two is always whole; the ranks of the next start read the slots of all. A slot is

    8 bytes    0 while the slot is written, then what tells that it is whole
    header     format, job, Checkpointer, rank and number of ranks, start of the job, step, where the text is
    arrays     from byte 4096 on, each at a multiple of 64
    text       JSON: the state that is no array, and where the arrays are

A rank may be killed between any two instructions, and what it has written by then stays. The first word is cleared
before anything else is written and set when all else is, so a slot that is half written is known. It is no checksum of
the arrays: memory, unlike a disk, is not read back differently.
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
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from collectives import world
from collectives.backends.shm.segment import available_memory
from collectives.start import joined
from ddp._device import CPU, to_device
from ddp.checkpoint.checkpoint_files import Manifest, ShardInfo, TensorEntry, TensorPiece, assemble_tensors
from ddp.checkpoint.saved import Saved
from ddp.checkpoint.state import ArraySource
from ddp.errors import ArgumentError
from ddp.serialization.safetensors import CODES
from ddp.serialization.structure import JSON

_FORMAT = b"ddp-st01"
_WORD = struct.Struct("=Q")
_HEADER = struct.Struct("=8s32s16sQQQQQQ")  # the fields of `Stamp`, and between them and the format the job's token
_BEGIN = mmap.PAGESIZE  # of the arrays
_ALIGNED = 64  # bytes
# The text may grow by so many bytes before its slot has to grow.
_SPARE = 1 << 16
# At most this fraction of the time is spent on writing.
_TIME_FRACTION = 0.01


class Stamp(NamedTuple):
    """What a slot holds.

    owner: by which Checkpointer; start: of the job, 0 the first; text_at, text_bytes: of the text
    """

    owner: bytes
    rank: int
    size: int
    start: int
    step: int
    text_at: int
    text_bytes: int


class Slot:
    """One slot. fd: of its memory, of which this object is the owner; token: of the job"""

    def __init__(self, fd: int, token: str) -> None:
        self._fd, self._token = fd, token.encode()
        self._map: mmap.mmap | None = None

    def close(self) -> None:
        """Closes the descriptor; what was read from the slot stays valid."""
        os.close(self._fd)

    @property
    def size(self) -> int:
        """Bytes."""
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
        """All of its memory."""
        if self._map is None or len(self._map) < self.size:
            self._map = mmap.mmap(self._fd, self.size)
        return self._map

    def write(self, stamp: Stamp, sources: Sequence[ArraySource], starts: Sequence[int], text: bytes) -> None:
        """Replaces what it holds; its size must have been reserved. starts: where each array goes"""
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
        """Its text, decoded."""
        return json.loads(self.map()[stamp.text_at : stamp.text_at + stamp.text_bytes])


def _commit_word(header: bytes) -> int:
    """Never 0, nor what another header has."""
    return 1 << 32 | zlib.crc32(header)


def lay_out_slot(sources: Sequence[ArraySource]) -> tuple[list[int], int]:
    """Where each array of a slot starts, and where the text does."""
    starts, end = [], _BEGIN
    for source in sources:
        starts.append(end)
        end += -(-source.array.nbytes // _ALIGNED) * _ALIGNED
    return starts, end


class StateMemory:
    """The slots of all ranks of a job, as one rank sees them.

    variable: what the launcher says of them (`collectives.world.STATE_MEMORY`); index: of this rank among the job's
    start: of the job; owner: the folder of the Checkpointer; rank, size: among the ranks of that
    due: when (monotonic, s) the state may be written again so that no more than a hundredth of the time goes into it

    Raises: OSError if the slots are out of reach or belong to others.
    """

    def __init__(self, variable: str, index: int, start: int, owner: str, rank: int, size: int) -> None:
        self._token, pid, *fds = variable.split()
        self._owner = hashlib.blake2b(owner.encode(errors="surrogateescape"), digest_size=16).digest()
        self._start, self._rank, self._size = start, rank, size
        self._paths = [f"/proc/{pid}/fd/{fd}" for fd in fds]
        own = self._paths[2 * index : 2 * index + 2]
        if not own:
            raise OSError(errno.ENXIO, f"there are {len(fds) // 2} pairs of slots, none for rank {index}")
        self._own = [self._open(path) for path in own]
        self._turn = 0
        self.due = 0.0

    def _open(self, path: str) -> Slot:
        """Raises: OSError if it is something else: a process of that pid may be in another container."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        name = os.readlink(f"/proc/self/fd/{fd}")
        if name.startswith(f"/memfd:{world.STATE_MEMORY_NAME}-{self._token}") and os.fstat(fd).st_uid == os.geteuid():
            return Slot(fd, self._token)
        os.close(fd)
        raise OSError(errno.ENXIO, f"{path} is none of the job's memory, or another user's")

    def close(self) -> None:
        """Closes the slots' descriptors; their contents stay."""
        for slot in self._own:
            slot.close()

    # -- writing

    def _reserve(self, needed: int) -> None:
        """Makes both slots of this rank so many bytes long. Raises: OSError if the machine lacks memory.

        No more than half of what it has left goes to all ranks together.
        """
        growth = sum(max(0, needed - slot.size) for slot in self._own) * self._size
        left = min([available_memory(), *control_group_memory()])
        if growth > left // 2:
            text = f"{growth:,} bytes are needed on this machine, and half of the {left:,} that are left is the most"
            raise OSError(errno.ENOMEM, text)
        for slot in self._own:
            slot.reserve(max(needed, slot.size))

    def write(self, step: int, sources: Sequence[ArraySource], state: JSON, own_state: JSON) -> None:
        """Writes this rank's part of the state of a step, beside the one before it.

        Raises: OSError if there is no memory for it, ArgumentError for what is not JSON, or of no known dtype.
        """
        starts, text_at = lay_out_slot(sources)
        try:
            tensors = {each.name: self._entry(each, at) for each, at in zip(sources, starts, strict=True)}
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

    def _entry(self, source: ArraySource, at: int) -> TensorEntry:
        array = source.array
        start, stop, shape = source.piece or (0, array.size, tuple(array.shape))
        return TensorEntry(CODES[array.dtype], shape, (TensorPiece(self._rank, start, stop, at, ""),))

    def took(self, began: float) -> None:
        """Called after a write: sets when the next one is due. began: when the write began (monotonic, s)"""
        now = time.monotonic()
        self.due = now + (now - began) * (1 / _TIME_FRACTION - 1)

    # -- reading

    def newest(self) -> SavedInMemory | None:
        """The newest state of earlier starts of which the slots hold every rank's part; None if there is none.

        One that a later start of the job has written is newer than all of the starts before.
        """
        found: dict[tuple[int, int, int], dict[int, Slot]] = {}
        with ExitStack() as stack:
            for path in self._paths:
                slot = stack.enter_context(closing(self._open(path)))
                stamp = slot.stamp()
                if stamp is not None and stamp.owner == self._owner and stamp.start < self._start:
                    found.setdefault((stamp.start, stamp.step, stamp.size), {})[stamp.rank] = slot
            whole = [key for key, slots in found.items() if len(slots) == key[2]]
            if not whole:
                return None
            slots = found[max(whole)]
            # The next state must leave this one whole.
            self._turn = int(self._own[0].stamp() in [slot.stamp() for slot in slots.values()])
            return SavedInMemory([slots[rank] for rank in sorted(slots)])


class SavedInMemory(Saved):
    """A state in slots, one of each rank in order, as a checkpoint that can be read."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        stamps = [stamp for slot in slots if (stamp := slot.stamp()) is not None]
        texts = [slot.text(stamp) for slot, stamp in zip(slots, stamps, strict=True)]
        self._maps = [slot.map() for slot in slots]
        infos = [ShardInfo(slot.size, 0, "") for slot in slots]
        tensors = assemble_tensors({name: _decode(entry) for name, entry in table.items()} for *_, table in texts)
        super().__init__("memory", Manifest(stamps[0].step, infos, tensors, texts[0][0], [own for _, own, _ in texts]))

    def _open(self, rank: int) -> Any:
        return _SlotReader(self._maps[rank])


def _decode(entry: JSON) -> TensorEntry:
    dtype, shape, pieces = entry
    return TensorEntry(dtype, tuple(shape), tuple(TensorPiece(*piece) for piece in pieces))


class _SlotReader:
    """Reads a slot as `checkpoint_files.ShardReader` reads a file."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory

    def __enter__(self) -> _SlotReader:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def verified(
        self, what: str, at: int, nbytes: int, sha256: str, into: memoryview | None = None, progress: Any = None
    ) -> None:
        if into is not None:
            into[:] = memoryview(self._memory)[at : at + nbytes]


def control_group_memory(groups: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> Iterator[int]:
    """Bytes that each control group (version 2) leaves to this process, files that it could forget counted as free."""
    folder = Path(root, Path(groups).read_text().rpartition("0::/")[2].strip())
    for group in (folder, *folder.parents):
        try:
            limit, used, about = ((group / f"memory.{name}").read_text() for name in ("max", "current", "stat"))
            yield int(limit) - int(used) + int(dict(line.split() for line in about.splitlines())["inactive_file"])
        except (OSError, ValueError):  # no such group, or no limit: "max"
            continue


def offered() -> bool:
    """Whether the launcher has memory for the ranks of this world."""
    return bool(os.environ.get(world.STATE_MEMORY)) and world.supervised() and joined() is not None


def take(owner: str, rank: int, size: int) -> StateMemory:
    """The memory that is offered, for the Checkpointer of that folder. Raises: OSError as `StateMemory` does."""
    world_comm = joined()
    assert world_comm is not None
    start = int(os.environ.get(world.ATTEMPT, "0"))
    return StateMemory(os.environ[world.STATE_MEMORY], world_comm.rank, start, owner, rank, size)
