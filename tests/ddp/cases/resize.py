"""Images at another size."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from tests.ddp.cases.table import Case, draw, function


def resized() -> Iterator[Case]:
    to = functools.partial(function, "interpolate")

    def case(label: str, run: Callable[..., Any], *inputs: Any) -> Case:
        return Case("interpolate", label, run, inputs)

    x = draw(2, 3, 4, 5)
    for mode in ("nearest", "nearest-exact", "bilinear"):
        yield case(f"{mode} twice", to(scale_factor=2, mode=mode), x)
        yield case(f"{mode} larger", to(size=(7, 9), mode=mode), x)
        yield case(f"{mode} smaller", to(size=(3, 2), mode=mode), x)
        yield case(f"{mode} factor", to(scale_factor=(1.3, 0.7), mode=mode), x)
        recomputed = to(scale_factor=(1.3, 0.7), mode=mode, recompute_scale_factor=True)
        yield case(f"{mode} factor recomputed", recomputed, x)
        yield case(f"{mode} from one", to(size=3, mode=mode), draw(2, 1, 1, 1))
        yield case(f"{mode} empty", to(scale_factor=2, mode=mode), draw(0, 3, 4, 5))
    yield case("bilinear corners", to(size=(7, 3), mode="bilinear", align_corners=True), x)
    for mode in ("nearest", "linear"):
        yield case(f"{mode} 1-d", to(scale_factor=1.7, mode=mode), draw(2, 3, 5))


CASES = list(resized())
