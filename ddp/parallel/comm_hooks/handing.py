"""What compressing hooks have left out, when the next run has another number of ranks.

It is in units of the mean (see `feedback`), so the sum over ranks is what counts: each saved rank's memory is added to
one of the new ranks', and nothing is lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def handed_on(states: Sequence[Mapping[str, Any]], rank: int, size: int) -> dict[str, Any]:
    """The state of a hook's rank `rank` of `size`. states: the `state_dict` of each saved rank, its tensors as arrays

    What is the same on all ranks is taken from the first; "errors" of saved rank r go to rank r % size.
    """
    errors: dict[str, Any] = {}
    for theirs in states[rank::size]:
        for name, left in theirs["errors"].items():
            errors[name] = np.add(errors[name], left) if name in errors else left
    return {**states[0], "errors": errors}
