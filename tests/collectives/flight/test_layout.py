"""The layout of a flight record. Whoever changes it raises VERSION: readers and writers may be of two releases."""

from __future__ import annotations

import pytest

from collectives.flight import layout


def test_the_layout_is_held() -> None:
    assert (layout.VERSION, layout.MAGIC, layout.NAME) == (2, b"ddpfligh", "ddp-flight")
    assert (layout.HEADER.format, layout.HEADER.size) == ("=8s8q", 72)
    assert (layout.CALL.format, layout.CALL.size, layout.CALL_SIZE) == ("8q", 64, 64)
    assert layout.STATES == {1: "queued", 2: "started", 3: "done", 4: "failed"}
    assert layout.STATE_BITS == 3
    regions = [
        (0, 72),
        (layout.POSITION_AT, layout.POSITION_SIZE),
        (layout.CALLS_AT, layout.CALLS * layout.CALL_SIZE),
        (layout.COMMUNICATORS_AT, layout.COMMUNICATORS * layout.COMMUNICATOR_SIZE),
        (layout.SIGNATURES_AT, layout.SIGNATURES * layout.SIGNATURE_SIZE),
        (layout.SIZE, 0),
    ]
    assert regions == [(0, 72), (128, 896), (1024, 64_000), (65_536, 65_536), (131_072, 655_360), (786_432, 0)]
    ends = [at + size for at, size in regions]
    assert all(end <= at for end, (at, _) in zip(ends, regions[1:], strict=False)), "regions overlap"


@pytest.mark.parametrize("fields", [[""], ["a"], ["a", "", ""], ["", "", "b"], ["größe", "→"], ["", ""]])
def test_text_comes_back(fields: list[str]) -> None:
    slot = layout.pack_text(7, fields, 64)
    assert len(slot) == 64
    assert layout.unpack_text(slot, len(fields)) == (7, fields)


def test_text_that_is_torn_is_not_believed() -> None:
    old, new = (layout.pack_text(number, [f"{number}" * 40, "train.py"], 128) for number in (3, 4))
    for cut in range(1, 56):
        assert layout.unpack_text(new[:cut] + old[cut:], 2) is None
        assert layout.unpack_text(old[:cut] + new[cut:], 2) is None
    assert layout.unpack_text(bytes(128), 2) is None
    assert layout.unpack_text(b"", 2) is None


@pytest.mark.parametrize(
    ("text", "limit", "keep_end", "clipped"),
    [
        ("train.py", 8, False, "train.py"),
        ("train.py", 7, False, "trai…"),
        ("/home/me/train.py", 11, True, "…train.py"),
        ("ßßß", 6, False, "ßßß"),
        ("ßßßß", 6, False, "ß…"),
        ("ßßßß", 6, True, "…ß"),
    ],
)
def test_clip(text: str, limit: int, keep_end: bool, clipped: str) -> None:
    assert layout.truncate(text, limit, keep_end=keep_end) == clipped
    assert len(clipped.encode()) <= limit
