"""Lines and progress bars out of bytes, as tables: what comes in pieces goes out whole."""

from __future__ import annotations

import random

import pytest

from launcher.console.console import LineSplitter


@pytest.mark.parametrize(
    ("chunks", "text", "states", "rest"),
    [
        ([b"a\nb\n"], b"a\nb\n", [], b""),
        ([b"a", b"b", b"c\nd"], b"abc\n", [], b"d\n"),
        ([b"\n\n"], b"\n\n", [], b""),
        ([b"a\r\nb\r", b"\n"], b"a\nb\n", [b"b"], b""),
        ([b"\r 10%", b"\r 20%", b"\r100%\n"], b"100%\n", [b" 10%", b" 20%"], b""),
        ([b"10%\r", b"20%\r", b"\r"], b"", [b"10%", b"20%"], b"20%\n"),
        ([b"10%\r20%\nx\n30%\r40%"], b"20%\nx\n", [b"40%"], b"40%\n"),
        ([b"\rbar", b"\r   \r", b"message\n", b"\rbar"], b"message\n", [b"bar", b"   ", b"bar"], b"bar\n"),
        ([b"\xff\xfe\n"], b"\xff\xfe\n", [], b""),
        ([b"123456", b"7890", b"1\n"], b"1234567890\n1\n", [], b""),  # longer than the limit
        ([b""], b"", [], b""),
    ],
)
def test_lines(chunks: list[bytes], text: bytes, states: list[bytes], rest: bytes) -> None:
    splitter = LineSplitter(limit=8)
    results = [splitter.feed(chunk) for chunk in chunks]
    assert b"".join(lines for lines, _ in results) == text
    assert [state for _, state in results if state] == states
    assert splitter.close() == rest


def test_lines_may_be_cut_anywhere() -> None:
    data = b"one\r\ntwo\n\rbar 1\rbar 2\nlast\n\nx\r\n"
    generator = random.Random(1)
    for _ in range(300):
        cuts = sorted(generator.choices(range(len(data) + 1), k=3))
        splitter = LineSplitter()
        ends = zip([0, *cuts], [*cuts, len(data)], strict=True)
        text = b"".join(splitter.feed(data[start:end])[0] for start, end in ends)
        assert text + splitter.close() == b"one\ntwo\nbar 2\nlast\n\nx\n"


def test_an_unfinished_line_can_be_taken() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"hello\nname? ") == (b"hello\n", b"")
    assert splitter.unfinished
    assert splitter.take() == b"name? "
    assert not splitter.unfinished
    assert splitter.feed(b"Ann\nbar\r") == (b"Ann\n", b"bar")
    assert not splitter.unfinished  # a bar shows by itself
