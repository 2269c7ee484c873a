"""The manifest of a checkpoint: what it consists of, in JSON, and by which checksums each byte of it is known.

    {"sha256":"...", "format":"ddp.checkpoint", "version":3, "step":120,
     "files":[{"bytes":1234,"header":136,"sums":{"__metadata__":"...","model.0.weight":"..."}}, ...],
     "tensors":{"model.0.weight":{"dtype":"F32","shape":[10,64],"pieces":[[0,0,640,136]]}, ...},
     "state":..., "own_state":[...]}

The first checksum is of all bytes that follow it, so that the text is known to be whole before any of it is parsed. A
file, one for each rank, has one for each tensor in it, and one, "__metadata__", for its header. A tensor's pieces are
stretches (rank, start, stop, at) of its elements in C order, and cover all of them; `at` is the byte of the rank's file
at which one begins.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from ddp.errors import CheckpointError
from ddp.serialization.safetensors import METADATA, STORED, are_sizes

MANIFEST_FILE = "manifest.json"
VERSION = 3
MOST_MANIFEST_BYTES = 1 << 30  # of a manifest: it is read into memory before anything of it is known
_BEGIN = re.compile(rb'\{"sha256":"([0-9a-f]{64})",')


class DamagedCheckpoint(Exception):
    """What is wrong with a manifest, or with a file that it describes."""


class ShardInfo(NamedTuple):
    """A file: its length and that of its header in bytes, and the SHA-256, in hexadecimal digits, of each tensor in it.

    The header's is among them under `METADATA`.
    """

    bytes: int
    header: int
    sums: Mapping[str, str]


class TensorPiece(NamedTuple):
    """Elements start to stop of a tensor that is thought of as flat. rank: whose file has them, from byte `at` on"""

    rank: int
    start: int
    stop: int
    at: int


class TensorEntry(NamedTuple):
    """A tensor. dtype: its code in safetensors; pieces: in order, without gaps"""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[TensorPiece, ...]


class TensorPart(NamedTuple):
    """What one rank has of a tensor. at: the byte of its file"""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    at: int


class Manifest(NamedTuple):
    """A checkpoint. files, own_state: of each rank"""

    step: int
    files: Sequence[ShardInfo]
    tensors: Mapping[str, TensorEntry]
    state: Any
    own_state: Sequence[Any]


def assemble_tensors(parts: Sequence[Mapping[str, TensorPart]]) -> dict[str, TensorEntry]:
    """The tensors of a checkpoint. parts: what each rank writes, by name

    Raises: CheckpointError if ranks disagree about a tensor, or their pieces overlap or leave something out.
    """
    found: dict[str, list[tuple[int, TensorPart]]] = {}
    for rank, mine in enumerate(parts):
        for name, part in mine.items():
            found.setdefault(name, []).append((rank, part))
    entries = {}
    for name, pieces in sorted(found.items()):
        first_rank, first = pieces[0]
        for rank, part in pieces:
            if part[:2] != first[:2]:
                raise CheckpointError(
                    f"{name} is {first.dtype} {first.shape} on rank {first_rank} and {part.dtype} {part.shape} on "
                    f"rank {rank}"
                )
        pieces.sort(key=lambda piece: piece[1][2:])
        at = 0
        for rank, part in pieces:
            if part.start != at:
                how = "is written by several ranks" if part.start < at else "is written by no rank"
                raise CheckpointError(f"{name}: element {min(at, part.start)} {how}; rank {rank} has {part[2:4]}")
            at = part.stop
        if at != math.prod(first.shape):
            raise CheckpointError(f"{name}: of its {math.prod(first.shape)} elements only {at} are written by a rank")
        entries[name] = TensorEntry(
            first.dtype, first.shape, tuple(TensorPiece(rank, *part[2:]) for rank, part in pieces)
        )
    return entries


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of its file."""
    fields = {
        "format": "ddp.checkpoint",
        "version": VERSION,
        "step": manifest.step,
        "files": [shard._asdict() for shard in manifest.files],
        "tensors": {name: entry._asdict() for name, entry in manifest.tensors.items()},
        "state": manifest.state,
        "own_state": manifest.own_state,
    }
    rest = json.dumps(fields, separators=(",", ":"))[1:].encode() + b"\n"
    return b'{"sha256":"' + hashlib.sha256(rest).hexdigest().encode() + b'",' + rest


def decode_manifest(data: bytes) -> Manifest:
    """The manifest in a file. Raises: DamagedCheckpoint for anything that `encode_manifest` did not write."""
    begin = _BEGIN.match(data)
    if begin is None:
        raise DamagedCheckpoint("it does not begin as a manifest does" if data else "it is empty")
    if hashlib.sha256(memoryview(data)[begin.end() :]).hexdigest().encode() != begin[1]:
        raise DamagedCheckpoint("its checksum is another: it was changed, or cut off")
    try:
        return _checked(json.loads(data))
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"it is not JSON: {error}") from None


def _checked(value: Any) -> Manifest:
    """Checks every field: a valid checksum does not mean that this package wrote it."""
    if not isinstance(value, dict) or value.get("format") != "ddp.checkpoint":
        raise DamagedCheckpoint("it is no manifest of a checkpoint")
    if value.get("version") != VERSION:
        raise DamagedCheckpoint(f"it is of version {value.get('version')!r:.40}, and version {VERSION} is known here")
    step, files, tensors, own = (value.get(each) for each in ("step", "files", "tensors", "own_state"))
    if type(step) is not int or not 0 <= step < 1 << 63:
        _wrong("step", step)
    if not isinstance(files, list) or not isinstance(own, list) or not 0 < len(files) == len(own):
        _wrong("files and own_state", (files, own))
    if not isinstance(tensors, dict):
        _wrong("tensors", tensors)
    assert isinstance(step, int)
    shards = [_shard(rank, each) for rank, each in enumerate(files)]
    entries = {name: _entry(name, each, shards) for name, each in tensors.items()}
    return Manifest(step, shards, entries, value.get("state"), own)


def _wrong(name: str, value: Any) -> NoReturn:
    raise DamagedCheckpoint(f"its {name} cannot be {value!r:.80}")


def _shard(rank: int, value: Any) -> ShardInfo:
    if not isinstance(value, dict) or value.keys() != set(ShardInfo._fields):
        _wrong(f"file of rank {rank}", value)
    nbytes, header, sums = value["bytes"], value["header"], value["sums"]
    if not are_sizes([nbytes, header]) or header > nbytes or not isinstance(sums, dict) or METADATA not in sums:
        _wrong(f"file of rank {rank}", value)
    return ShardInfo(nbytes, header, sums)


def _entry(name: str, value: Any, shards: Sequence[ShardInfo]) -> TensorEntry:
    what = f"tensor {name!r:.80}"
    if name == METADATA or not isinstance(value, dict) or value.keys() != set(TensorEntry._fields):
        _wrong(what, value)
    dtype, shape, pieces = value["dtype"], value["shape"], value["pieces"]
    if not isinstance(dtype, str) or dtype not in STORED or not are_sizes(shape) or not isinstance(pieces, list):
        _wrong(what, value)
    at, seen = 0, set()
    for piece in pieces:
        if not are_sizes(piece) or len(piece) != 4 or piece[0] >= len(shards) or not at == piece[1] <= piece[2]:
            _wrong(what, value)
        shard = shards[piece[0]]
        if name not in shard.sums or piece[3] + (piece[2] - at) * STORED[dtype].itemsize > shard.bytes:
            _wrong(what, value)
        at = piece[2]
        seen.add(piece[0])
    if not pieces or at != math.prod(shape) or len(seen) < len(pieces):
        _wrong(what, value)
    return TensorEntry(dtype, tuple(shape), tuple(TensorPiece(*piece) for piece in pieces))
