"""Lines and progress bars out of bytes, as tables: what comes in pieces goes out whole."""

from __future__ import annotations

import random

import pytest

from launcher.console.console import Lines, LineSplitter, Repaint


@pytest.mark.parametrize(
    ("chunks", "pieces", "rest"),
    [
        ([b"a\nb\n"], [Lines(b"a\nb\n")], []),
        ([b"a", b"b", b"c\nd"], [Lines(b"abc\n")], [Lines(b"d\n")]),
        ([b"\n\n"], [Lines(b"\n\n")], []),
        ([b"a\r\nb\r\n"], [Lines(b"a\nb\n")], []),
        ([b"a\r\nb\r", b"\n"], [Lines(b"a\n"), Repaint(b"b"), Lines(b"b\n")], []),
        ([b"\r\n"], [Lines(b"\n")], []),
        ([b"\r 10%", b"\r 20%", b"\r100%\n"], [Repaint(b" 10%"), Repaint(b" 20%"), Lines(b"100%\n")], []),
        ([b"10%\r", b"20%\r"], [Repaint(b"10%"), Repaint(b"20%")], [Lines(b"20%\n")]),
        ([b"10%\r20%\nx\n30%\r40%"], [Lines(b"20%\nx\n"), Repaint(b"40%")], [Lines(b"40%\n")]),
        (
            [b"\rbar", b"\r   \r", b"message\n", b"\rbar"],
            [Repaint(b"bar"), Repaint(b"   "), Lines(b"message\n"), Repaint(b"bar")],
            [Lines(b"bar\n")],
        ),
        ([b"\rbar", b"\r   \r"], [Repaint(b"bar"), Repaint(b"   ")], []),
        ([b"\xff\xfe\n"], [Lines(b"\xff\xfe\n")], []),
        ([b"123456", b"7890", b"1\n"], [Lines(b"1234567890\n"), Lines(b"1\n")], []),
        ([b"a\n1234567890"], [Lines(b"a\n1234567890\n")], []),
        ([b""], [], []),
    ],
)
def test_lines(chunks: list[bytes], pieces: list[Lines | Repaint], rest: list[Lines]) -> None:
    splitter = LineSplitter(limit=8)
    assert [piece for chunk in chunks for piece in splitter.feed(chunk)] == pieces
    assert splitter.close() == rest


def test_lines_may_be_cut_anywhere() -> None:
    data = b"one\r\ntwo\n\rbar 1\rbar 2\nlast\n\nx\r\n"
    generator = random.Random(1)
    for _ in range(300):
        cuts = sorted(generator.choices(range(len(data) + 1), k=3))
        splitter = LineSplitter()
        ends = zip([0, *cuts], [*cuts, len(data)], strict=True)
        pieces = [piece for start, end in ends for piece in splitter.feed(data[start:end])]
        text = b"".join(piece.text for piece in [*pieces, *splitter.close()] if isinstance(piece, Lines))
        assert text == b"one\ntwo\nbar 2\nlast\n\nx\n"


def test_an_unfinished_line_can_be_taken() -> None:
    splitter = LineSplitter()
    assert not splitter.unfinished
    assert splitter.feed(b"hello\nname? ") == [Lines(b"hello\n")]
    assert splitter.unfinished
    assert splitter.take() == b"name? "
    assert not splitter.unfinished
    assert splitter.feed(b"Ann\nbar\r") == [Lines(b"Ann\n"), Repaint(b"bar")]
    assert not splitter.unfinished  # a bar shows by itself
    assert splitter.close() == [Lines(b"bar\n")]
