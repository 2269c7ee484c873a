"""CuPy's ufuncs and functions, as far as NumPy has them: each computes on the current stream."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.gpu.arrays import Array
from tests.gpu.kinds import LIBRARY, MOVES, PLAIN, VIEWS, WAITS, names
from tests.gpu.working import BFLOAT16

if TYPE_CHECKING:
    from tests.gpu.standin import Cupy

_WORDS = "int32 int64 uint32 uint64"
#: The dtypes of `cupy.ufunc.at`, by the ufuncs that have it.
AT = {
    "add": f"{_WORDS} float16 float32 float64",
    "subtract": "int32 uint32",
    **dict.fromkeys(("maximum", "minimum"), f"{_WORDS} float32 float64"),
    **dict.fromkeys(("bitwise_and", "bitwise_or", "bitwise_xor"), _WORDS),
}


class Ufunc:
    """`cupy.ufunc`."""

    def __init__(self, cupy: Cupy, ufunc: np.ufunc, name: str) -> None:
        self._cupy = cupy
        self._numpys = ufunc
        self.__name__ = self.name = name
        self.nin = ufunc.nin
        self.nout = ufunc.nout
        self.nargs = ufunc.nargs
        self.types = ufunc.types

    def _call(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("out", 0) is None:
            del kwargs["out"]
        cupy = self._cupy
        name = self.name
        library = name == "matmul"
        if library and any(isinstance(arg, Array) and arg.dtype == BFLOAT16 and arg.ndim > 2 for arg in args):
            raise TypeError("cupy.matmul: no batched product of bfloat16")
        return cupy._compute(name, cupy._single(name, fn, args, kwargs), args, kwargs, library=library)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) > self.nin:
            kwargs["out"] = args[self.nin] if self.nout == 1 else args[self.nin :]
            args = args[: self.nin]
        # However its operands lie: CuPy gives a new result in the order of its axes (cupy/cupy#7342).
        fn = self._numpys if kwargs.get("out") is not None else functools.partial(self._numpys, order="C")
        return self._call(fn, args, kwargs)

    def at(self, a: Any, indices: Any, b: Any = None) -> None:
        cupy = self._cupy
        if self.name not in AT:
            raise NotImplementedError(f"`cupy_{self.name}.at` is not supported yet")
        if a.dtype.name not in AT[self.name].split():
            raise TypeError(f"cupy.{self.name}.at only supports {AT[self.name]} as data type")
        parts, _, masks = cupy._index(indices)
        if masks:
            cupy.wait("at with a mask")
        held = [a]
        hosts, source = cupy._host_of(parts, held), cupy._host_of(b, held)
        target = a._host
        cupy._launch(f"{self.name}.at", lambda: self._numpys.at(target, hosts, source), held)


class Numpys(ModuleType):
    """A module of NumPy's, as CuPy has it."""

    def __init__(self, cupy: Cupy, name: str, numpys: ModuleType) -> None:
        super().__init__(f"cupy.{name}")
        self._cupy = cupy
        self._of = numpys
        self._has = names()[f"cupy.{name}"]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in self._has or not hasattr(self._of, name):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}, as the stand-in knows it")
        ufunc = function(self._cupy, name, getattr(self._of, name), library="linalg" in self.__name__)
        setattr(self, name, ufunc)
        return ufunc


def function(cupy: Cupy, name: str, given: Any, library: bool = False) -> Any:
    """NumPy's thing of that name, as CuPy's."""
    if isinstance(given, np.ufunc):
        return Ufunc(cupy, given, name)
    if isinstance(given, type) or not callable(given):
        return given
    if name in PLAIN:
        return lambda *args, **kwargs: given(*_bare(cupy, args), **{k: cupy._host_of(v) for k, v in kwargs.items()})
    if name in VIEWS:

        def view(x: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(x, Array):
                raise TypeError(f"{name}: expected a cupy.ndarray, got {type(x)}")
            return cupy._viewed(name, lambda host: given(host, *args, **kwargs), x)

        return view
    waits = name in WAITS
    library = library or name in LIBRARY

    def compute(*args: Any, **kwargs: Any) -> Any:
        if name in ("concatenate", "stack") and len(args[0]) > 8:
            cupy.refuse_capture("the addresses of more than 8 arrays, which the host sends")
        kwargs = {key: value for key, value in kwargs.items() if not (key == "out" and value is None)}
        fn = given if name in MOVES else cupy._single(name, given, args, kwargs)
        return cupy._compute(name, fn, args, kwargs, waits or (name, len(args)) == ("where", 1), library)

    compute.__name__ = name
    return compute


def _bare(cupy: Cupy, args: tuple[Any, ...]) -> list[Any]:
    return [cupy._host_of(arg) for arg in args]
