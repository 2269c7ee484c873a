"""A version string that is ordered by its numbers, as `torch.__version__` is."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any


def _numbers(version: Any) -> list[int]:
    """The numbers of a version: [2, 13, 0] for "2.13.0+cpu" and (2, 13, 0)."""
    return [int(number) for number in re.findall(r"\d+", str(version).partition("+")[0])]


def _by_numbers(compare: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    return lambda self, other: compare(_numbers(self), _numbers(other))


class TorchVersion(str):
    """A version that is ordered by its numbers: "2.13" is greater than "2.4", and than (2, 4).

    The part after a plus sign does not count. Equality compares the whole strings.
    """

    __lt__ = _by_numbers(operator.lt)
    __le__ = _by_numbers(operator.le)
    __gt__ = _by_numbers(operator.gt)
    __ge__ = _by_numbers(operator.ge)
