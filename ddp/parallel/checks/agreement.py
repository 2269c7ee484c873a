"""Ranks that wrap different models must hear so at once, by name, and not from a hang or a wrong sum later.

Names, shapes and dtypes must be the same on all ranks. Values need not be: rank 0's are taken, which is said where
others had different ones, and whether they really arrived is looked at.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence

import numpy as np

from collectives import Communicator
from ddp._tensor.core import Tensor
from ddp.errors import ParallelError
from ddp.parallel.checks.tripwire import bit_sum
from ddp.parallel.naming import naming

_log = logging.getLogger("ddp.parallel")

#: name, shape, dtype, requires_grad, writeable
Description = tuple[str, list[int], str, bool, bool]


def describe(name: str, tensor: Tensor) -> Description:
    """What must be the same on all ranks."""
    array = tensor.array
    writeable = bool(getattr(array.flags, "writeable", True))  # CuPy's arrays always are, and have no such flag
    return name, list(array.shape), str(array.dtype), bool(tensor.requires_grad), writeable


def check_agreement(comm: Communicator, mine: Sequence[Description]) -> None:
    """Returns if all ranks bring the same descriptions. Collective.

    Raises: ParallelError on every rank, naming the first difference and the ranks.
    """
    text = json.dumps(mine).encode()
    digest = np.frombuffer(hashlib.sha256(text).digest(), np.uint8)
    with naming("DataParallel, comparing the ranks' modules"):
        digests = comm.all_gather(digest, lengths="equal").reshape(comm.size, -1)
    if (digests == digests[0]).all():
        return
    lengths = comm.all_gather(np.array([len(text)])).tolist()
    joined = comm.all_gather(np.frombuffer(text, np.uint8), lengths=lengths).tobytes()
    everyones, at = [], 0
    for length in lengths:
        everyones.append([tuple(each) for each in json.loads(joined[at : at + length])])
        at += length
    raise ParallelError(f"ranks wrap different models: {first_difference(everyones)}")


def agree_on_values(comm: Communicator, names: Sequence[str], tensors: Sequence[Tensor]) -> None:
    """Gives every rank rank 0's values. Collective.

    Rank 0 logs, at level INFO, which ranks had others before: models that were made from different seeds, or of which
    only one was loaded from a file.

    Raises: ParallelError on every rank if they are not the same afterwards.
    """
    if comm.size == 1:
        return
    before = _differing(comm, tensors)
    for tensor in tensors:
        comm.broadcast(tensor.array, root=0)
    after = _differing(comm, tensors)
    if after.any():
        name, ranks = names[int(after.any(axis=0).argmax())], np.flatnonzero(after.any(axis=1)).tolist()
        raise ParallelError(
            f"rank 0's {name} did not arrive as it was sent on rank {', '.join(map(str, ranks))}: memory or network of "
            "that machine is at fault"
        )
    if before.any() and comm.rank == 0:
        ranks, count = np.flatnonzero(before.any(axis=1)).tolist(), int(before.any(axis=0).sum())
        _log.info(
            "rank %s had other values than rank 0 in %d of %d parameters and buffers; rank 0's are used",
            ", ".join(map(str, ranks)),
            count,
            len(tensors),
        )


def _differing(comm: Communicator, tensors: Sequence[Tensor]) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
    """(size, tensors): where a rank's values are not rank 0's, as far as the sum of their bits tells."""
    sums = np.array([int(bit_sum(tensor.array, tensor.device.xp)) for tensor in tensors], np.uint64)
    table = comm.all_gather(sums, lengths="equal").reshape(comm.size, -1)
    differing: np.ndarray[tuple[int, int], np.dtype[np.bool_]] = table != table[0]
    return differing


def first_difference(everyones: Sequence[Sequence[Description]]) -> str:
    """Where rank 0's list and another's part, in words. At least two of the lists differ."""
    for place in range(max(map(len, everyones))):
        at = [descriptions[place] if place < len(descriptions) else None for descriptions in everyones]
        for rank, theirs in enumerate(at):
            if theirs != at[0]:
                return f"parameter or buffer {place} is {_words(at[0])} on rank 0, but {_words(theirs)} on rank {rank}"
    raise AssertionError("the lists are the same")


def _words(described: Description | None) -> str:
    if described is None:
        return "missing"
    name, shape, dtype, requires_grad, writeable = described
    return (
        f"{name} {dtype} {tuple(shape)}{'' if requires_grad else ' without grad'}{'' if writeable else ', read-only'}"
    )
