"""Where everything lies in a flight record: the one thing that its writer and its readers must agree on.

    header | Python position | ring of the last CALLS calls | communicators | signatures

A call is a fixed record of eight words. It points to a signature (name, dtype, shape, ..., file, line), which is text
and written once, and to a communicator. The first word of a call and its last one name it both: the first is written
first, the last one last, so a record whose two ends disagree is being written. Texts carry a checksum instead.
"""

from __future__ import annotations

from binascii import crc32
from collections.abc import Sequence
from struct import Struct, error

#: The name of the memfd, as it appears in /proc/PID/fd.
NAME = "ddp-flight"
MAGIC = b"ddpfligh"
VERSION = 2

CALLS = 1_000
SIGNATURES = 2_048
COMMUNICATORS = 512
#: The first communicators keep their place in the table for good; later ones share what is left.
PINNED_COMMUNICATORS = 256

CALL_SIZE = 64  # bytes, here and below
SIGNATURE_SIZE = 320
COMMUNICATOR_SIZE = 128
POSITION_SIZE = 896

POSITION_AT = 128
CALLS_AT = 1_024
COMMUNICATORS_AT = 65_536
SIGNATURES_AT = COMMUNICATORS_AT + COMMUNICATORS * COMMUNICATOR_SIZE
SIZE = SIGNATURES_AT + SIGNATURES * SIGNATURE_SIZE

#: magic, VERSION, SIZE, pid, rank, world size (-1: not known), wall clock minus monotonic clock in ns, the step by the
#: program's own count, synchronized backwards (-1: none yet, both)
HEADER = Struct("=8s8q")
RANK_WORD, SIZE_WORD, STEP_WORD, BACKWARDS_WORD = 4, 5, 7, 8  # words of 8 bytes from the start
#: index, communicator, number, signature, queued, started, ended (monotonic ns; 0: not yet), stamp
CALL = Struct("8q")  # native, so that each word is written at once
#: number (never 0), checksum, text
_SLOT = Struct("=qq")

# The state is the low part of a call's stamp, the index its high part.
QUEUED, STARTED, DONE, FAILED = 1, 2, 3, 4
STATES = {QUEUED: "queued", STARTED: "started", DONE: "done", FAILED: "failed"}
STATE_BITS = 3


def communicator_at(number: int) -> int:
    """The offset of a communicator's slot. number: 1, 2, ... as they were made"""
    lasting = PINNED_COMMUNICATORS
    slot = number if number < lasting else lasting + number % (COMMUNICATORS - lasting)
    return COMMUNICATORS_AT + slot * COMMUNICATOR_SIZE


def signature_at(number: int) -> int:
    """The offset of a signature's slot."""
    return SIGNATURES_AT + number % SIGNATURES * SIGNATURE_SIZE


def pack_text(number: int, fields: Sequence[str], size: int) -> bytes:
    r"""A slot of `size` bytes: `number`, a checksum, and the fields in UTF-8, with \0 between them.

    Raises: ValueError if they do not fit.
    """
    text = "\0".join(field.replace("\0", " ") for field in fields).encode(errors="replace")
    if _SLOT.size + len(text) > size:
        raise ValueError(f"{len(text)} bytes of text in a slot of {size}")
    return (_SLOT.pack(number, crc32(text, number & 0xFFFFFFFF)) + text).ljust(size, b"\0")


def unpack_text(slot: bytes, fields: int) -> tuple[int, list[str]] | None:
    """Number and fields of a slot; None if it is empty, being overwritten, or none of ours."""
    try:
        number, check = _SLOT.unpack_from(slot)
    except error:
        return None
    texts = slot[_SLOT.size :].rstrip(b"\0")
    # A last field that is empty ends in the very byte that fills the slot.
    texts += b"\0" * (fields - 1 - texts.count(b"\0"))
    if number == 0 or check != crc32(texts, number & 0xFFFFFFFF):
        return None
    found = texts.decode(errors="replace").split("\0")
    return (number, found) if len(found) == fields else None


def truncate(text: str, limit: int, *, keep_end: bool = False) -> str:
    """`text` in at most `limit` bytes of UTF-8, without half a character; what is missing is marked by an ellipsis."""
    data = text.encode(errors="replace")
    if len(data) <= limit:
        return data.decode()
    kept = limit - len("…".encode())
    if keep_end:
        return "…" + data[len(data) - kept :].decode(errors="ignore")
    return data[:kept].decode(errors="ignore") + "…"
