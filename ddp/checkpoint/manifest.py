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
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ddp.errors import CheckpointError
from ddp.serialization.safetensors import METADATA, STORED, are_sizes

MANIFEST_FILE = "manifest.json"
VERSION = 3
MOST_MANIFEST_BYTES = 1 << 30  # of a manifest: it is read into memory before anything of it is known
_BEGIN = re.compile(rb'\{"sha256":"([0-9a-f]{64})",')


class DamagedCheckpoint(CheckpointError):
    """A file of a checkpoint is missing, cannot be read, or is not what was written."""


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
    """A tensor, or what one rank has of it. dtype: its code in safetensors"""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[TensorPiece, ...]

    def covered(self, name: str) -> TensorEntry:
        """This entry with its pieces in order. Raises: CheckpointError if they overlap or leave something out."""
        pieces = sorted(self.pieces, key=lambda piece: piece[1:])
        end, size = 0, math.prod(self.shape)
        for piece in pieces:
            if piece.start != end:
                how = "is written by several ranks" if piece.start < end else "is written by no rank"
                has = f"rank {piece.rank} has {piece[1:3]}"
                raise CheckpointError(f"{name}: element {min(end, piece.start)} {how}; {has}")
            end = piece.stop
        if end != size or not pieces:
            raise CheckpointError(f"{name}: of its {size} elements only {end} are written by a rank")
        return self._replace(pieces=tuple(pieces))


class Manifest(NamedTuple):
    """A checkpoint. files, own_state: of each rank"""

    step: int
    files: Sequence[ShardInfo]
    tensors: Mapping[str, TensorEntry]
    state: Any
    own_state: Sequence[Any]


def assemble_tensors(ranks: Iterable[Mapping[str, TensorEntry]]) -> dict[str, TensorEntry]:
    """The tensors of a checkpoint. ranks: what each writes, by name

    Raises: CheckpointError if ranks disagree about a tensor, or their pieces overlap or leave something out.
    """
    found: dict[str, TensorEntry] = {}
    for mine in ranks:
        for name, entry in mine.items():
            first = found.setdefault(name, entry)
            if first[:2] != entry[:2]:
                ours, theirs = (f"{each.dtype} {each.shape} on rank {each.pieces[0].rank}" for each in (first, entry))
                raise CheckpointError(f"{name} is {ours} and {theirs}")
            if first is not entry:
                found[name] = first._replace(pieces=first.pieces + entry.pieces)
    return {name: found[name].covered(name) for name in sorted(found)}


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
    """The manifest in a file. Raises: CheckpointError for anything that `encode_manifest` did not write."""
    begin = _BEGIN.match(data)
    if begin is None:
        raise CheckpointError("it does not begin as a manifest does" if data else "it is empty")
    if hashlib.sha256(memoryview(data)[begin.end() :]).hexdigest().encode() != begin[1]:
        raise CheckpointError("its checksum is another: it was changed, or cut off")
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"it is not JSON: {error}") from None
    if not isinstance(fields, dict) or fields.get("format") != "ddp.checkpoint":
        raise CheckpointError("it is no manifest of a checkpoint")
    if fields.get("version") != VERSION:
        raise CheckpointError(f"it is of version {fields.get('version')!r:.40}, and version {VERSION} is known here")
    # A valid checksum does not mean that this package wrote it: every field is checked.
    found: list[Any] = [fields.get(each) for each in ("step", "files", "tensors", "own_state")]
    step, files, tensors, own = found
    _require(type(step) is int and 0 <= step < 1 << 63, "step", step)
    _require(isinstance(files, list) and isinstance(own, list) and 0 < len(files) == len(own), "files", files)
    _require(isinstance(tensors, dict), "tensors", tensors)
    shards = [_shard(rank, each) for rank, each in enumerate(files)]
    entries = {name: _entry(name, each, shards) for name, each in tensors.items()}
    return Manifest(step, shards, entries, fields.get("state"), own)


def _require(holds: bool, name: str, value: Any) -> None:
    if not holds:
        raise CheckpointError(f"its {name} cannot be {value!r:.80}")


def _shard(rank: int, value: Any) -> ShardInfo:
    what = f"file of rank {rank}"
    _require(isinstance(value, dict) and value.keys() == set(ShardInfo._fields), what, value)
    shard = ShardInfo(**value)
    _require(are_sizes([shard.bytes, shard.header]) and shard.header <= shard.bytes, what, value)
    _require(isinstance(shard.sums, dict) and METADATA in shard.sums, what, value)
    return shard


def _entry(name: str, value: Any, shards: Sequence[ShardInfo]) -> TensorEntry:
    what = f"tensor {name!r:.80}"
    _require(name != METADATA and isinstance(value, dict) and value.keys() == set(TensorEntry._fields), what, value)
    dtype, shape, pieces = value["dtype"], value["shape"], value["pieces"]
    _require(isinstance(dtype, str) and dtype in STORED and are_sizes(shape), what, value)
    _require(isinstance(pieces, list) and all(are_sizes(each) and len(each) == 4 for each in pieces), what, value)
    entry = TensorEntry(dtype, tuple(shape), tuple(TensorPiece(*each) for each in pieces))
    for rank, start, stop, at in entry.pieces:
        _require(rank < len(shards) and start <= stop and name in shards[rank].sums, what, value)
        _require(at + (stop - start) * STORED[dtype].itemsize <= shards[rank].bytes, what, value)
    _require(len({piece.rank for piece in entry.pieces}) == len(pieces), what, value)
    return entry.covered(name)
