"""Makes reStructuredText of our docstrings, which are plain text: nothing in them but `code` is markup.

A line `name: what it is` becomes an item of a list of parameters, and `Raises: ...`, `Returns: ...` or `Source: ...` a
field of its own. Indented paragraphs are shown as they are.
"""

from __future__ import annotations

import re
from collections.abc import Collection

FIELDS = ("Raises", "Returns", "Source", "Yields")
NAMES = r"\**[a-z_]\w*(?:, \**[a-z_]\w*)*"
ENTRY = re.compile(rf"({NAMES}|{'|'.join(FIELDS)}): ")
# Where another entry begins within a line: behind a sentence; behind a clause only if the name is a parameter's.
INNER = re.compile(rf"([.;,]) (?=({NAMES}|{'|'.join(FIELDS)}): )")
# A line that ends before this column, though the next word had room, was ended on purpose.
WIDTH = 108


def plain_text(docstring: str, parameters: Collection[str] = (), of_class: bool = False) -> str:
    """parameters: names in the signature. of_class: what is no parameter is an attribute."""
    blocks: list[str] = []
    title = ""  # of the list that the last block belongs to
    for paragraph in docstring.split("\n\n"):
        lines = [line for line in paragraph.splitlines() if line.strip()]
        if all(line.startswith("  ") for line in lines):
            blocks += ["::", "\n".join(lines)] if lines else []
            title = ""
            continue
        for entry in _entries(lines, parameters):
            found = ENTRY.match(entry)
            if found is None:
                blocks.append(_escape(entry))
                title = ""
            elif found[1] in FIELDS:
                blocks.append(f":{found[1]}: {_escape(entry[found.end() :])}")
                title = ""
            else:
                kind = "Parameters" if not of_class or _names(found[1]) & set(parameters) else "Attributes"
                if not title:
                    title = kind
                    blocks.append(f":{title}:")
                shown = ", ".join(f"**{_escape(name)}**" for name in found[1].split(", "))
                blocks.append(f"    - {shown} -- {_escape(entry[found.end() :])}")
    return "\n\n".join(blocks) + "\n"


def _entries(lines: list[str], parameters: Collection[str]) -> list[str]:
    """The paragraph's entries, each in one line, and what stands before and after them."""
    whole: list[str] = []
    before = ""
    for line in lines:
        found = ENTRY.match(line)
        known = found is not None and (found[1] in FIELDS or bool(_names(found[1]) & set(parameters)))
        is_list = bool(whole) and ENTRY.match(whole[0]) is not None
        ended = line[0].isupper() and len(before) + len(line.split(" ", 1)[0]) < WIDTH
        if not whole or known or (is_list and (found or ended)):
            whole.append(line)
        else:
            whole[-1] += " " + line.strip()
        before = line
    return [part for line in whole for part in _split(line, parameters)]


def _split(line: str, parameters: Collection[str]) -> list[str]:
    is_list = ENTRY.match(line) is not None
    start = 0
    parts: list[str] = []
    for found in INNER.finditer(line):
        known = _names(found[2]) <= set(parameters)
        begins = known or (found[1] == "." and (is_list or found[2] in FIELDS))
        among_names = found[1] == "," and ": " not in line[start : found.start()]
        in_code = line.count("`", 0, found.start()) % 2 == 1
        if begins and not among_names and not in_code:
            parts.append(line[start : found.end(1)].rstrip(";,"))
            start = found.end()
    return [*parts, line[start:].rstrip(";")]


def _names(text: str) -> set[str]:
    return {name.lstrip("*") for name in text.split(", ")}


def _escape(text: str) -> str:
    parts = text.strip().split("`")
    parts[::2] = [re.sub(r"([*|_\\])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)
