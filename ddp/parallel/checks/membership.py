"""A parameter added after wrapping would be trained by each rank alone, in silence: here it is noticed, by name."""

from __future__ import annotations

from ddp.errors import ParallelError
from ddp.nn import Module
from ddp.nn.module import registration_count


class Members:
    """The parameters of a module at the time it was wrapped."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._known = {
            id(p): p for p in module.parameters()
        }  # the parameters too: an id is theirs only while they live
        self._seen = registration_count()

    def check(self) -> None:
        """Looks again if any module has got or lost a part since. Raises: ParallelError naming what is new."""
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
