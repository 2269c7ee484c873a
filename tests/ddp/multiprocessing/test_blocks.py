"""Blocks: memory without a name that lives as long as somebody looks at it."""

from __future__ import annotations

import os

import numpy as np
import pytest

from ddp.data.shared_memory import Block
from ddp.errors import SharingError
from tests.ddp.multiprocessing.counting import all_descriptors, descriptors, mappings


def mapped_again(block: Block) -> Block:
    return Block.adopt(os.dup(block.fileno()), block.token, block.nbytes)


def test_two_mappings_of_a_block_are_one_memory() -> None:
    block = Block.create(100)
    ours = block.array("float32", (2, 3), 16)
    theirs = mapped_again(block).array("float32", (2, 3), 16)
    assert not ours.any()
    ours[:] = np.arange(6).reshape(2, 3)
    np.testing.assert_array_equal(theirs, [[0, 1, 2], [3, 4, 5]])
    assert not np.shares_memory(ours, theirs), "addresses differ"


def test_a_view_keeps_the_mapping_and_nothing_else_does() -> None:
    before = descriptors(), mappings()
    block = Block.create(1000)
    view = block.array("int64", (10, 10), 0)[3:5].T
    view[...] = 7
    other = mapped_again(block)
    del block
    assert mappings() == before[1] + 2
    assert other.array("int64", 100)[30] == 7
    del view, other
    assert (descriptors(), mappings()) == before


def test_a_closed_block_is_still_memory_but_has_no_descriptor() -> None:
    block = Block.create(8)
    array = block.array("int64", 1)
    block.close()
    block.close()
    array[0] = 3
    assert array[0] == 3
    assert block.closed
    with pytest.raises(SharingError, match="is closed"):
        block.fileno()


def test_a_descriptor_that_cannot_be_mapped_is_closed() -> None:
    before = all_descriptors()
    with pytest.raises(SharingError, match="shared memory of 8 bytes cannot be mapped"):
        Block.adopt(os.open("/dev/null", os.O_RDONLY), "token", 8)
    assert all_descriptors() == before


@pytest.mark.parametrize(
    ("dtype", "shape", "offset"), [("int64", 2, 0), ("int8", 1, 8), ("int8", 1, -1), ("int32", 1, 2)]
)
def test_an_array_that_does_not_fit_is_refused(dtype: str, shape: int, offset: int) -> None:
    with pytest.raises(SharingError, match=r"fit|begin"):
        Block.create(8).array(dtype, shape, offset)


def test_a_system_that_gives_no_memory_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    before = all_descriptors()
    with pytest.raises(SharingError, match="gives no shared memory of 2305843009213693952 bytes"):
        Block.create(1 << 61)
    assert all_descriptors() == before

    def refused(name: str, flags: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", refused)
    with pytest.raises(SharingError, match="Too many open files"):
        Block.create(8)
