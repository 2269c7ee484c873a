"""Makes further module paths importable, named as in PyTorch: `ddp.utils.data` has the names of `ddp.data`.

The keys of MODULES are the paths of modules, and those of NAMES the paths of single names. A module is imported when an
import or an attribute first asks for it. einops finds its layers and its backend for our tensors through this module.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_DDP = {"DistributedDataParallel": "DataParallel"}
_LAYERS = (
    "activation batchnorm container conv distance dropout embedding fold instancenorm linear loss module "
    "normalization padding pixelshuffle pooling rnn sparse transformer upsampling"
)
_DISTRIBUTIONS = (
    "bernoulli beta categorical dirichlet gamma independent kl multivariate_normal normal transformed_distribution "
    "uniform"
)
# Path of a module -> (the module from which it takes its names, or "" if it has none; its name -> name there, if not
# the same).
MODULES: dict[str, tuple[str, dict[str, str]]] = {
    "ddp.autograd.function": ("ddp.autograd", {}),
    "ddp.autograd.functional": ("ddp.autograd.jacobians", {}),
    "ddp.cuda.amp": ("ddp.amp.cuda", {}),
    **{f"ddp.distributions.{name}": ("ddp.distributions", {}) for name in _DISTRIBUTIONS.split()},
    "ddp.nn.modules": ("ddp.nn", {}),
    **{f"ddp.nn.modules.{name}": ("ddp.nn", {}) for name in _LAYERS.split()},
    "ddp.nn.modules.linear": ("ddp.nn", {"NonDynamicallyQuantizableLinear": "Linear"}),
    "ddp.nn.parallel": ("ddp.parallel", _DDP),
    "ddp.nn.parallel.data_parallel": ("ddp.nn", {}),
    "ddp.nn.parallel.distributed": ("ddp.parallel", _DDP),
    "ddp.onnx": ("", {}),  # scripts import it even if they export nothing
    "ddp.optim.swa_utils": ("ddp.optim.swa_utils", {}),  # `ddp.optim` does not import it, because it needs `ddp.nn`
    "ddp.utils": ("", {}),
    "ddp.utils.checkpoint": ("ddp.autograd", {}),
    "ddp.utils.data": ("ddp.data", {}),
    "ddp.utils.tensorboard": ("ddp.metrics", {}),
    "einops.layers.ddp": ("ddp._einops", {}),
    **{f"ddp.utils.data.{name}": ("ddp.data", {}) for name in ("dataloader", "dataset", "distributed", "sampler")},
}
# Path of a single name -> the module that the name comes from.
NAMES = {"ddp.nn.SyncBatchNorm": "ddp.parallel", "ddp.nn.parallel.DataParallel": "ddp.nn"}


def defined_in(package: str, modules: str, cls: type | tuple[type, ...]) -> dict[str, Any]:
    """The public functions or classes that these modules of a package define, by name. cls: the types of the values"""
    definitions = {}
    for home in [f"{package}.{name}" for name in modules.split()]:
        for name, value in vars(importlib.import_module(home)).items():
            if isinstance(value, cls) and value.__module__ == home and name[0] != "_":
                definitions[name] = value
    return definitions


def attribute(package: str) -> Callable[[str], Any]:
    """Returns a `__getattr__` for a package, which imports the modules and names that the tables list for it."""

    def __getattr__(name: str) -> Any:
        path = f"{package}.{name}"
        if path in MODULES:
            return importlib.import_module(path)
        if path in NAMES:
            return getattr(importlib.import_module(NAMES[path]), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return __getattr__


class _Finder:  # without the base class of importlib.abc, whose import takes long
    """Finds the modules of MODULES. Python calls it if no other finder has a module."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        # Each of these modules is a package, because MODULES may have paths below it.
        loader: Any = self
        return ModuleSpec(name, loader, origin="an alias", is_package=True) if name in MODULES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        home = MODULES[spec.name][0]
        return ModuleType(spec.name, f"As in PyTorch; the names of {home}." if home else "As in PyTorch.")

    def exec_module(self, module: ModuleType) -> None:
        home, renamed = MODULES[module.__name__]
        if home:
            source = importlib.import_module(home)
            names = {name: renamed.get(name, name) for name in (*source.__all__, *renamed)}
            added = {name: original for name, original in names.items() if f"{module.__name__}.{name}" not in NAMES}
            vars(module).update(
                {name: getattr(source, original) for name, original in added.items()}, __all__=sorted(names)
            )
        vars(module)["__getattr__"] = attribute(module.__name__)


class _Einops:
    """A finder that imports our backend for einops right after einops, because einops itself does not import it."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name) if name == "einops" else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                sys.meta_path.remove(_Einops)  # only now: who calls `find_spec` may not import einops
                execute(module)
                importlib.import_module("ddp._einops")

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Makes the paths of MODULES and NAMES importable. Makes einops accept our tensors, now or when it is imported."""
    sys.meta_path.append(_Finder())
    if "einops" in sys.modules:
        importlib.import_module("ddp._einops")
    else:
        sys.meta_path.insert(0, _Einops)
