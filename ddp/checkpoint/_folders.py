"""Names of checkpoints' folders, which say what is newest, and which of them are in the way. Pure: no disk is touched.

A folder is called `step-0000000120`, and `.step-0000000120.TOKEN.tmp` until it is whole, or once it is being removed.
A program that goes on from an earlier step than the newest (that one was damaged, or the user chose so) comes by the
same steps again: then it begins another generation, `step-0000000110.2`, all of which is newer than the one before. So
nothing is ever replaced, and what was written last is newest.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence

_NAME = re.compile(r"step-(\d{10,18})(?:\.([1-9]\d{0,8}))?")
_TEMPORARY = re.compile(r"\.step-\d{10,18}(?:\.\d+)?\.[0-9a-f]{8}\.tmp")
MOST_STEPS = 10**18


def order(name: str) -> tuple[int, int] | None:
    """(generation, step) of a folder with that name, by which they are sorted; None if it is no checkpoint's.

    `order("step-0000000120") == (1, 120)`, `order("step-0000000110.2") == (2, 110)`
    """
    found = _NAME.fullmatch(name)
    return None if found is None else (int(found[2] or 1), int(found[1]))


def newest_first(names: Iterable[str]) -> list[str]:
    """Those that are names of checkpoints."""
    known = {name: key for name in names if (key := order(name)) is not None}
    return sorted(known, key=lambda name: known[name], reverse=True)


def next_name(step: int, names: Iterable[str]) -> str:
    """What a checkpoint of `step` is called so that it is the newest in a folder that holds `names`.

    `next_name(5, ["step-0000000004"]) == "step-0000000005"`, `next_name(4, ["step-0000000004"]) == "step-0000000004.2"`
    """
    generation, last = max(filter(None, map(order, names)), default=(1, -1))
    generation += step <= last
    return f"step-{step:010d}" + (f".{generation}" if generation > 1 else "")


def temporary(name: str, token: str) -> str:
    """What a folder is called that is not whole yet, or not any more. token: 8 hexadecimal digits"""
    return f".{name}.{token}.tmp"


def is_temporary(name: str) -> bool:
    """True for what `temporary` has named."""
    return _TEMPORARY.fullmatch(name) is not None


def surplus(names: Sequence[str], whole: Collection[str], keep: int) -> list[str]:
    """Which of the checkpoints, newest first, are to be removed, oldest first, so that `keep` whole ones are left.

    whole: those that look so. Others do not count, and go with the whole ones that are older than they are.
    `surplus(["d", "c", "b", "a"], {"d", "b", "a"}, 2) == ["a"]`
    """
    kept = 0
    for index, name in enumerate(names):
        if kept == keep:
            return list(reversed(names[index:]))
        kept += name in whole
    return []


def shard_name(rank: int) -> str:
    """The file of a rank. `shard_name(3) == "rank-0003.safetensors"`"""
    return f"rank-{rank:04d}.safetensors"
