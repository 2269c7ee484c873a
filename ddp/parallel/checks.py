"""The checks of DataParallel: they find what differs between ranks, and name it on every rank.

    what                     when                             how
    check_same               at wrapping                      hash of the settings and of what `describe` returns
    broadcast_values         at wrapping                      makes values equal: broadcasts those of rank 0
    ParameterCheck           in forward, if a module changed  parameters that were added after wrapping
    SkippedBackwards         every backward                   forwards without a backward, in the control message
    FiniteCheck              every backward, if requested     infinity and NaN, before they are reduced
    ConsistencyCheck         every `check_every` backwards    bit sums of the parameters, in the control message

In this table a backward is a synchronized one, not one inside `no_sync()`. The checks raise ParallelError on every
rank; ParameterCheck raises it only on the ranks whose module has changed.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakSet

import numpy as np

from collectives import Communicator
from collectives.errors import name_ranks
from ddp._device import CPU, device_of, to_device
from ddp._engine import Node
from ddp._tensor.core import Tensor
from ddp.errors import ParallelError
from ddp.nn import Module
from ddp.nn.module import registration_count
from ddp.parallel.control import NO_CHECKSUM, NOT_COUNTED
from ddp.parallel.error_context import error_context


def describe(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Describes each parameter and buffer by a text that must be the same on all ranks."""
    described = {}
    for number, (name, tensor) in enumerate(tensors):
        array = tensor.array
        grad = "" if tensor.requires_grad else " without grad"
        # CuPy's arrays are always writeable, and have no such flag.
        read_only = "" if getattr(array.flags, "writeable", True) else ", read-only"
        described[f"parameter or buffer {number}"] = f"{name} {array.dtype} {array.shape}{grad}{read_only}"
    return described


def check_same(comm: Communicator, values_here: Mapping[str, Any]) -> None:
    """Checks that all ranks have the same settings, parameters and buffers. Collective.

    values_here: this rank's settings, parameters and buffers, by name
    Raises: ParallelError on every rank, with the first value that differs.
    """
    digest = np.frombuffer(hashlib.sha256(repr(list(values_here.items())).encode()).digest(), np.uint8)
    with error_context("DataParallel, comparing the ranks' modules and settings"):
        digests = comm.all_gather(digest, lengths="equal").reshape(comm.size, -1)
        if (digests == digests[0]).all():
            return
        everyones = comm.all_gather_object(dict(values_here))
    # Compares the names of all ranks: if a name is missing only on this rank, this rank must raise, too.
    for name in dict.fromkeys(name for rank_values in everyones for name in rank_values):
        values = [rank_values.get(name, "missing") for rank_values in everyones]
        for rank, value in enumerate(values):
            if value != values[0]:
                raise ParallelError(
                    f"ranks wrap different models or settings: {name} is {_short(values[0])} on rank 0, but "
                    f"{_short(value)} on rank {rank}"
                )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 200 else f"{text[:197]}..."


def broadcast_values(comm: Communicator, tensors: Sequence[Tensor]) -> None:
    """Broadcasts the values of these tensors from rank 0. Collective."""
    for tensor in tensors if comm.size > 1 else ():
        comm.broadcast(tensor.array, root=0)


class ParameterCheck:
    """Finds parameters that were added to the module after it was wrapped. Their gradients are not reduced."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._known = {id(p): p for p in module.parameters()}  # kept alive: a new tensor may get the id of a freed one
        self._seen = registration_count()

    def check(self) -> None:
        """Looks for new parameters, if any module has got a parameter, buffer or child since the last check.

        Raises: ParallelError if there is a new parameter.
        """
        now = registration_count()
        if now == self._seen:
            return
        new = [name for name, p in self._module.named_parameters() if id(p) not in self._known]
        if new:
            raise ParallelError(
                f"{new[0]}{f' and {len(new) - 1} more' if len(new) > 1 else ''} came into the module after it was "
                "wrapped, so no rank would reduce its gradient: call close() and wrap the module again"
            )
        self._seen = now


Array = Any


class SkippedBackwards:
    """Finds a rank that skips a backward. Its next gradients would be summed with those of another batch.

    Such a rank has dropped the result of a forward, and so its graph, and then made another forward. The last forward
    before a backward is never counted, because `sum(0 * p.sum() for p in model.parameters())` may replace its loss. If
    all ranks drop equally many results, there is no error.
    """

    def __init__(self) -> None:
        self._graphs: list[WeakSet[Node]] = []  # for each forward since the last backward, the nodes of its results
        self.count = 0  # how many backwards this rank has skipped since ranks last compared the counts

    def add_forward(self, result: Any) -> None:
        """Remembers the graph of `result`, which a forward in training, outside of `no_sync()`, returned."""
        nodes = WeakSet(_nodes(result))
        if nodes:
            self._graphs.append(nodes)

    def begin_backward(self) -> None:
        """Counts the forwards whose graphs were dropped, except the last forward.

        Called when a backward begins, synchronized or not.
        """
        self.count += sum(not nodes for nodes in self._graphs[:-1])
        self._graphs.clear()

    def compare(self, step: int, skipped: np.ndarray[Any, Any]) -> None:
        """Compares the ranks' counts, and begins to count anew.

        skipped: (size,) the count of each rank
        Raises: ParallelError on every rank, with the ranks that skipped more than others.
        """
        self.count = 0
        odd = np.flatnonzero((skipped > skipped.min()) & (skipped != NOT_COUNTED)).tolist()
        if odd:
            raise ParallelError(
                f"step {step}: {name_ranks(odd)} skipped a backward: what a forward returned was dropped, and this "
                "backward is of another batch than on the other ranks. All ranks make the same backwards: for a batch "
                "without a usable loss call model.backward(ddp.zeros(()), weight=0) where the others give weights, "
                "else sum(0 * p.sum() for p in model.parameters()).backward(). A forward that needs no backward goes "
                "under no_grad(), after eval(), or through model.module"
            )


def _nodes(result: Any) -> Iterator[Node]:
    """Yields the nodes that made the tensors in a forward's result."""
    if isinstance(result, Tensor) and isinstance(result.edge, Node):
        yield result.edge
    if dataclasses.is_dataclass(result):
        result = vars(result)
    if isinstance(result, Mapping):
        result = list(result.values())
    if isinstance(result, list | tuple):
        for part in result:
            yield from _nodes(part)


class FiniteCheck:
    """Names the rank and the parameter of an infinity or NaN, before the sum spreads it to all ranks.

    Each gradient is checked before it is reduced; on a GPU the host waits for it. One small call at the end of a
    backward compares what the ranks have found.
    bad: this rank's first parameter with infinity or NaN in its gradient, in this backward (micro_batches: this step)
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.bad: str | None = None

    def check(self, name: str, gradient: Array) -> None:
        """Checks this rank's gradient of one parameter."""
        if self.bad is None and not device_of(gradient).xp.isfinite(gradient).all():
            self.bad = name

    def compare(self, step: int) -> None:
        """Compares what the ranks have found. Collective.

        Raises: ParallelError on every rank if a rank has found infinity or NaN, with each rank's first parameter.
        """
        names = enumerate(self._comm.all_gather_object(self.bad))
        bad = [f"{name} on rank {rank}" for rank, name in names if name is not None]
        if bad:
            raise ParallelError(
                f"step {step}: infinity or NaN in the gradient of {', '.join(bad)}, before it was reduced"
            )


# Bits of a checksum: few enough for a float64 to hold it exactly.
_BITS = 52


class ConsistencyCheck:
    """Finds parameters that differ between ranks. Otherwise the ranks would train different models unnoticed.

    In every `every`-th synchronized backward each rank takes a checksum of its parameters. The control message of the
    next backward carries the checksum, so it costs no call. The host waits for a GPU only in that next backward.

    names, tensors: the parameters; every: synchronized backwards between two checksums, 0: no checksums
    """

    def __init__(self, comm: Communicator, names: Sequence[str], tensors: Sequence[Tensor], every: int) -> None:
        self._comm = comm
        self._names = names
        self._tensors = tensors
        self._every = every
        self._sums: Any = None  # the checksum that was not sent yet: a sum for each parameter, on its device
        self._compared: np.ndarray[Any, Any] = np.zeros(0, np.uint64)  # the sums of the checksum that was sent last
        self._taken = 0  # the step at which the compared checksums were taken (this rank's may be missing: `forget`)
        self._due = 0  # the step at which a checksum was last due
        self._agreed = "when the model was wrapped"  # when ranks were last known to have the same parameters

    def checksum(self, step: int) -> float:
        """Returns the checksum for the control message of this backward, and begins the next one if it is due."""
        checksum = NO_CHECKSUM
        self._taken = self._due
        if self._sums is not None:
            self._compared = to_device(self._sums, CPU)
            checksum = float(mix(self._compared.tolist()))
            self._sums = None
        if self._every and self._comm.size > 1 and step % self._every == 0:
            self._due = step
            xp = self._tensors[0].device.xp
            self._sums = xp.stack([bit_sum(tensor.array, xp) for tensor in self._tensors])
        return checksum

    def forget(self) -> None:
        """Drops a checksum that was not sent. A rank out of data calls it: its parameters will be replaced."""
        self._sums = None

    def compare(self, checksums: np.ndarray[Any, Any]) -> None:
        """Compares the ranks' checksums. Collective if they differ.

        checksums: (size,) the checksum of each rank, or NO_CHECKSUM
        Raises: ParallelError on every rank, with the first parameter that differs, and the ranks.
        """
        ranks = np.flatnonzero(checksums != NO_CHECKSUM)
        if len(ranks) == 0:
            return
        if (checksums[ranks] == checksums[ranks[0]]).all():
            self._agreed = f"at step {self._taken}"
            return
        sums = self._compared if len(self._compared) else np.zeros(len(self._names), np.uint64)
        table = self._comm.all_gather(sums, lengths="equal").reshape(self._comm.size, -1)
        drift = describe_drift(self._names, table[ranks], ranks.tolist())
        raise ParallelError(
            f"{drift} at step {self._taken} (all had the same "
            f"{self._agreed}): something changes parameters on one rank alone, or its memory is at fault. Start again "
            "from a checkpoint; check_every=0 switches this check off"
        )


def describe_drift(names: Sequence[str], table: np.ndarray[Any, Any], ranks: Sequence[int]) -> str:
    """Says which parameter differs, on which ranks. table: (ranks, parameters) sums; at least two rows differ."""
    differing = np.flatnonzero((table != table[0]).any(axis=0))
    sums = table[:, differing[0]].tolist()
    more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
    (common, most), (_, second) = Counter(sums).most_common(2)
    if second == most:
        return f"{names[differing[0]]}{more} is not the same on {name_ranks(ranks)}"
    odd = [rank for rank, value in zip(ranks, sums, strict=True) if value != common]
    return f"{names[differing[0]]}{more} on {name_ranks(odd)} is not what the other ranks have"


def bit_sum(array: Array, xp: Any) -> Array:
    """Adds up an array's 64-bit words, and the single bytes after the last whole word, modulo 2^64.

    Returns: () uint64. A single flipped bit changes the sum.
    """
    flat = xp.array(array, order="C").reshape(-1).view(xp.uint8)  # a copy, because a GPU cannot read unaligned numbers
    whole = flat.size // 8 * 8
    # keepdims: NumPy warns if a scalar overflows, but not if an array of one number does.
    total = flat[:whole].view(xp.uint64).sum(dtype=xp.uint64, keepdims=True)
    return (total + flat[whole:].sum(dtype=xp.uint64, keepdims=True)).reshape(())


def mix(sums: Sequence[int]) -> int:
    """A hash of many numbers, which depends on their order. Returns: a whole number below 2^52"""
    mixed = 0
    for number in (*sums, len(sums)):  # one more round: without it the lowest bits of the last number would be cut off
        mixed = (mixed * 0x9E3779B97F4A7C15 + number) % (1 << 64)
        mixed ^= mixed >> 29
    return mixed >> (64 - _BITS)
