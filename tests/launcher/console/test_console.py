"""What is shown of the ranks' output, on a terminal and elsewhere: whole lines, prompts, one bar."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from launcher.console.console import Console
from tests.launcher.console.terminal_emulator import Terminal

PLAIN = {"TERM": "xterm", "NO_COLOR": "1"}


class Shown(Console):
    """A console whose two streams are one file, with a clock that stands still until it is set."""

    def __init__(self, n: int, writer: int, **options: Any) -> None:
        self.now = 100.0
        self.writer = writer
        super().__init__(n, writer, writer, PLAIN, clock=lambda: self.now, **options)

    def out(self, rank: int, data: bytes) -> None:
        self.output(rank, "out", data)

    def err(self, rank: int, data: bytes) -> None:
        self.output(rank, "err", data)


class Piped(Shown):
    """As in `ddp-launch ... 2>&1 | cat`."""

    def __init__(self, n: int, **options: Any) -> None:
        self.reader, writer = os.pipe()
        os.set_blocking(self.reader, False)
        super().__init__(n, writer, **options)

    def read(self) -> str:
        """What has been written since."""
        self.flush()
        try:
            return os.read(self.reader, 1 << 20).decode()
        except BlockingIOError:
            return ""

    def later(self, seconds: float) -> str:
        """What is written when time has passed."""
        self.now += seconds
        self.tick(self.now)
        return self.read()


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    with Terminal() as terminal:
        yield terminal


def see(terminal: Terminal, console: Console) -> list[str]:
    console.flush()
    return terminal.look()


# -- lines


def test_lines_are_whole_and_have_their_rank() -> None:
    piped = Piped(12)
    piped.out(0, b"a\nb\nc")
    piped.err(11, b"x\n")
    assert piped.read() == " 0: a\n 0: b\n11: x\n"
    piped.out(0, b"c\n\nd")
    piped.rank_ended(0, 0)
    assert piped.read() == " 0: cc\n 0: \n 0: d\n"


def test_several_hosts_have_names() -> None:
    piped = Piped(4, hosts=["node1.cluster", "node2.cluster"])
    assert piped.prefix_width == len("node1:0: ")
    for rank in range(4):
        piped.rank_started(rank, {"host": f"node{1 + rank // 2}.cluster"})
    piped.out(0, b"a\n")
    piped.out(3, b"b\n")
    assert piped.read() == "node1:0: a\nnode2:3: b\n"
    alone = Piped(1, hosts=["node1"])
    alone.out(0, b"a\n")
    assert alone.read() == "a\n"


def test_only_these_ranks() -> None:
    piped = Piped(8, ranks=(3, 5))
    for rank in range(8):
        piped.out(rank, b"a\n")
        piped.rank_ended(rank, 0)
    piped.say("rank 0 failed")
    assert piped.read() == "3: a\n5: a\nddp-launch: rank 0 failed\n"


def test_what_the_launcher_quotes_writes_only_text() -> None:
    """Messages, names and tracebacks come from others: no escape reaches the terminal, no line passes for our own."""
    piped = Piped(2)
    lines: list[str] = []
    piped.reporter = lines.append  # launcher.log
    piped.say("rank 0 raised E: \x1b[2J\x9b1m\r\u202eno\udc9b\nddp-launch: all is well")
    said = "ddp-launch: rank 0 raised E: \\x1b[2J\\x9b1m\\r\\u202eno\\udc9b\\nddp-launch: all is well\n"
    assert piped.read() == said
    piped.say("here:", "a\tb é\r\n\x1b[31mred\x1b[0m\x1b]0;title\x07\nddp-launch: exit code 0\n")
    quoted = "ddp-launch: here:\na\tb é\nred\\x1b]0;title\\x07\n> ddp-launch: exit code 0\n"
    assert piped.read() == quoted
    piped.say("", "ddp-launch: a traceback of our own making")
    assert piped.read() == "> ddp-launch: a traceback of our own making\n"
    assert "\n".join(lines[:2]) + "\n" == said + quoted


def test_colour_on_a_terminal_only(terminal: Terminal) -> None:
    for environ in ({"TERM": "xterm"}, {"NO_COLOR": "1"}, {"TERM": "dumb"}):
        console = Console(2, terminal.fd, terminal.fd, environ)
        console.output(1, "out", b"a\n")
        see(terminal, console)
    assert terminal.raw == "\x1b[33m1: \x1b[0ma\r\n" + 2 * "1: a\r\n"


# -- prompts


def test_a_prompt_shows_after_50_ms() -> None:
    piped = Piped(2, asking=[0])
    piped.out(0, b"name? ")
    piped.out(1, b"mine stays unfinished")
    assert piped.later(0.049) == ""
    assert piped.tick(100.049) == 100.05
    assert piped.later(0.001) == "0: name? "
    piped.out(0, b"hello Ann\nnext")
    assert piped.read() == "hello Ann\n"
    assert piped.later(0.05) == "0: next"
    piped.out(0, b", ")
    assert piped.later(0.05) == ", "
    piped.rank_ended(0, 0)
    piped.rank_ended(1, 0)
    assert piped.read() == "\n1: mine stays unfinished\n"


def test_another_rank_does_not_write_into_a_prompt() -> None:
    piped = Piped(2, asking=[0])
    piped.out(0, b"name? ")
    piped.later(0.05)
    piped.out(1, b"here\n")
    assert piped.read() == "\n1: here\n"
    piped.out(0, b"Ann\nrest\n")
    assert piped.read() == "0: Ann\n0: rest\n"
    piped.out(0, b"again? ")
    piped.later(0.05)
    piped.say("a word")
    piped.out(0, b"\n")  # it ends a line that has been ended already
    piped.out(0, b"a\n")
    assert piped.read() == "\nddp-launch: a word\n0: a\n"


def test_what_is_typed_ends_the_line_of_a_prompt(terminal: Terminal) -> None:
    console = Shown(2, terminal.fd, asking=[0])
    console.out(0, b"name? ")
    console.tick(200.0)
    console.flush()
    os.write(terminal.fd, b"Ann\n")  # what the terminal does by itself
    console.typed(b"Ann\n")
    console.out(0, b"hello\nall\n")
    assert see(terminal, console) == ["0: name? Ann", "0: hello", "0: all"]


def test_a_rank_in_a_debugger_writes_to_the_terminal(terminal: Terminal) -> None:
    console = Shown(2, terminal.fd)
    console.out(0, b"unfinished ")
    console.debugging(frozenset({0}))
    console.out(0, b"\n> train.py(3)\n(Pdb) ")
    assert see(terminal, console) == ["0: unfinished", "> train.py(3)", "(Pdb)"]
    console.out(1, b"from another rank\n")
    console.out(0, b"7\n(Pdb) ")
    assert see(terminal, console)[2:] == ["(Pdb)", "1: from another rank", "7", "(Pdb)"]
    console.debugging(frozenset())
    console.out(0, b"going on\n")
    assert see(terminal, console)[-3:] == ["7", "(Pdb)", "0: going on"]


# -- the bar


def test_a_bar_stays_below_all_lines(terminal: Terminal) -> None:
    console = Shown(2, terminal.fd)
    console.err(0, b"\r10%")
    assert see(terminal, console) == ["0: 10%"]
    console.err(0, b"\r20%")
    console.err(1, b"\rshown only when it is finished")
    console.out(1, b"a line\n")
    assert see(terminal, console) == ["1: a line", "0: 20%"]
    console.err(0, b"\r30%\n")
    assert see(terminal, console) == ["1: a line", "0: 30%"]
    console.err(0, b"\r\x1b[32m" + 100 * "\u2588".encode())  # cut to the terminal's width
    assert see(terminal, console)[2:] == ["0: " + 56 * "\u2588"]
    console.err(0, b"\rshort")
    console.rank_ended(0, 0)
    console.remove_bar()
    assert see(terminal, console) == ["1: a line", "0: 30%", "0: short"]


def test_a_bar_gives_way_to_a_prompt_and_to_another_program(terminal: Terminal) -> None:
    console = Shown(2, terminal.fd, asking=[0])
    console.err(0, b"\r10%")
    assert see(terminal, console) == ["0: 10%"]
    console.terminal.hide()  # the launcher is stopped
    assert terminal.look() == []
    assert see(terminal, console) == ["0: 10%"]
    console.out(0, b"name? ")
    console.tick(200.0)
    assert see(terminal, console) == ["0: name?"]
    os.write(terminal.fd, b"Ann\n")
    console.typed(b"Ann\n")
    assert see(terminal, console) == ["0: name? Ann", "0: 10%"]


# -- writing


def test_a_slow_reader_does_not_block_and_gets_everything() -> None:
    piped = Piped(2)
    line = b"x" * 99 + b"\n"
    for _ in range(100):
        piped.out(0, 100 * line)
        piped.flush()
    assert piped.terminal.backlog > 500_000
    assert piped.terminal.waiting_for is not None
    text = ""
    while more := piped.read():
        text += more
    assert text == 10_000 * ("0: " + line.decode())
    assert (piped.terminal.backlog, piped.terminal.waiting_for) == (0, None)
    assert os.get_blocking(piped.writer), "other processes share it"


def test_a_full_disk_behind_one_stream_does_not_silence_the_other() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    reader, writer = os.pipe()
    console = Console(2, full, writer, PLAIN)
    witnessed: list[str] = []
    console.reporter = witnessed.append
    try:
        console.output(0, "err", b"before\n")
        console.output(0, "out", b"lost\n")
        console.output(0, "err", b"after\n")
        console.flush()
        assert console.terminal.broken
        assert console.terminal.backlog == 0
        text = f"ddp-launch: {console.unwritable}"
        assert text == "ddp-launch: the output cannot be written: No space left on device"
        console.output(1, "out", b"lost\n")
        console.output(1, "err", b"more\n")
        console.close()
        assert os.read(reader, 1000).decode() == f"0: before\n0: after\n{text}\n1: more\n"
        assert witnessed == [text]
    finally:
        for fd in (full, reader, writer):
            os.close(fd)


def test_a_reader_that_has_gone_is_not_reported() -> None:
    reader, writer = os.pipe()
    console = Shown(2, writer)
    os.close(reader)
    console.out(0, b"lost\n")
    console.close()
    assert (console.terminal.broken, console.unwritable) == (True, "")
    os.close(writer)
