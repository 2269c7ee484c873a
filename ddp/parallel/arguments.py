"""Checks of DataParallel's arguments."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from numbers import Real
from typing import Any

import numpy as np

from ddp._tensor.dtypes import is_count
from ddp.errors import ArgumentError, DtypeError, ParallelError
from ddp.nn import Module

_MIB = 1 << 20
#: Arguments of PyTorch's DistributedDataParallel that have no effect here, and why.
IGNORED = {
    "device_ids": "parameters stay on the device that they are on",
    "output_device": "results stay on the device that they are on",
    "find_unused_parameters": "unused parameters are always found, at no cost",
    "static_graph": "the graph may change at every step, at no cost",
    "gradient_as_bucket_view": "gradients always are views of buckets",
}


def caps(bucket_cap_mb: float | str, first_bucket_mb: float) -> tuple[int | None, int]:
    """Returns the maximum bytes of (a bucket, the first bucket).

    The first number is None for "auto". Otherwise it is at least the second.

    Raises: ArgumentError unless both arguments are finite and above 0; bucket_cap_mb may also be "auto".
    """
    sizes = [first_bucket_mb] if bucket_cap_mb == "auto" else [bucket_cap_mb, first_bucket_mb]
    if not all(isinstance(size, Real) and size is not True and 0 < size * _MIB < float("inf") for size in sizes):
        given = f"{bucket_cap_mb!r} and {first_bucket_mb!r}"
        raise ArgumentError(f'buckets hold a finite number of MiB above 0, or "auto" for the cap; got {given}')
    cap = None if isinstance(bucket_cap_mb, str) else int(bucket_cap_mb * _MIB)
    return cap, int(min(sizes) * _MIB)


def check_types(module: Any, comm: Any) -> None:
    """Checks that `module` is a Module, and `comm` a communicator or None. Raises: DtypeError if not."""
    if not isinstance(module, Module):
        raise DtypeError(f"DataParallel: expected a Module to wrap, got {type(module).__name__}")
    if comm is not None and not hasattr(comm, "duplicate"):
        raise DtypeError(
            f"DataParallel: comm is the ranks' communicator, or None for collectives.init(), got {comm!r:.60}"
        )


def check_count(name: str, value: Any) -> int:
    """The value as an int. Raises: ArgumentError unless it is a whole number of at least 0."""
    if not is_count(value):
        raise ArgumentError(f"{name} is a whole number of at least 0, got {value!r}")
    return int(value)


def check_bool(name: str, value: Any) -> bool:
    """The value as a bool. Raises: ArgumentError unless it is True or False."""
    if not isinstance(value, bool | np.bool_):
        raise ArgumentError(f"{name} is True or False, got {value!r:.60}")
    return bool(value)


def weight_of(weight: Any) -> float:
    """The weight as a float. Raises: ParallelError unless it is a finite number of at least 0."""
    try:
        number = float(weight)
    except (TypeError, ValueError, OverflowError):
        number = float("nan")
    if isinstance(weight, str | bytes) or not 0 <= number < float("inf"):
        raise ParallelError(f"weight should be a number of samples, at least 0, is {weight!r:.60}")
    return number


def warn_of(ignored: Mapping[str, Any], stacklevel: int) -> None:
    """Gives one warning for all arguments that have no effect here. Arguments that are None or False do not count.

    Raises: TypeError for an argument that is not in `IGNORED`.
    """
    unknown = [name for name in ignored if name not in IGNORED]
    if unknown:
        raise TypeError(f"DataParallel() got an unexpected keyword argument {unknown[0]!r}")
    asked = [f"{name} ({IGNORED[name]})" for name, value in ignored.items() if value is not None and value is not False]
    if asked:
        warnings.warn(f"DataParallel needs no {', '.join(asked)}", UserWarning, stacklevel=stacklevel)
