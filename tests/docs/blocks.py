"""Code in Markdown: which blocks a page has, and which of them stand side by side."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

_BEGINNING = re.compile(r"^(import|from) (collectives|ddp|launcher)\b", re.M)
_PARTS = re.compile(r"^#+ (?P<heading>[^\n]*)$|^```(?P<words>[^\n]*)\n(?P<code>.*?)^```$", re.S | re.M)


@dataclass(frozen=True, kw_only=True)
class Block:
    """One fenced block of Python.

    section: the heading above it; line: where its code begins; words: what follows `python` on the fence, which says
    whose code it is (`theirs`, `ours`), `script` if it is a whole program, `source` if it is copied from the packages
    """

    page: str
    section: str
    line: int
    words: tuple[str, ...]
    code: str

    @property
    def place(self) -> str:
        """For a traceback."""
        return f"{self.page}:{self.line}"

    @property
    def is_script(self) -> bool:
        return "script" in self.words

    def compiled(self) -> CodeType:
        """A code object whose tracebacks show the page's own lines."""
        return compile("\n" * (self.line - 1) + self.code, self.page, "exec", dont_inherit=True)


def blocks(page: Path) -> list[Block]:
    """The blocks of Python on a page, from top to bottom."""
    text = page.read_text()
    section = ""
    results = []
    for part in _PARTS.finditer(text):
        if part["heading"] is not None:
            section = part["heading"]
        elif (words := part["words"].split()) and words[0] == "python":
            line = text.count("\n", 0, part.start("code")) + 1
            results.append(Block(page=page.name, section=section, line=line, words=tuple(words[1:]), code=part["code"]))
    return results


def pairs(page: Path) -> list[tuple[Block | None, Block]]:
    """(theirs, ours) of each pair in which both are shown; theirs is None where only ours is."""
    results: list[tuple[Block | None, Block]] = []
    waiting: Block | None = None
    for block in blocks(page):
        if "theirs" in block.words:
            assert waiting is None, f"{waiting and waiting.place}: nothing of ours stands beside it"
            waiting = block
        else:
            assert "ours" in block.words, f"{block.place}: whose code is it? say `python theirs` or `python ours`"
            results.append((waiting, block))
            waiting = None
    assert waiting is None, f"{waiting and waiting.place}: nothing of ours stands beside it"
    return results


def programs(page: Path) -> list[list[Block]]:
    """What a reader pastes: a block that imports one of our packages, and those below it that go on from there.

    Blocks of pages that show two libraries side by side are none, nor are copies of the packages' code.
    """
    results: list[list[Block]] = []
    for block in blocks(page):
        if {"theirs", "ours", "source"} & set(block.words):
            continue
        if _BEGINNING.search(block.code):
            results.append([])
        assert results, f"{block.place}: nothing above it on the page has imported what it uses"
        results[-1].append(block)
    return results
