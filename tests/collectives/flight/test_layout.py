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


def test_the_first_communicators_keep_their_location() -> None:
    slots = [(layout.communicator_at(number) - layout.COMMUNICATORS_AT) // 128 for number in range(1, 1_000)]
    assert slots[:255] == list(range(1, 256))
    assert set(slots[255:]) == set(range(256, 512))


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


def test_text_that_no_slot_should_hold() -> None:
    assert layout.unpack_text(layout.pack_text(1, ["a\0b", "\udcff"], 64), 2) == (1, ["a b", "?"])
    assert layout.unpack_text(layout.pack_text(1, ["a", "b"], 64), 3) is None, "another number of fields"
    with pytest.raises(ValueError, match="49 bytes of text in a slot of 64"):
        layout.pack_text(1, ["a" * 49], 64)


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
