"""The exception tree, as its docstring draws it."""

from __future__ import annotations

import builtins
import re

from ddp import errors


def test_the_tree_is_the_one_that_is_drawn() -> None:
    above: list[str] = []
    drawn = {}
    for indent, name, other in re.findall(
        r"^ {4}((?:[│├└─ ]{4})*)(\w+Error|EarlyStop)(?: \((\w+)\))?", errors.__doc__, re.M
    ):
        del above[len(indent) // 4 :]
        drawn[name] = (*above[-1:], *([other] if other else ()))
        above.append(name)
    by_name = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type)}
    assert {name: tuple(base.__name__ for base in kind.__bases__) for name, kind in by_name.items()} == drawn
    assert all(kind.__doc__ and issubclass(kind, errors.DdpError) for kind in by_name.values())
    assert all(hasattr(builtins, base) or base in by_name for bases in drawn.values() for base in bases)
