"""Makes a batch with the structure of a sample. A tuple becomes a list; other containers keep their class if possible.

The tensors, arrays or numbers at the same place in all samples become one tensor, with the samples along a new first
dimension. The caller can allocate the tensors' memory (`out`): a worker process writes a batch straight into memory
that it shares with its consumer.
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
#: Allocates an array of a batch: (shape, dtype) -> C-contiguous array.
Out = Callable[[tuple[int, ...], np.dtype[Any]], Array]

_FIX = "Give the DataLoader a collate_fn that makes a batch of such samples"


def default_collate(batch: Sequence[Any], *, out: Out | None = None) -> Any:
    """Makes one batch of samples that have the same structure.

    batch: samples, at least one. A leaf is a tensor, a NumPy array or scalar, a number, a str or bytes; leaves may be
    in mappings, named tuples and sequences
    out: called with (shape, dtype) for each array of the batch, returns the array to write to; None: `np.empty`

    N tensors or arrays of shape (...) become a tensor of shape (N, ...). N numbers become a tensor of shape (N): of
    float64, int64 or bool, or the dtype of NumPy's scalars. N str or bytes become a list. Mappings, named tuples and
    lists keep their class; a tuple becomes a list, as in PyTorch. The batch of tensors that require grad is part of
    their graph, unless `out` is given.

    Raises: ShapeError for leaves of different shapes, or sequences of different lengths; ArgumentError for no samples,
    or mappings with different keys; DtypeError for leaves that are not listed above, of different kinds, or of a dtype
    that no tensor has; DeviceError for tensors on a GPU if `out` is given. Messages name a sample and the leaf, such as
    `batch[3]['image']`, unless tensors require grad or are on a GPU.
    """
    if not len(batch):
        raise ArgumentError("default_collate: expected at least one sample")
    return _collate(batch, "", out)


def default_convert(data: Any) -> Any:
    """Converts the NumPy arrays in `data` to tensors that share their memory, and NumPy's scalars to 0-d tensors.

    Looks into mappings, named tuples and sequences as `default_collate` does: a tuple becomes a list. Everything
    else stays unchanged, including arrays of dtypes that no tensor has.
    """
    if isinstance(data, Sequence) and not isinstance(data, (str, bytes)) and not hasattr(data, "_fields"):
        return _as(data, [default_convert(value) for value in data])
    if isinstance(data, (np.ndarray, np.generic)):
        array = np.asarray(data)
        return wrap(array, CPU) if array.dtype in SUPPORTED else data
    return map_batch(data, default_convert)


def map_batch(batch: Any, change: Callable[[Any], Any]) -> Any:
    """Applies `change` to each value of a mapping, named tuple, list or tuple; returns anything else as it is."""
    if isinstance(batch, Mapping):
        return _as(batch, {key: change(value) for key, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(change, batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map(change, batch))
    return batch


def _collate(samples: Sequence[Any], path: str, out: Out | None) -> Any:
    """Collates the values at the same place in all samples. path: this place, such as `['image'][0]`."""
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
        return _as(first, {key: _collate([s[key] for s in samples], f"{path}[{key!r}]", out) for key in first})
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        _check_kind(samples, type(first), path)
        named = zip(first._fields, zip(*samples, strict=True), strict=True)
        return type(first)(*[_collate(column, f"{path}.{name}", out) for name, column in named])
    if isinstance(first, Sequence):
        _check_kind(samples, Sequence, path)
        _check_same([len(sample) for sample in samples], "length", path, ShapeError)
        columns = enumerate(zip(*samples, strict=True))
        return _as(first, [_collate(column, f"{path}[{i}]", out) for i, column in columns])
    raise DtypeError(
        f"default_collate: batch[0]{path} is of {type(first)}; expected tensors, arrays, numbers, str, bytes,"
        f" or mappings, named tuples and sequences of these. {_FIX}"
    )


def _check_kind(samples: Sequence[Any], cls: type | tuple[type, ...], path: str) -> None:
    if len(set(map(type, samples))) > 1:  # the caller has checked the first, so one class needs no check
        for index, sample in enumerate(samples):
            if not isinstance(sample, cls):
                first = type(samples[0]).__name__
                name = type(sample).__name__
                raise DtypeError(f"default_collate: batch[{index}]{path} is a {name}, and batch[0]{path} a {first}")


def _check_same(values: Sequence[Any], what: str, path: str, error: type[ArgumentError]) -> None:
    for index, value in enumerate(values):
        if value != values[0]:
            raise error(
                f"default_collate: batch[{index}]{path} has {what} {value}, and batch[0]{path} has {values[0]}. {_FIX}"
            )


def _arrays(arrays: Sequence[Any], path: str, out: Out | None) -> Any:
    """Stacks N arrays of shape (...) into a tensor of shape (N, ...)."""
    _check_kind(arrays, (np.ndarray, np.generic), path)
    shape = arrays[0].shape
    dtype = arrays[0].dtype
    if len({array.shape for array in arrays}) > 1:
        _check_same([array.shape for array in arrays], "shape", path, ShapeError)
    for array_dtype in {array.dtype for array in arrays}:
        dtype = promote_types(dtype, _supported(array_dtype, path))
    stacked = (out or np.empty)((len(arrays), *shape), dtype)
    if shape:  # one call for all arrays, which is faster than one for each if they are small
        np.concatenate(arrays, out=stacked.reshape(len(arrays) * shape[0], *shape[1:]), casting="unsafe")
    else:
        stacked[...] = arrays
    return wrap(stacked, CPU)


def _supported(dtype: np.dtype[Any], path: str) -> np.dtype[Any]:
    if dtype not in SUPPORTED:
        raise DtypeError(f"default_collate: batch[0]{path} or others are of dtype {dtype}, which no tensor has")
    return dtype


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
    array = np.array(numbers)
    stacked = (out or np.empty)(array.shape, _supported(array.dtype, path))
    stacked[...] = array
    return wrap(stacked, CPU)


def _as(like: Any, content: Any) -> Any:
    """Converts `content`, a dict or list, to the class of `like` if possible. For a tuple, returns the list."""
    if isinstance(like, tuple):
        return content
    try:
        if isinstance(like, MutableMapping | MutableSequence):
            clone = copy.copy(like)
            if isinstance(clone, MutableMapping):
                clone.update(content)
            else:
                clone[:] = content
            return clone
        return type(like)(content)
    except TypeError:
        return content
