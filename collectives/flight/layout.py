"""The layout of a flight record.

    header | Python position | ring of the last CALLS calls | call texts

A call is a fixed record of seven words. It points to a call text (communicator, name, dtype, shape, ..., file, line),
which is written once for all calls that share it. The first and last word of a call both contain its index. The first
is written first and the last one last, so readers skip a record in which they disagree. Texts carry a checksum.
"""

from __future__ import annotations

from binascii import crc32
from collections.abc import Sequence
from struct import Struct, error

#: The name of the memfd, which appears in /proc/PID/fd.
NAME = "ddp-flight"
MAGIC = b"ddpfligh"
VERSION = 5

#: magic, VERSION, SIZE, pid, rank, world size (-1: unknown), the program's own step count (-1: none yet), the number of
#: synchronized backwards (-1: none yet), FIGURES.
HEADER = Struct("=8s7q6d")
# Indices of the header's 8-byte words.
RANK_WORD = 4
SIZE_WORD = 5
STEP_WORD = 6
BACKWARDS_WORD = 7
#: Figures of a training run and the words that hold them. Sums since the process began: samples, exposed communication
#: (s), time in which others waited for this rank (s), bytes of reduced gradients. Then GPU memory (bytes), last loss.
FIGURES = {
    "samples": 8,
    "exposed": 9,
    "waited": 10,
    "reduced_bytes": 11,
    "device_bytes": 12,
    "loss": 13,
}
#: The value of an unknown figure. Not NaN, which a loss may be.
NOT_KNOWN = float("-inf")
#: index, text number, call number, queued, started, ended (monotonic ns; 0: not yet), stamp. In native byte order, so
#: that each word is written at once.
CALL = Struct("7q")
# number (never 0), checksum; the text follows.
_TEXT = Struct("=qq")

CALLS = 1_000
TEXTS = 2_048
# Sizes and offsets in bytes.
TEXT_SIZE = 432
POSITION_SIZE = 896
POSITION_AT = 128
CALLS_AT = 1_024
TEXTS_AT = 57_344
SIZE = TEXTS_AT + TEXTS * TEXT_SIZE

# The low bits of a call's stamp hold its state, the high bits its index.
QUEUED = 1
STARTED = 2
DONE = 3
FAILED = 4
STATES = {QUEUED: "queued", STARTED: "started", DONE: "done", FAILED: "failed"}
STATE_BITS = 3


def text_at(number: int) -> int:
    """The offset of the slot of a call text."""
    return TEXTS_AT + number % TEXTS * TEXT_SIZE


def pack_text(number: int, fields: Sequence[str], size: int) -> bytes:
    r"""A slot of `size` bytes: `number`, a checksum, and the fields in UTF-8, with \0 between them.

    Raises: ValueError if the fields do not fit.
    """
    text = "\0".join(field.replace("\0", " ") for field in fields).encode(errors="replace")
    if _TEXT.size + len(text) > size:
        raise ValueError(f"{len(text)} bytes of text in a slot of {size}")
    return (_TEXT.pack(number, crc32(text, number & 0xFFFFFFFF)) + text).ljust(size, b"\0")


def unpack_text(slot: bytes, fields: int) -> tuple[int, list[str]] | None:
    """Number and fields of a slot; None if it is empty, being overwritten, or invalid."""
    try:
        number, check = _TEXT.unpack_from(slot)
    except error:
        return None
    text = slot[_TEXT.size :].rstrip(b"\0")
    text += b"\0" * (fields - 1 - text.count(b"\0"))  # Empty fields at the end were stripped.
    if number == 0 or check != crc32(text, number & 0xFFFFFFFF):
        return None
    return number, text.decode(errors="replace").split("\0")


def truncate(text: str, limit: int, *, keep_end: bool = False) -> str:
    """`text` in at most `limit` bytes of UTF-8, without partial characters; an ellipsis marks what was cut.

    keep_end: cuts the beginning of the text and not its end
    """
    data = text.encode(errors="replace")
    if len(data) <= limit:
        return data.decode()
    kept = limit - len("…".encode())
    if keep_end:
        return "…" + data[len(data) - kept :].decode(errors="ignore")
    return data[:kept].decode(errors="ignore") + "…"
