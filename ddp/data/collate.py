"""From samples to a batch: arrays are stacked, and whatever holds them is kept.

Each leaf of the samples becomes one array with the samples along a new first dimension. Where these arrays lie is the
caller's choice (`out`), so that a worker process writes a batch straight into memory that it shares with its consumer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any

import numpy as np

from ddp._device import CPU
from ddp._tensor.base import TensorBase, wrap
from ddp._tensor.dtypes import SUPPORTED, promote_types
from ddp._tensor.functions import stack
from ddp.errors import ArgumentError, DeviceError, DtypeError, ShapeError

Array = np.ndarray[Any, Any]
#: Memory for an array of a batch: (shape, dtype) -> C-contiguous array.
Out = Callable[[tuple[int, ...], np.dtype[Any]], Array]

_FIX = "Give the DataLoader a collate_fn that makes a batch of such samples"


def default_collate(batch: Sequence[Any], *, out: Out | None = None) -> Any:
    """One batch of these samples, all of one structure, in which every leaf has the samples along its first dimension.

    batch: samples, at least one. A leaf is a tensor, a NumPy array or scalar, a number, a str or bytes; around them may
    be mappings, named tuples and sequences
    out: called with (shape, dtype) for each array of the batch, gives the memory that it is written to; None: new

    A tensor or array of shape (...) becomes a tensor of shape (N, ...), a number one of shape (N): float64, int64 or
    bool; str and bytes become a list of N. A mapping and a named tuple stay what they are, as does a list; a tuple
    becomes a list, as in PyTorch. The batch of tensors that require grad is part of their graph, unless `out` is given.

    Raises: ShapeError for leaves of different shapes, or sequences of different lengths; ArgumentError for no samples,
    or other keys; DtypeError for what is not listed above, dataclasses among it; DeviceError for tensors of a GPU where
    `out` is given. Each names the sample and the leaf: `batch[3]['image']`.
    """
    if not len(batch):
        raise ArgumentError("default_collate: expected at least one sample")
    return _collate(batch, "", out)


def default_convert(data: Any) -> Any:
    """`data` with its NumPy arrays as tensors, which share their memory; what is not an array stays as it is.

    Goes into mappings, named tuples and sequences as `default_collate` does.
    """
    if isinstance(data, Sequence) and not isinstance(data, (str, bytes)) and not hasattr(data, "_fields"):
        return _sequence(data, [default_convert(value) for value in data])
    if isinstance(data, (np.ndarray, np.generic)):
        array = np.asarray(data)
        return wrap(array, CPU) if array.dtype in SUPPORTED else data
    return map_batch(data, default_convert)


def map_batch(batch: Any, change: Callable[[Any], Any]) -> Any:
    """A mapping, named tuple, list or tuple with `change` of each of its values; what is none of these as it is."""
    if isinstance(batch, Mapping):
        return mapping_like(batch, {key: change(value) for key, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(change, batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map(change, batch))
    return batch


def _collate(samples: Sequence[Any], path: str, out: Out | None) -> Any:
    """path: to these leaves from a sample, as Python would be written."""
    first = samples[0]
    if isinstance(first, np.ndarray):
        return _arrays(samples, path, out)
    if isinstance(first, TensorBase):
        return _tensors(samples, path, out)
    if isinstance(first, (str, bytes)):
        _check_kind(samples, (str, bytes), path)
        return list(samples)
    if isinstance(first, (bool, int, float, np.generic)):
        return _numbers(samples, path, out)
    if isinstance(first, Mapping):
        _check_kind(samples, Mapping, path)
        _check_same([set(sample) for sample in samples], "keys", path, ArgumentError)
        return mapping_like(first, {key: _collate([s[key] for s in samples], f"{path}[{key!r}]", out) for key in first})
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        _check_kind(samples, type(first), path)
        named = zip(first._fields, zip(*samples, strict=True), strict=True)
        return type(first)(*[_collate(column, f"{path}.{name}", out) for name, column in named])
    if isinstance(first, Sequence):
        _check_kind(samples, Sequence, path)
        _check_same([len(sample) for sample in samples], "length", path, ShapeError)
        columns = enumerate(zip(*samples, strict=True))
        return _sequence(first, [_collate(column, f"{path}[{i}]", out) for i, column in columns])
    raise _refused(0, first, path)


def _refused(index: int, sample: Any, path: str) -> DtypeError:
    return DtypeError(
        f"default_collate: batch[{index}]{path} is of {type(sample)}; expected tensors, arrays, numbers, str, bytes,"
        f" or mappings, named tuples and sequences of these. {_FIX}"
    )


def _check_kind(samples: Sequence[Any], kind: type | tuple[type, ...], path: str) -> None:
    if len(set(map(type, samples))) == 1:
        return  # the first is of this kind
    for index, sample in enumerate(samples):
        if not isinstance(sample, kind):
            raise DtypeError(
                f"default_collate: batch[{index}]{path} is of type {type(sample).__name__}, and batch[0]{path} of type"
                f" {type(samples[0]).__name__}"
            )


def _check_same(found: Sequence[Any], what: str, path: str, error: type[ArgumentError]) -> None:
    for index, each in enumerate(found):
        if each != found[0]:
            raise error(
                f"default_collate: batch[{index}]{path} has {what} {each}, and batch[0]{path} has {found[0]}. {_FIX}"
            )


def _arrays(arrays: Sequence[Any], path: str, out: Out | None) -> Any:
    """(N, ...) from N arrays of shape (...)."""
    _check_kind(arrays, (np.ndarray, np.generic), path)
    shape, dtype = arrays[0].shape, arrays[0].dtype
    if len({array.shape for array in arrays}) > 1:
        _check_same([array.shape for array in arrays], "shape", path, ShapeError)
    for other in {array.dtype for array in arrays}:
        if other not in SUPPORTED:
            index = next(index for index, array in enumerate(arrays) if array.dtype == other)
            raise DtypeError(f"default_collate: batch[{index}]{path} is of dtype {other}, which no tensor has")
        dtype = promote_types(dtype, other)
    into = _memory((len(arrays), *shape), dtype, out)
    if shape:  # one call costs a fifth of one for each array
        np.concatenate(arrays, out=into.reshape(len(arrays) * shape[0], *shape[1:]), casting="unsafe")
    else:
        into[...] = arrays
    return wrap(into, CPU)


def _tensors(tensors: Sequence[Any], path: str, out: Out | None) -> Any:
    _check_kind(tensors, TensorBase, path)
    on_gpu = any(tensor.device is not CPU for tensor in tensors)
    if on_gpu and out is not None:
        raise DeviceError(
            f"default_collate: batch[0]{path} and others are on a GPU, and cannot be written to memory of the CPU;"
            " keep samples on the CPU and move the batch"
        )
    if out is None and (on_gpu or any(tensor.requires_grad for tensor in tensors)):
        return stack(tensors)
    return _arrays([tensor.array for tensor in tensors], path, out)


def _numbers(numbers: Sequence[Any], path: str, out: Out | None) -> Any:
    _check_kind(numbers, (bool, int, float, np.generic), path)
    found = np.array(numbers)
    if found.dtype not in SUPPORTED:
        raise DtypeError(
            f"default_collate: batch[0]{path} and the others make an array of {found.dtype}, a dtype that no tensor has"
        )
    if out is None:
        return wrap(found, CPU)
    into = _memory(found.shape, found.dtype, out)
    into[...] = found
    return wrap(into, CPU)


def _memory(shape: tuple[int, ...], dtype: np.dtype[Any], out: Out | None) -> Array:
    if out is None:
        return np.empty(shape, dtype)
    into = out(shape, dtype)
    if into.shape != shape or into.dtype != dtype or not into.flags.c_contiguous:
        raise ArgumentError(
            f"default_collate: out should give a C-contiguous array of {dtype} {shape}, gave {into.dtype} {into.shape}"
        )
    return into


def mapping_like(like: Mapping[Any, Any], content: dict[Any, Any]) -> Any:
    """`content` in a mapping of the kind of `like`, where that can be made."""
    try:
        if isinstance(like, MutableMapping):
            clone = copy.copy(like)
            clone.update(content)
            return clone
        return type(like)(content)  # type: ignore[call-arg]
    except TypeError:
        return content


def _sequence(like: Sequence[Any], content: list[Any]) -> Any:
    """`content` in a sequence of the kind of `like`, where that can be made; a tuple becomes a list."""
    if isinstance(like, tuple):
        return content
    try:
        if isinstance(like, MutableSequence):
            clone = copy.copy(like)
            clone[:] = content
            return clone
        return type(like)(content)  # type: ignore[call-arg]
    except TypeError:
        return content
