"""The manifest of a checkpoint: what it consists of, in JSON, and by which checksums each byte of it is known.

    {"sha256":"...", "format":"ddp.checkpoint", "version":1, "step":120, "size":2, "block":16777216,
     "files":{"rank-0000.safetensors":{"bytes":1234,"sha256":["..."]}, ...},
     "tensors":{"model.0.weight":{"dtype":"F32","shape":[10,64],"pieces":[["rank-0000.safetensors",0,640]]}, ...},
     "state":..., "own_state":[...]}

The first checksum is of all bytes that follow it, so that the text is known to be whole before any of it is parsed; a
file has one for each block. A tensor's pieces are stretches of its elements in C order, and cover all of them.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from ddp.errors import ArgumentError
from ddp.serialization.safetensors import METADATA, STORED

MANIFEST_FILE = "manifest.json"
VERSION = 1
MOST_MANIFEST_BYTES = 1 << 30  # of a manifest: it is read into memory before anything of it is known
_BEGIN = re.compile(rb'\{"sha256":"([0-9a-f]{64})",')
_SUM = re.compile(r"[0-9a-f]{64}")
_MOST_DIMENSIONS = 64  # of a NumPy array


class DamagedCheckpoint(Exception):
    """What is wrong with a manifest, or with a file that it describes."""


class ShardInfo(NamedTuple):
    """A file: its length in bytes, and the SHA-256 of each block, in hexadecimal digits."""

    bytes: int
    sums: tuple[str, ...]


class TensorPiece(NamedTuple):
    """Elements start to stop of a tensor that is thought of as flat. file: its name"""

    file: str
    start: int
    stop: int


class TensorEntry(NamedTuple):
    """A tensor. dtype: its code in safetensors; pieces: in order, without gaps"""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[TensorPiece, ...]


class TensorPart(NamedTuple):
    """What one rank has of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class Manifest(NamedTuple):
    """A checkpoint. block: bytes that one checksum is of; own_state: of each rank"""

    step: int
    size: int
    block: int
    files: Mapping[str, ShardInfo]
    tensors: Mapping[str, TensorEntry]
    state: Any
    own_state: Sequence[Any]


def assemble_tensors(parts: Sequence[Mapping[str, TensorPart]], files: Sequence[str]) -> dict[str, TensorEntry]:
    """The tensors of a checkpoint. parts: what each rank writes, by name; files: of each rank

    Raises: ArgumentError if ranks disagree about a tensor, or their pieces overlap or leave something out.
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
                raise ArgumentError(
                    f"{name} is {first.dtype} {first.shape} on rank {first_rank} and {part.dtype} {part.shape} on "
                    f"rank {rank}"
                )
        pieces.sort(key=lambda piece: (piece[1].start, piece[1].stop))
        at = 0
        for rank, part in pieces:
            if part.start != at:
                how = "is written by several ranks" if part.start < at else "is written by no rank"
                raise ArgumentError(f"{name}: element {min(at, part.start)} {how}; rank {rank} has {part[2:]}")
            at = part.stop
        if at != math.prod(first.shape):
            raise ArgumentError(f"{name}: of its {math.prod(first.shape)} elements only {at} are written by a rank")
        entries[name] = TensorEntry(
            first.dtype, first.shape, tuple(TensorPiece(files[r], p.start, p.stop) for r, p in pieces)
        )
    return entries


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of its file."""
    fields = {
        "format": "ddp.checkpoint",
        "version": VERSION,
        "step": manifest.step,
        "size": manifest.size,
        "block": manifest.block,
        "files": {name: {"bytes": shard.bytes, "sha256": shard.sums} for name, shard in manifest.files.items()},
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
    step, size, block = (_number(value, name, least) for name, least in (("step", 0), ("size", 1), ("block", 1)))
    files = {name: _shard(name, each, block) for name, each in _table(value, "files").items()}
    tensors = {name: _entry(name, each, files) for name, each in _table(value, "tensors").items()}
    own = value.get("own_state")
    if not isinstance(own, list) or len(own) != size:
        _wrong("own_state", own)
    return Manifest(step, size, block, files, tensors, value.get("state"), own)


def _wrong(name: str, value: Any) -> NoReturn:
    raise DamagedCheckpoint(f"its {name} cannot be {value!r:.80}")


def _number(value: Mapping[str, Any], name: str, least: int) -> int:
    number = value.get(name)
    if type(number) is not int or not least <= number < 1 << 63:
        _wrong(name, number)
    return number


def _table(value: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = value.get(name)
    if not isinstance(found, dict):
        _wrong(name, found)
    return found


def _shard(name: str, value: Any, block: int) -> ShardInfo:
    plain = name not in ("", ".", "..", MANIFEST_FILE) and "/" not in name and "\0" not in name
    if not plain or not isinstance(value, dict) or value.keys() != {"bytes", "sha256"}:
        _wrong(f"file {name!r:.80}", value)
    nbytes, sums = value["bytes"], value["sha256"]
    if not _are_counts([nbytes]) or not isinstance(sums, list) or len(sums) != -(-nbytes // block):
        _wrong(f"file {name!r:.80}", value)
    if not all(isinstance(each, str) and _SUM.fullmatch(each) for each in sums):
        _wrong(f"checksums of {name!r:.80}", sums)
    return ShardInfo(nbytes, tuple(sums))


def _entry(name: str, value: Any, files: Mapping[str, ShardInfo]) -> TensorEntry:
    what = f"tensor {name!r:.80}"
    if name == METADATA or not isinstance(value, dict) or value.keys() != set(TensorEntry._fields):
        _wrong(what, value)
    dtype, shape, pieces = value["dtype"], value["shape"], value["pieces"]
    if not isinstance(dtype, str) or dtype not in STORED or not _are_counts(shape) or len(shape) > _MOST_DIMENSIONS:
        _wrong(what, value)
    if not isinstance(pieces, list) or not pieces:
        _wrong(what, value)
    at = 0
    for piece in pieces:
        if not isinstance(piece, list) or len(piece) != 3 or not isinstance(piece[0], str) or piece[0] not in files:
            _wrong(what, value)
        if not _are_counts(piece[1:]) or piece[1] != at or piece[2] < at:
            _wrong(what, value)
        at = piece[2]
    if at != math.prod(shape) or len({piece[0] for piece in pieces}) < len(pieces):
        _wrong(what, value)
    return TensorEntry(dtype, tuple(shape), tuple(TensorPiece(*piece) for piece in pieces))


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in value)
