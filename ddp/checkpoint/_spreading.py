"""State that all ranks hold is written once, by all of them: each writes an equal stretch of its bytes."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

# bytes; a smaller tensor is left in one piece, since it costs more to put together than it takes to write
_WHOLE = 1 << 16


def spread(sizes: Mapping[str, tuple[int, int]], ranks: int) -> list[dict[str, tuple[int, int]]]:
    """Which elements of which tensors each rank writes.

    sizes: (number of elements, bytes of one) by name
    Returns: for each rank (start, stop) by name; every element is in one of them, and a tensor without any in one too

    `spread({"a": (100_000, 4), "b": (100_000, 4)}, 2) == [{"a": (0, 100_000)}, {"b": (0, 100_000)}]`
    """
    total = sum(count * each for count, each in sizes.values())
    cuts = [total * rank // ranks for rank in range(ranks + 1)]
    parts: list[dict[str, tuple[int, int]]] = [{} for _ in range(ranks)]
    begin = 0
    for name, (count, each) in sizes.items():
        if count == 0:
            parts[0][name] = 0, 0
            continue
        # The element with which a rank begins; a cut through a tensor that is not to be cut comes after it.
        whole = count * each < _WHOLE
        at = [0 if cut <= begin else count if whole else min(count, -(-(cut - begin) // each)) for cut in cuts]
        for rank, (start, stop) in enumerate(pairwise(at)):
            if start < stop:
                parts[rank][name] = start, stop
        begin += count * each
    return parts
