"""What a function of NumPy becomes on a device: memory that is given at once, and a kernel that fills it."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from tests.gpu.arrays import Array
from tests.gpu.kinds import NO_BFLOAT16, TO_FLOAT32

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_KINDS = "biufc"


class Working:
    """The part of the stand-in that launches."""

    def _launch(self, name: str, run: Callable[[], None], arrays: list[Any]) -> None:
        """Puts a kernel on the current stream."""
        here = self.local.device
        for array in arrays:
            if array._memptr.device_id != here and array.size:
                raise ValueError(
                    f"Array device must be same as the current device: array device = {array._memptr.device_id} "
                    f"while current = {here}"
                )
        if name not in self.loaded:
            self.captures.unsafe("cuModuleLoadData")
            self.loaded.add(name)
        self.record.launches[name] += 1
        self.put(self.current().ptr, name, run)

    def _host_of(self, x: Any, held: list[Any] | None = None) -> Any:
        """x with the host's side of each array in it. Raises: TypeError for NumPy's arrays."""
        if isinstance(x, Array):
            if x._cupy is not self:
                raise TypeError("an array of another stand-in")
            if held is not None:
                held.append(x)
            return x._host
        if isinstance(x, np.ndarray):
            raise TypeError(f"Unsupported type {type(x)}")
        if isinstance(x, tuple | list):
            parts = [self._host_of(each, held) for each in x]
            return parts if type(x) is list else tuple(parts)
        return getattr(x, "_numpys", x)

    def _compute(
        self,
        name: str,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        waits: bool = False,
        library: bool = False,
    ) -> Any:
        """`fn` of NumPy on the numbers of arrays, in a kernel: new arrays, or `out`."""
        if kwargs and "initial" in kwargs:
            raise TypeError(f"{name}() got an unexpected keyword argument 'initial'")
        if library:
            self.refuse_capture("cuBLAS")
        held: list[Any] = []
        hosts = self._host_of(args, held)
        options = {key: self._host_of(value, held) for key, value in kwargs.items()} if kwargs else {}
        out = kwargs.get("out") if kwargs else None
        if out is not None:
            if self.deferred:
                quietly(lambda: fn(*self._dummy(hosts), **self._dummy(options)))  # what it refuses, it refuses now
            self._launch(name, lambda: fn(*hosts, **options), held)
            return out
        if waits:
            self.wait(name)
        if waits or not self.deferred:
            result = quietly(lambda: fn(*hosts, **options))
            self._launch(name, nothing, held)
            return self._wrapped(result, None)
        like = quietly(lambda: fn(*self._dummy(hosts), **self._dummy(options)))
        targets: list[Any] = []
        array = self._wrapped(like, targets)

        def run() -> None:
            result = fn(*hosts, **options)
            for target, source in zip(targets, flattened(result), strict=True):
                np.copyto(target, source)

        self._launch(name, run, held)
        return array

    def _wrapped(self, result: Any, targets: list[Any] | None) -> Any:
        """NumPy's result as ours. targets: takes where to write it, later; None: it is written now"""
        if isinstance(result, tuple | list):
            parts = [self._wrapped(each, targets) for each in result]
            return parts if type(result) is list else tuple(parts)
        if not isinstance(result, np.ndarray | np.generic | bool | int | float | complex):
            return result
        result = np.asarray(result)
        array = self._like(result)
        if targets is not None:
            targets.append(array._host)
        else:
            target = array._host
            self.put(self.current().ptr, "result", lambda: np.copyto(target, result))
        return array

    def _like(self, host: Any) -> Any:
        """A new array of the shape, dtype and order of axes of NumPy's."""
        order = np.argsort([-abs(stride) for stride in host.strides], kind="stable") if host.ndim > 1 else None
        if order is None or host.flags.c_contiguous:
            return self.ndarray(host.shape, host.dtype)
        flat = self.ndarray([host.shape[i] for i in order], host.dtype)
        array = flat._view(flat._host.transpose(np.argsort(order)))
        array.base = None
        return array

    def _dummy(self, x: Any) -> Any:
        """Arrays of the same kind, with numbers that nothing objects to."""
        if isinstance(x, np.ndarray):
            array = np.empty_like(x)
            array.fill(0 if x.dtype.kind in "biu" else 1)
            return array
        if isinstance(x, tuple | list):
            parts = [self._dummy(each) for each in x]
            return parts if type(x) is list else tuple(parts)
        return {key: self._dummy(value) for key, value in x.items()} if isinstance(x, dict) else x

    def _viewed(self, name: str, fn: Callable[[Any], Any], x: Any) -> Any:
        """`fn` of NumPy, which may give a view."""
        result = quietly(lambda: fn(x._host))
        if isinstance(result, tuple | list):
            return [x._view(each) for each in result]
        if not isinstance(result, np.ndarray) or x.size == 0 or np.may_share_memory(result, x._host):
            return x._view(np.asarray(result))
        return self._compute(name, fn, (x,))

    def _known(self, dtype: Any) -> None:
        if (dtype.kind not in _KINDS and dtype != BFLOAT16) or dtype.itemsize > (16 if dtype.kind == "c" else 8):
            raise TypeError(f"Unsupported type {dtype}")

    def _single(self, name: str, fn: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Callable[..., Any]:
        """`fn` that computes bfloat16 in float32 and rounds, as CuPy's loops do; where it has none, it is refused."""
        arrays = [each for each in flattened([args, list(kwargs.values())]) if isinstance(each, Array)]
        if not any(array.dtype == BFLOAT16 for array in arrays):
            return fn
        if name in NO_BFLOAT16:
            raise TypeError(f"Wrong type of arguments for cupy_{name}: bfloat16")
        stays = name in TO_FLOAT32 or kwargs.get("dtype") is not None
        stays = stays or any(array.dtype.kind in "fc" and array.dtype.itemsize > 2 for array in arrays)

        def single(*hosts: Any, **options: Any) -> Any:
            out = options.pop("out", None)
            result = fn(*widened(hosts), **{key: widened(value) for key, value in options.items()})
            result = result if stays else narrowed(result)
            return (
                result
                if out is None
                else np.copyto(out, result, casting="same_kind" if out.dtype != BFLOAT16 else "unsafe")
            )

        return single


def quietly(run: Callable[[], Any]) -> Any:
    # In a context of its own: where finalizers do work of streams, Python (3.11) may be in the middle of setting a
    # variable of the context that they came from, as errstate does, and to set one there would leave it with freed
    # memory.
    context = contextvars.copy_context()
    context.run(np.seterr, all="ignore")
    return context.run(run)


def nothing() -> None:
    pass


def flattened(result: Any) -> list[Any]:
    if isinstance(result, tuple | list):
        return [leaf for each in result for leaf in flattened(each)]
    return [result]


def widened(x: Any) -> Any:
    if isinstance(x, tuple | list):
        return type(x)([widened(each) for each in x])
    return x.astype(np.float32) if getattr(x, "dtype", None) == BFLOAT16 else x


def narrowed(x: Any) -> Any:
    if isinstance(x, tuple | list):
        return [narrowed(each) for each in x]
    return x.astype(BFLOAT16) if getattr(x, "dtype", None) == np.float32 else x
