"""What zlib has packed, alone (gzip) or within an archive (zip), unpacked no faster than it is asked for."""

from __future__ import annotations

import zlib
from typing import IO

GZIP = 31  # zlib's `wbits` of a stream with gzip's header and checksum
RAW = -15  # and of one with neither, as it stands in a zip archive
_PIECE = 1 << 16  # bytes that are read, or unpacked, at a time


class TornError(Exception):
    """Packed bytes that are damaged, or end too early."""


class Unpacked:
    """A source of unpacked bytes.

    file: stands where the packed bytes begin; size: of the packed bytes
    checksum: CRC-32 of what they unpack to, where the stream has none itself
    """

    def __init__(self, file: IO[bytes], size: int, wbits: int, checksum: int | None = None) -> None:
        self._file = file
        self._left = size
        self._wbits = wbits
        self._checksum = checksum
        self._engine = zlib.decompressobj(wbits)
        self._waiting = b""
        self._crc = 0

    def readinto(self, view: memoryview) -> int:
        """How many bytes it has put into `view`; 0 at the end alone. Raises: TornError"""
        while True:
            try:
                found = self._engine.decompress(self._waiting, min(len(view), _PIECE))
            except zlib.error as error:
                raise TornError(str(error)) from None
            # At the end, zlib may show what follows as not consumed, too; `unused_data` has it once.
            self._waiting = b"" if self._engine.eof else self._engine.unconsumed_tail
            if found:
                if self._checksum is not None:
                    self._crc = zlib.crc32(found, self._crc)
                view[: len(found)] = found
                return len(found)
            if self._engine.eof:
                if self._checksum is not None and self._checksum != self._crc:
                    raise TornError("incorrect data check")
                self._waiting = self._engine.unused_data or self._read()
                if self._wbits == RAW or not self._waiting:
                    return 0
                self._engine = zlib.decompressobj(self._wbits)  # files of gzip may stand one after the other
            elif not self._waiting:
                self._waiting = self._read()
                if not self._waiting:
                    raise TornError("the packed bytes end too early")

    def _read(self) -> bytes:
        found = self._file.read(min(self._left, _PIECE))
        self._left -= len(found)
        return found
