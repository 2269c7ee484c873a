"""A call and a line of code in words; apart from the records of `report`, so that a keeper loads only this."""

from __future__ import annotations

from os.path import basename


def name_site(file: str, line: int) -> str:
    """`train.py:88`"""
    return f"{basename(file)}:{line}"


def name_call(name: str, number: int, file: str, line: int, more: str, dtype: str, shape: str) -> str:
    """`all_reduce #417 (train.py:88) sum float32 (512, 10)`; what is "" is left out."""
    what = " ".join(each for each in (more, dtype, shape) if each)
    return f"{name} #{number} ({name_site(file, line)}) {what}".rstrip()
