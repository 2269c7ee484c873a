"""Scratch memory for products: some algorithms of cuBLASLt add up parts, which need a place.

Each stream has its own, since products of two streams may run at once. A CUDA graph gets some of its own as well: it
may be replayed on any stream, beside any other work.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

from ddp._gpu import capture

PER_THREAD = 2  # the handle of CUDA's per-thread default stream: one number for as many streams as there are threads
MOST = 16  # streams that have some; a program that makes ever new streams gives back the oldest's

Rooms = dict[tuple[int, int, int], Any]
_shared: Rooms = {}
_captured: weakref.WeakKeyDictionary[capture.Capture, Rooms] = weakref.WeakKeyDictionary()
_sizes: dict[int, int] = {}


def room_size(xp: Any, device: int) -> int:
    """Bytes of scratch on a device: PyTorch's choice, 32 MiB from Hopper on, 8 MiB before."""
    found = _sizes.get(device)
    if found is None:
        capability = int(xp.cuda.Device(device).compute_capability)
        found = _sizes[device] = (32 if capability >= 90 else 8) << 20
    return found


def room(xp: Any, device: int, stream: int) -> int:
    """The address of the scratch memory of a stream, from the pool when it is first asked for, and kept."""
    graph = capture.now()
    rooms = _shared if graph is None else _captured.setdefault(graph, {})
    key = device, stream, threading.get_ident() if stream == PER_THREAD else 0
    found = rooms.get(key)
    if found is None:
        if len(rooms) >= MOST:  # back to its stream's arena, in whose order it is used next
            rooms.pop(next(iter(rooms)), None)
        found = rooms[key] = xp.empty(room_size(xp, device), "uint8")
        if graph is not None:
            graph.keep(found)
    return int(found.data.ptr)


def forget() -> None:
    """Lets go of all scratch memory: of tests whose devices are gone."""
    _shared.clear()
    _sizes.clear()
