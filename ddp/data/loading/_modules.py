"""Whether a module has been loaded again since somebody else imported it, who then has its old code.

A file that was edited is not looked at: as long as this process has not loaded it anew, it runs the old code, too.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class Modules:
    """Those of this process, as they were when they were first looked at."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[object, dict[str, Any], Any]] = {}  # module, its namespace, its spec then
        self.reloaded()

    def reloaded(self) -> bool:
        """Whether one of them is another by now: `importlib.reload` and a new import give it another spec."""
        modules = sys.modules
        for name, (module, namespace, spec) in self._seen.items():
            if namespace.get("__spec__") is not spec or modules.get(name, module) is not module:
                return True
        for name in modules.keys() - self._seen.keys():
            module = modules.get(name)
            if issubclass(type(module), ModuleType):  # something else may run code when it is asked
                namespace = vars(module)
                self._seen[name] = module, namespace, namespace.get("__spec__")
        return False
