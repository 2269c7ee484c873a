"""Ranks that wrap different models must hear so at once, by name, and not from a hang or a wrong sum later."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import numpy as np

from collectives import Communicator
from ddp.errors import ParallelError

#: name, shape, dtype, requires_grad, writeable
Description = tuple[str, list[int], str, bool, bool]


def check_agreement(comm: Communicator, mine: Sequence[Description]) -> None:
    """Returns if all ranks bring the same descriptions. Collective.

    Raises: ParallelError on every rank, naming the first difference and the ranks.
    """
    text = json.dumps(mine).encode()
    digest = np.frombuffer(hashlib.sha256(text).digest(), np.uint8)
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
