"""The layout of a flight record.

    header | Python position | ring of the last CALLS calls | signatures

A call is a fixed record of seven words. It points to a signature (communicator, name, dtype, shape, ..., file, line),
which is text and written once. The first word of a call and its last one both name it: the first is written first, the
last one last, so a record whose two ends disagree is being written. Texts carry a checksum instead.
"""

from __future__ import annotations

from binascii import crc32
from collections.abc import Sequence
from struct import Struct, error

#: The name of the memfd, as it appears in /proc/PID/fd.
NAME = "ddp-flight"
MAGIC = b"ddpfligh"
VERSION = 5

#: magic, VERSION, SIZE, pid, rank, world size (-1: not known), the step by the program's own count, synchronized
#: backwards (-1: none yet, both), FIGURES
HEADER = Struct("=8s7q6d")
RANK_WORD, SIZE_WORD, STEP_WORD, BACKWARDS_WORD = 4, 5, 6, 7  # words of 8 bytes from the start
#: Of a training, and their words: sums since the process began (samples, s of exposed communication, s in which other
#: ranks waited for this one, bytes of gradients reduced), bytes of a GPU's memory, the last loss.
FIGURES = {"samples": 8, "exposed": 9, "waited": 10, "reduced_bytes": 11, "device_bytes": 12, "loss": 13}
NOT_KNOWN = float("-inf")  # a loss may be no number
#: index, signature, number, queued, started, ended (monotonic ns; 0: not yet), stamp
CALL = Struct("7q")  # native, so that each word is written at once
#: number (never 0), checksum, text
_TEXT = Struct("=qq")

CALLS = 1_000
SIGNATURES = 2_048
SIGNATURE_SIZE = 432  # bytes
POSITION_SIZE = 896
POSITION_AT = 128
CALLS_AT = 1_024
SIGNATURES_AT = 57_344
SIZE = SIGNATURES_AT + SIGNATURES * SIGNATURE_SIZE

# The state is the low part of a call's stamp, the index its high part.
QUEUED, STARTED, DONE, FAILED = 1, 2, 3, 4
STATES = {QUEUED: "queued", STARTED: "started", DONE: "done", FAILED: "failed"}
STATE_BITS = 3


def signature_at(number: int) -> int:
    """The offset of a signature's slot."""
    return SIGNATURES_AT + number % SIGNATURES * SIGNATURE_SIZE


def pack_text(number: int, fields: Sequence[str], size: int) -> bytes:
    r"""A slot of `size` bytes: `number`, a checksum, and the fields in UTF-8, with \0 between them.

    Raises: ValueError if they do not fit.
    """
    text = "\0".join(field.replace("\0", " ") for field in fields).encode(errors="replace")
    if _TEXT.size + len(text) > size:
        raise ValueError(f"{len(text)} bytes of text in a slot of {size}")
    return (_TEXT.pack(number, crc32(text, number & 0xFFFFFFFF)) + text).ljust(size, b"\0")


def unpack_text(slot: bytes, fields: int) -> tuple[int, list[str]] | None:
    """Number and fields of a slot; None if it is empty, being overwritten, or none of ours."""
    try:
        number, check = _TEXT.unpack_from(slot)
    except error:
        return None
    text = slot[_TEXT.size :].rstrip(b"\0")
    text += b"\0" * (fields - 1 - text.count(b"\0"))  # fields at the end may be empty
    if number == 0 or check != crc32(text, number & 0xFFFFFFFF):
        return None
    return number, text.decode(errors="replace").split("\0")


def truncate(text: str, limit: int, *, keep_end: bool = False) -> str:
    """`text` in at most `limit` bytes of UTF-8, without half a character; what is missing is marked by an ellipsis."""
    data = text.encode(errors="replace")
    if len(data) <= limit:
        return data.decode()
    kept = limit - len("…".encode())
    if keep_end:
        return "…" + data[len(data) - kept :].decode(errors="ignore")
    return data[:kept].decode(errors="ignore") + "…"
