"""Blocks that are used again and again: whoever sends a batch after batch neither allocates nor faults pages in.

The sender takes a block from its `BlockPool`, fills arrays over it, and sends its descriptor or handle. The receiver
maps the block once, and makes its arrays of a `Loan` each time: that ends when the last of them has gone, so that the
sender can be told to give the block back to its pool.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddp._block import Array, Block

__all__ = ["Block", "BlockPool", "Loan"]

_GRAIN = 1 << 16  # bytes: sizes are rounded up to it, so that batches of about one size share blocks


class BlockPool:
    """The blocks of a sender: those that are free, and those that are taken.

    dropped: called with the token of a block that is given up for a larger one, so that receivers can be told to
    unmap it
    """

    def __init__(self, dropped: Callable[[str], Any] | None = None) -> None:
        self._dropped = dropped
        self._free: list[Block] = []
        self._taken: dict[str, Block] = {}

    def take(self, nbytes: int) -> Block:
        """A block of at least `nbytes` bytes: the smallest free one that will do, else a new one; its contents vary.

        Where none of the free ones will do, the largest is dropped for the new one: sizes that grow leave no trail.
        """
        fitting = [block for block in self._free if block.nbytes >= nbytes]
        if fitting:
            block = min(fitting, key=lambda each: each.nbytes)
            self._free.remove(block)
        else:
            if self._free:
                largest = max(self._free, key=lambda each: each.nbytes)
                self._free.remove(largest)
                if self._dropped is not None:
                    self._dropped(largest.token)
            block = Block.create(max(1, -(-nbytes // _GRAIN)) * _GRAIN)
        self._taken[block.token] = block
        return block

    def give_back(self, token: str) -> None:
        """The block of that token, which was taken here, is free again."""
        self._free.append(self._taken.pop(token))

    def __len__(self) -> int:
        """How many blocks there are, free and taken."""
        return len(self._free) + len(self._taken)


class Loan:
    """A block while arrays over it are in use: `weakref.finalize` on a loan says when the last of them has gone.

    That may be in any thread, wherever the garbage collector finds them: let it do next to nothing.
    """

    __slots__ = ("__weakref__", "block")

    def __init__(self, block: Block) -> None:
        self.block = block

    def array(self, dtype: Any, shape: Any, offset: int = 0) -> Array:
        """An array over the block, as `Block.array` makes it, that keeps the loan alive."""
        return self.block.array(dtype, shape, offset, keep=self)
