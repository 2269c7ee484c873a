"""What to say when a GPU's memory is full: how much was asked for, who holds what, and what helps.

Who holds what is found by asking Python for all objects, which takes milliseconds that nobody misses then. The classes
are looked up among the modules that are loaded: this floor lies below all of them.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ddp.errors import OutOfMemoryError

# In this order: memory that is several things counts as the first of them.
ROLES = ("parameters", "gradients", "optimizer state", "saved for backward", "other tensors", "arrays beside tensors")
_HELP = {
    "parameters": "a model in bfloat16, or shards of it (ddp.parallel.ZeroOptimizer)",
    "gradients": "zero_grad() frees no memory, as it is used again; a smaller model or bfloat16 parameters do",
    "optimizer state": "ddp.parallel.ZeroOptimizer, which divides it among the ranks, or an optimizer with less of it",
    "saved for backward": "a smaller batch, no_grad() where no gradient is wanted, autocast, or autograd.checkpoint",
    "other tensors": "a smaller batch, and no references to what is not needed: losses kept for a log, old outputs",
    "arrays beside tensors": "fewer streams, each of which has scratch memory for products, and fewer CuPy arrays of "
    "your own",
}
_MOST = 5  # lines


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The state of a device in bytes. asked; held: by arrays; reserved: by our pool; free, total: as CUDA has it."""

    asked: int
    held: int
    reserved: int
    free: int
    total: int
    limit: int | None = None


@dataclass(frozen=True, kw_only=True)
class Group:
    """Pieces of memory that are alike. count: how many; nbytes: of all of them, as the pool gave them"""

    role: str
    dtype: str
    shape: tuple[int, ...]
    count: int
    nbytes: int


def human(nbytes: int) -> str:
    """Bytes as people read them: 1.50 GiB."""
    size = float(nbytes)
    for unit in ("bytes", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{nbytes} bytes" if unit == "bytes" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def holders(cupy: Any, device: int) -> list[Group]:
    """Who holds a device's memory, the most first: pieces of memory of one role, dtype and shape together."""
    pieces: dict[int, tuple[int, int, Any]] = {}  # by address: role, bytes, the largest array in it
    for role, array in _arrays(cupy):
        pointer = getattr(array, "data", None)  # the one that memory is wanted for has none yet
        if pointer is None or pointer.device_id != device:
            continue
        memory = pointer.mem
        if not memory.size or isinstance(memory, cupy.cuda.UnownedMemory):
            continue
        known = pieces.get(memory.ptr)
        if known is None or (role, -array.nbytes) < (known[0], -known[2].nbytes):
            pieces[memory.ptr] = role, memory.size, array
    groups: dict[tuple[str, str, tuple[int, ...]], tuple[int, int]] = {}
    for role, nbytes, array in pieces.values():
        key = ROLES[role], str(array.dtype), tuple(array.shape)
        count, size = groups.get(key, (0, 0))
        groups[key] = count + 1, size + nbytes
    found = [
        Group(role=role, dtype=dtype, shape=shape, count=count, nbytes=nbytes)
        for (role, dtype, shape), (count, nbytes) in groups.items()
    ]
    return sorted(found, key=lambda group: (-group.nbytes, group.role, group.shape))


def totals(groups: Iterable[Group]) -> dict[str, int]:
    """Bytes by role, the most first."""
    sums: dict[str, int] = {}
    for group in groups:
        sums[group.role] = sums.get(group.role, 0) + group.nbytes
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def _arrays(cupy: Any) -> Iterator[tuple[int, Any]]:
    """Every array of CuPy that can be found, with the index of its role; some more than once."""
    tensor, leaf, node, optimizer = (
        getattr(sys.modules.get(module), name, ())
        for module, name in (
            ("ddp._tensor.base", "TensorBase"),
            ("ddp._engine.leaves", "Leaf"),
            ("ddp._engine.nodes", "Node"),
            ("ddp.optim.optimizer", "Optimizer"),
        )
    )
    for each in gc.get_objects():
        kind = type(each)  # not isinstance: that asks objects for their __class__, and lazy ones do things when asked
        found: list[Any] = []
        if issubclass(kind, cupy.ndarray):
            found, role = [each], 5
        elif issubclass(kind, tensor):
            array = getattr(each, "array", None)  # one that is just being made has none
            found, role = [array], 0 if getattr(each, "maybe_leaf", None) is not None and each.requires_grad else 4
        elif issubclass(kind, leaf):
            found, role = [each.grad_buffer.array], 1
        elif issubclass(kind, node):
            found, role = [each.saved, each.residual], 3
        elif issubclass(kind, optimizer):
            found, role = [getattr(x, "array", x) for s in list(each.state.values()) for x in list(s.values())], 2
        else:
            continue
        while found:
            one = found.pop()
            if isinstance(one, cupy.ndarray):
                yield role, one
            elif isinstance(one, tuple | list):
                found.extend(one)


def shortage(cupy: Any, device: int, figures: Figures) -> OutOfMemoryError:
    """The error that says all this."""
    try:
        groups = holders(cupy, device)
    except Exception:  # the message may lack this; that there is no memory has to be said
        groups = []
    error = OutOfMemoryError(explanation(device, figures, groups))
    error.device = f"cuda:{device}"
    error.requested, error.allocated, error.reserved = figures.asked, figures.held, figures.reserved
    error.free, error.total, error.limit = figures.free, figures.total, figures.limit
    return error


def explanation(device: int, figures: Figures, groups: list[Group]) -> str:
    """What the error says."""
    cached = max(figures.reserved - figures.held, 0)
    others = max(figures.total - figures.free - figures.reserved, 0)
    told = (
        f"cuda:{device} has no memory for another {human(figures.asked)}: of {human(figures.total)}, tensors of this "
        f"process hold {human(figures.held)}, its pool keeps {human(cached)} that no tensor holds, "
        f"{human(others)} are other processes' and CUDA's own, and {human(figures.free)} are free."
    )
    lines = [told]
    if figures.limit is not None:
        lines.append(f"This process is limited to {human(figures.limit)} (set_per_process_memory_fraction or _limit).")
    lines += table(groups)
    lines.append(f"What helps: {advice(figures, groups)}.")
    return "\n".join(lines)


def table(groups: list[Group]) -> list[str]:
    """Who holds memory, in lines."""
    if not groups:
        return []
    lines = [
        "Held by " + ", ".join(f"{role} {human(nbytes)}" for role, nbytes in totals(groups).items()) + "; most by:"
    ]
    for group in groups[:_MOST]:
        times = f"{group.count} x " if group.count > 1 else ""
        lines.append(f"  {human(group.nbytes):>12}  {group.role}: {times}{group.dtype} {group.shape}")
    return lines


def advice(figures: Figures, groups: list[Group]) -> str:
    """What to do, by who holds the most."""
    cached = figures.reserved - figures.held
    if figures.limit is not None and figures.free >= figures.asked:
        return "a higher limit"
    if figures.free + cached >= figures.asked:
        return (
            "enough is free, but in pieces: batches of one size, the largest allocations first, or "
            "ddp.cuda.memory.use('async') at the start, by which CUDA puts pieces together"
        )
    if figures.total - figures.free - figures.reserved > figures.held:
        return "ending the other processes on this GPU (nvidia-smi names them)"
    role = next(iter(totals(groups)), "other tensors")
    return _HELP[role]
