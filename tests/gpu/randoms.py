"""`cupy.random`: generators whose state is in device memory, so that drawing is work of a stream like any other.

The numbers are not CuPy's: they are NumPy's, begun anew for each draw from the state, which counts the draws.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tests.gpu.standin import Cupy

_DRAWS = {
    **dict.fromkeys(("random", "standard_normal"), ("size", "dtype")),
    "standard_gamma": ("shape", "size", "dtype"),
    "integers": ("low", "high", "size", "dtype", "endpoint"),
}


def module(cupy: Cupy) -> ModuleType:
    """The module."""

    class Generator:
        def __init__(self, bit_generator: Any) -> None:
            self.bit_generator = bit_generator

    def draw(name: str, fields: tuple[str, ...]) -> Any:
        def drawing(self: Any, *args: Any, **kwargs: Any) -> Any:
            given = dict(zip(fields, args, strict=False)) | kwargs
            assert set(given) <= set(fields), f"Generator.{name} takes no {set(given) - set(fields)}"
            if given.get("dtype") is not None:
                given["dtype"] = np.dtype(given["dtype"])
            state = self.bit_generator._state

            def fn(numbers: Any, **options: Any) -> Any:
                rng = np.random.default_rng([abs(int(n)) for n in numbers])
                result = getattr(rng, name)(**options)
                numbers[1] += 1
                return result

            return cupy._compute(f"random.{name}", fn, (state,), given)

        drawing.__name__ = name
        return drawing

    for name, fields in _DRAWS.items():
        setattr(Generator, name, draw(name, fields))

    class XORWOW:
        def __init__(self, seed: Any = None, *, size: int = -1) -> None:
            number = np.random.default_rng().integers(1 << 62) if seed is None else int(seed) % (1 << 62)
            self._state = cupy.array(np.array([number, 0], np.int64))
            self.lock = SimpleNamespace()

    module = ModuleType("cupy.random")
    vars(module).update(
        Generator=Generator, XORWOW=XORWOW, default_rng=lambda seed=None: Generator(XORWOW(seed)), BitGenerator=XORWOW
    )
    return module
