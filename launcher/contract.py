"""`collectives.world` and `collectives.version` without the rest of `collectives`.

Importing a package's module runs the whole package first, and with it NumPy: 100 ms that neither `ddp-launch` nor a
keeper has, which forks its rank before anything heavy is there. These two files need nothing, so they are read alone.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

    from collectives.world import KEEPER as KEEPER
    from collectives.world import promised as promised


def _alone(name: str) -> ModuleType:
    package = importlib.util.find_spec("collectives")  # finds, and does not import
    assert package is not None
    assert package.submodule_search_locations is not None
    path = os.path.join(next(iter(package.submodule_search_locations)), f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"launcher.contract.{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def version() -> str:
    """The version of the whole distribution."""
    return str(_alone("version").__version__)


if not TYPE_CHECKING:
    _world = _alone("world")
    KEEPER, promised = _world.KEEPER, _world.promised
