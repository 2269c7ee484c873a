"""Files of samples: everything that a file says is checked against its size before anything is allocated.

Of packed bytes the size is known only once they are unpacked. Two bounds stand in: the header inside declares the size,
and that may be `MOST_RATIO` times the packed size at most (no archive of pictures comes near), or `ALWAYS`, which any
file may unpack to. No byte more than what is declared is unpacked.
"""

from __future__ import annotations

import math
import mmap
import os
import stat
from collections.abc import Sequence
from types import TracebackType
from typing import IO, Any, NoReturn

import numpy as np

from ddp.data.formats._unpacking import GZIP, RAW, TornError, Unpacked
from ddp.errors import DataFileError

Array = np.ndarray[Any, Any]
Path = str | os.PathLike[str]

MOST_RATIO = 100
ALWAYS = 1 << 20  # bytes
_MAGIC = b"\x1f\x8b"  # gzip's
_MOST_DIMENSIONS = 64  # of a NumPy array


class DataFile:
    """A file, or a member of an archive, that is read from its beginning to its end, once.

    may_be_packed: a file that begins as gzip's do is read as what it unpacks to, whatever its name
    at: offset of the next byte in the file, or in what is unpacked if `packed`
    size: bytes of the whole file
    """

    def __init__(self, path: Path, may_be_packed: bool = False) -> None:
        self.path = os.path.abspath(path)
        self.at = 0
        self.packed = False
        if not stat.S_ISREG(os.stat(self.path).st_mode):  # a pipe has no size, and opening one may wait for ever
            self.fail("is no regular file", None)
        self.file = open(self.path, "rb")  # noqa: SIM115  # closed by __exit__
        self.size = self._end = os.fstat(self.file.fileno()).st_size
        self._source: IO[bytes] | Unpacked = self.file
        if may_be_packed and self.file.read(2) == _MAGIC:
            self._source = Unpacked(self.file, self.size, GZIP)
            self.packed = True
        self.file.seek(0)

    def __enter__(self) -> DataFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.file.close()

    def enter(self, begin: int, size: int, checksum: int | None) -> None:
        """From here on, this is the member of an archive in `size` bytes from `begin`.

        checksum: CRC-32 of what the bytes unpack to; None: they are not packed
        """
        self.file.seek(begin)
        self._end = begin + size
        self.at = begin
        if checksum is not None:
            self._source = Unpacked(self.file, size, RAW, checksum)
            self.packed, self.at, self._end = True, 0, size

    def fail(self, what: str, at: int | None) -> NoReturn:
        """Raises: DataFileError, which names the file, and the byte at offset `at` unless that is None."""
        place = "" if at is None else f" byte {at}{' of what it unpacks to' if self.packed else ''}:"
        raise DataFileError(f"{self.path}:{place} {what}") from None

    def head(self, count: int, what: str) -> bytes:
        """The next `count` bytes of a header, which are `what`. Raises: DataFileError if they are not there."""
        found = bytearray(count)
        got = self._fill(memoryview(found))
        if got < count:
            self.fail(f"expected {what} of {count} bytes, and the file ends after {got}", self.at + got)
        self.at += count
        return bytes(found)

    def rest(self, dtype: np.dtype[Any], shape: Sequence[int], order: str = "C") -> Array:
        """All that is left, as a new array in native byte order. Raises: DataFileError if that is more or less."""
        self._expect(dtype, shape)
        flat = np.empty(math.prod(shape), dtype)
        got = self._fill(flat.view(np.uint8).data) if flat.nbytes else 0
        if got < flat.nbytes:
            what = f"expected {_described(dtype, shape)}, {flat.nbytes:,} bytes, and the file ends after {got:,}"
            self.fail(what, self.at + got)
        self.at += got
        if self.packed and self._fill(memoryview(bytearray(1))):
            self.fail(f"expected the end, after {_described(dtype, shape)}, and more bytes follow", self.at)
        if not dtype.isnative:
            native = dtype.newbyteorder(
                "="
            )  # fields may be of either order, and are copied; other elements stay in place
            flat = flat.astype(native) if dtype.names is not None else flat.byteswap(inplace=True).view(native)
        return self._shaped(flat, shape, order)

    def mapped(self, dtype: np.dtype[Any], shape: Sequence[int], order: str = "C") -> Array:
        """All that is left, as a read-only array in the file's own memory, which it keeps mapped."""
        assert not self.packed
        self._expect(dtype, shape)
        count = math.prod(shape)
        if count:
            memory = mmap.mmap(self.file.fileno(), 0, access=mmap.ACCESS_READ)
            flat: Array = np.frombuffer(memory, dtype, count, self.at)
        else:  # nothing cannot be mapped
            flat = np.empty(0, dtype)
            flat.flags.writeable = False
        return self._shaped(flat, shape, order)

    def _expect(self, dtype: np.dtype[Any], shape: Sequence[int]) -> None:
        """Raises: DataFileError if what is left cannot be this."""
        if len(shape) > _MOST_DIMENSIONS:
            self.fail(f"expected at most {_MOST_DIMENSIONS} dimensions, as NumPy has them, found {len(shape)}", self.at)
        what, nbytes = _described(dtype, shape), math.prod(shape) * dtype.itemsize
        if self.packed:
            most = max(ALWAYS, MOST_RATIO * self._end)
            if self.at + nbytes > most:
                self.fail(
                    f"expected {what}, {nbytes:,} bytes: {self._end:,} packed bytes are not believed to hold more than"
                    f" {most:,}; if they do, unpack the file first",
                    self.at,
                )
        elif nbytes != (left := self._end - self.at):
            how = "truncated" if nbytes > left else "too long"
            self.fail(
                f"expected {what}, {nbytes:,} bytes, and {left:,} are left: {how}", min(self._end, self.at + nbytes)
            )

    def _shaped(self, flat: Array, shape: Sequence[int], order: Any) -> Array:
        try:
            return flat.reshape(shape, order=order)
        except (ValueError, OverflowError):  # no element, and yet too many: (0, 2**40, 2**40)
            self.fail(f"NumPy has no array of shape {tuple(shape)}", self.at)

    def _fill(self, view: memoryview) -> int:
        """Reads until `view` is full or the file ends: how many bytes that were."""
        done = 0
        while done < len(view):
            try:
                got = self._source.readinto(view[done:])  # type: ignore[union-attr]  # an open file has it
            except TornError as error:
                self.fail(f"this cannot be unpacked: {error}", self.at + done)
            if not got:
                break
            done += got
        return done


def _described(dtype: np.dtype[Any], shape: Sequence[int]) -> str:
    return f"{dtype.name} of shape {tuple(shape)}"
