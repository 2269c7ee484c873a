"""The floors: a module imports only from floors below its own, and the base install stays light."""

from __future__ import annotations

import ast
import functools
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("collectives", "ddp", "launcher")

# The longest prefix counts. A module may import from lower floors, and from its own package on the same floor.
FLOORS = {
    "ddp._aliases": 0,
    "ddp._block": 0,
    "ddp._device": 0,
    "ddp._files": 0,
    "ddp._heap": 0,
    "ddp._precision": 0,
    "ddp.errors": 0,
    "ddp._engine": 1,
    "ddp.ops": 2,
    "ddp._cuda": 2.5,
    "ddp._tensor": 3,
    "ddp._layout": 3,
    "ddp.nn": 4,
    "ddp.optim": 4,
    "ddp.amp": 4,
    "ddp.autograd": 4,
    "ddp.backends": 4,
    "ddp.cuda": 4,
    "ddp.linalg": 4,
    "ddp.return_types": 4,
    "ddp._einops": 5,
    "ddp.accelerator": 5,
    "ddp.distributed": 5,
    "ddp.parallel": 5,
    "ddp.serialization": 5,
    "ddp.multiprocessing": 5,
    "ddp.data": 6,
    "ddp.metrics": 6,
    "ddp.checkpoint": 7,
    "ddp.tracing": 7,
    "examples": 8,
    "benchmarks": 8,
}
TOP = {"ddp"}  # the package's own __init__ gathers the public names of all floors
SEE_COLLECTIVES = ("ddp.distributed", "ddp.parallel", "ddp.data", "ddp.checkpoint", "launcher.bench", "launcher.doctor")
# What the rest of the launcher may import: the environment contract, and what ranks left in their flight records.
LAUNCHER_SEES = (
    "collectives.world",
    "collectives.version",
    "collectives.errors",
    "collectives.flight.reader",
    "collectives.flight.report",
)
HEAVY = {
    "mpi4py": ("collectives.backends.mpi.mpi_world", "launcher.bench.timing", "launcher.doctor.probes"),
    "cupy": (
        "ddp._device",
        "ddp._cuda",
        "collectives.backends.device.cuda",
        "collectives.backends.nccl.library",
        "launcher.bench.implementations",
    ),
    "cudnn": ("ddp._cuda.cudnn_graph",),
    "pynccl": ("collectives.backends.nccl.library",),
    "torch": ("launcher.bench.implementations",),
    "matplotlib": ("ddp.tracing.step_picture", "launcher.bench.plot"),
}


def modules() -> Iterator[tuple[str, Path]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


@functools.cache
def imports(path: Path) -> set[str]:
    """Everything a module imports, wherever in it: full names of modules, or of names in modules."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def floor(name: str) -> int | None:
    prefixes = [prefix for prefix in FLOORS if name == prefix or name.startswith(prefix + ".")]
    return FLOORS[max(prefixes, key=len)] if prefixes else None


def home(name: str) -> str:
    return ".".join(name.split(".")[:2])


MODULES = dict(modules())


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_only_from_below(name: str) -> None:
    mine = floor(name)
    if name.startswith("ddp") and name not in TOP:
        assert mine is not None, f"{name} stands on no floor: give it one in this table"
    for imported in imports(MODULES[name]):
        package = imported.split(".")[0]
        if package not in PACKAGES or name in TOP:
            continue
        if name.startswith("collectives"):
            assert package == "collectives", f"{name} imports {imported}: collectives imports none of ours"
        elif name.startswith("launcher"):
            seen = ("collectives",) if name.startswith(SEE_COLLECTIVES) else LAUNCHER_SEES
            allowed = package == "launcher" or imported.startswith(seen)
            assert allowed, f"{name} imports {imported}: of collectives the launcher sees only {LAUNCHER_SEES}"
        elif package == "collectives":
            assert name.startswith(SEE_COLLECTIVES), f"{name} imports {imported}: only {SEE_COLLECTIVES} may"
        else:
            theirs = floor(imported)
            assert mine is not None
            assert theirs is not None, f"{name} imports {imported}, which stands on no floor"
            # The ground floor is one room: a device is asked for by name, and what it does is CuPy's.
            below = theirs < mine or theirs == mine == 0 or home(imported) in (home(name), "ddp.errors")
            assert below, f"{name} (floor {mine}) imports {imported} ({theirs})"


@pytest.mark.parametrize("library", HEAVY)
def test_a_backend_library_is_imported_by_the_one_module_that_speaks_to_it(library: str) -> None:
    users = {name for name, path in MODULES.items() if any(each.split(".")[0] == library for each in imports(path))}
    assert all(name.startswith(HEAVY[library]) for name in users), users


def test_importing_us_imports_no_backend_library() -> None:
    code = (
        "import sys, collectives, ddp, launcher\n"
        f"loaded = {set(HEAVY)} & {{name.split('.')[0] for name in sys.modules}}\n"
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=ROOT)


def test_a_module_never_bears_the_name_of_a_public_function_or_class() -> None:
    for package in PACKAGES:
        for path in (ROOT / package).rglob("__init__.py"):
            siblings = {
                each.stem for each in path.parent.iterdir() if each.suffix == ".py" or (each / "__init__.py").exists()
            }
            public = {
                alias.asname or alias.name
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.ImportFrom) and node.module != ".".join(path.parent.relative_to(ROOT).parts)
                for alias in node.names
            }
            assert not siblings & public, f"{path}: {siblings & public}"


@pytest.mark.parametrize("name", [name for name, path in MODULES.items() if "__all__ = " in path.read_text()])
def test_every_all_is_true(name: str) -> None:
    module = importlib.import_module(name)  # ruff sorts it
    assert len(set(module.__all__)) == len(module.__all__)
    assert all(hasattr(module, each) for each in module.__all__)
