"""Random numbers: where every generator of a rank is, so that a resumed run draws what the other would have drawn.

These are the calling thread's streams of `ddp` on every device, NumPy's global generator and Python's `random`. Every
rank has its own; a rank that there was none of before, in a larger world, gets new ones, drawn from those of the saved
ranks and its own number: the same at every try, and unlike any other rank's.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from ddp import _device
from ddp._device import CPU, device, place

State = dict[str, Any]  # for `encode`


def state() -> State:
    """Where the generators of this thread are."""
    seed, streams = _device.random_state()
    numbers: Any = np.random.get_state(legacy=False)
    version, words, gauss = random.getstate()
    return {
        "seed": seed,
        "streams": {
            str(where): {"seed": own, "at": snapshot if isinstance(snapshot, bytes | None) else place(snapshot, CPU)}
            for where, (own, snapshot) in streams.items()
        },
        "numpy": _plain(numbers),
        "random": [version, np.array(words, np.uint32).tobytes(), gauss],
    }


def put(saved: State) -> None:
    """Puts the generators of this thread where `state` found them."""
    streams = {}
    for name, stream in saved["streams"].items():
        where = device(name)
        streams[where] = (stream["seed"], stream["at"])
        _device.stream(where)  # made if it is not there: the device draws from it later
    _device.set_random_state((saved["seed"], streams))
    numbers = saved["numpy"]
    if numbers["bit_generator"] == np.random.get_state(legacy=False)["bit_generator"]:
        np.random.set_state(numbers)
    version, words, gauss = saved["random"]
    random.setstate((version, tuple(np.frombuffer(words, np.uint32).tolist()), gauss))


def derive(saved: Sequence[State], rank: int, step: int) -> None:
    """Seeds this thread's generators for a rank that was not there when the others' were saved."""
    told = hashlib.sha256()
    for each in saved:
        told.update(repr(sorted((name, s["seed"], s["at"]) for name, s in each["streams"].items())).encode())
    told.update(repr((saved[0]["seed"], rank, step)).encode())
    seed = int.from_bytes(told.digest()[:7], "little")
    _device.manual_seed(seed)
    np.random.seed(seed % (1 << 32))
    random.seed(seed)


def _plain(numbers: dict[str, Any]) -> dict[str, Any]:
    """NumPy's state with its 624 words as an array, which it is."""
    return {**numbers, "state": dict(numbers["state"])}
