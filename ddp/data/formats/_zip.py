"""Where the arrays of an .npz lie in it: the archive is asked for its list, and each member for its own beginning."""

from __future__ import annotations

import struct
import zipfile
from typing import NamedTuple

from ddp.data.formats._files import DataFile

_ENDING = ".npy"
_LOCAL = struct.Struct(
    "<4s22xHH"
)  # of a member's own header: the signature, the lengths of its name and of what follows
_SIGNATURE = b"PK\x03\x04"
_ENCRYPTED = 1


class Member(NamedTuple):
    """An array in an archive: its name, where its bytes are, and what they unpack to (None: they are as they are)."""

    name: str
    begin: int
    size: int
    checksum: int | None


def members(file: DataFile) -> dict[str, Member]:
    """The arrays of an .npz, by name, in its order. Raises: DataFileError if it is no zip archive of arrays."""
    try:
        with zipfile.ZipFile(file.file) as archive:
            entries = [entry for entry in archive.infolist() if entry.filename.endswith(_ENDING)]
    except (
        zipfile.BadZipFile,
        NotImplementedError,
        ValueError,
        OSError,
        EOFError,
        struct.error,
        OverflowError,
    ) as error:
        file.fail(f"expected a zip archive, as .npz files are: {error}", None)
    if not entries:
        file.fail("expected an array (.npy) in this archive, and there is none", None)
    found = [_member(file, entry) for entry in entries]
    return {member.name: member for member in found}


def _member(file: DataFile, entry: zipfile.ZipInfo) -> Member:
    name, at = entry.filename, entry.header_offset
    if entry.flag_bits & _ENCRYPTED or entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        file.fail(f"{name}: expected a member that is stored or deflated, and not encrypted", at)
    if not 0 <= at <= file.size - _LOCAL.size:
        file.fail(f"{name}: expected it to begin within {file.size:,} bytes", at)
    file.file.seek(at)
    signature, *lengths = _LOCAL.unpack(file.file.read(_LOCAL.size))
    if signature != _SIGNATURE:
        file.fail(f"{name}: expected {_SIGNATURE!r}, as a member begins, found {signature!r}", at)
    begin = at + _LOCAL.size + sum(lengths)
    if begin + entry.compress_size > file.size:
        file.fail(f"{name}: expected {entry.compress_size:,} bytes, and the file ends before: truncated", file.size)
    checksum = entry.CRC if entry.compress_type == zipfile.ZIP_DEFLATED else None
    return Member(name[: -len(_ENDING)], begin, entry.compress_size, checksum)
