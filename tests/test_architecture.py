"""The architecture and its limits: floors, names, sizes. Each rule is a function from sources to offenders.

`docs/architecture.md` describes what is held here; `python tests/test_architecture.py` prints the sizes. Size is
counted in AST nodes: denser lines are no smaller.
"""

from __future__ import annotations

import ast
import functools
import gc
import graphlib
import importlib
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("collectives", "ddp", "launcher")

Sources = Mapping[str, str]  # path below the repository -> text


@functools.cache
def sources(*folders: str) -> Sources:
    return {
        str(path.relative_to(ROOT)): path.read_text()
        for folder in folders
        for path in ([ROOT / folder] if folder.endswith(".py") else sorted((ROOT / folder).rglob("*.py")))
    }


@pytest.fixture(autouse=True, scope="module")
def _no_collection_of_garbage() -> Iterator[None]:
    """None of the millions of nodes is garbage, and to look at them all again and again takes half of the time."""
    gc.disable()
    yield
    gc.enable()


@functools.lru_cache(maxsize=2000)
def tree(text: str) -> ast.Module:
    return ast.parse(text)


@functools.lru_cache(maxsize=2000)
def nodes(text: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree(text)))


def folder_of(path: str) -> str:
    return path.rpartition("/")[0]


def module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


# --- sizes ---------------------------------------------------------------------------------------------------------


class Size(NamedTuple):
    """Size of a folder in AST nodes: what it may hold today, and the goal that it is meant to reach."""

    limit: int
    goal: int
    folders: tuple[str, ...]


# The longest path counts: ddp/cuda is not part of ddp. Raising a limit is an argued change; lowering one is not.
SIZES = {
    "ddp/_engine, ddp/autograd": Size(12_858, 10_500, ("ddp/_engine", "ddp/autograd")),
    "ddp/_tensor": Size(58_077, 47_000, ("ddp/_tensor",)),
    "ddp/ops": Size(48_106, 46_000, ("ddp/ops",)),
    "ddp/_native": Size(9_799, 6_400, ("ddp/_native",)),  # of Python; beside 923 lines of C, 67 of them for threads
    "ddp/_cuda, ddp/cuda": Size(39_719, 36_000, ("ddp/_cuda", "ddp/cuda")),
    "ddp/nn": Size(44_736, 39_000, ("ddp/nn",)),
    "ddp/optim": Size(16_829, 14_000, ("ddp/optim",)),
    "ddp/data": Size(22_660, 20_500, ("ddp/data",)),
    "ddp/checkpoint, ddp/serialization": Size(30_308, 22_500, ("ddp/checkpoint", "ddp/serialization")),
    "ddp/parallel, ddp/tracing": Size(42_120, 35_000, ("ddp/parallel", "ddp/tracing")),
    "ddp/multiprocessing": Size(4_220, 4_000, ("ddp/multiprocessing",)),
    "ddp/distributions": Size(5_060, 5_000, ("ddp/distributions",)),
    "rest of ddp": Size(18_534, 11_500, ("ddp",)),
    "collectives": Size(81_190, 65_000, ("collectives",)),
    "launcher": Size(73_308, 64_000, ("launcher",)),
    "benchmarks": Size(48_722, 31_000, ("benchmarks",)),
    "tests": Size(487_799, 385_000, ("tests",)),
}
FILES = {"ddp": (248, 230), "collectives": (61, 60), "launcher": (79, 75)}  # limit, goal


def code_lines(text: str) -> int:
    """Lines that hold code: not blank, no comment, no docstring."""
    lines = {
        number for number, line in enumerate(text.splitlines(), 1) if line.strip() and not line.lstrip().startswith("#")
    }
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in nodes(text):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            lines.difference_update(range(docstring.lineno, docstring.end_lineno + 1))
    return len(lines)


def sizes(files: Sources, size_of: Callable[[str], int]) -> Counter[str]:
    """The sum of `size_of(text)` over the files of each row of SIZES."""
    owners = {folder: row for row, size in SIZES.items() for folder in size.folders}
    total: Counter[str] = Counter()
    for path, text in files.items():
        folder = folder_of(path)
        while folder not in owners:
            folder = folder_of(folder)
            assert folder, f"{path} belongs to no row of SIZES"
        total[owners[folder]] += size_of(text)
    return total


def node_count(text: str) -> int:
    return len(nodes(text))


def table() -> str:
    files = sources(*PACKAGES, "benchmarks", "tests")
    now = sizes(files, node_count)
    lines = sizes(files, code_lines)
    rows = [f"{'AST nodes':<36}{'now':>9}{'limit':>9}{'goal':>9}{'code lines':>12}"]
    rows += [f"{row:<36}{now[row]:>9,}{size.limit:>9,}{size.goal:>9,}{lines[row]:>12,}" for row, size in SIZES.items()]
    rows += [f"{'files':<36}{'now':>9}{'limit':>9}{'goal':>9}"]
    rows += [f"{each:<36}{len(sources(each)):>9,}{limit:>9,}{goal:>9,}" for each, (limit, goal) in FILES.items()]
    return "\n".join(rows)


def test_the_kernels_are_short() -> None:
    texts = [path.read_text() for path in (ROOT / "ddp/_native").glob("*.c")]
    assert max(len(text.splitlines()) for text in texts) <= 713
    code = [re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL) for text in texts]
    # Of which 649 for convolution.
    assert sum(bool(line.strip()) for text in code for line in text.splitlines()) <= 1_400


def test_every_folder_keeps_within_its_limit() -> None:
    now = sizes(sources(*PACKAGES, "benchmarks", "tests"), node_count)
    over = {row: (now[row], size.limit) for row, size in SIZES.items() if now[row] > size.limit}
    over |= {each: (len(sources(each)), limit) for each, (limit, _) in FILES.items() if len(sources(each)) > limit}
    assert not over, f"AST nodes or files over the limit (now, limit): {over}"


# --- floors --------------------------------------------------------------------------------------------------------

# A module imports from floors below its own and from its own room. A room is a name of this table, the longest that
# fits; rooms of one floor do not see each other, but for those written in one string.
FLOORS = {
    "collectives": (
        ("errors", "world", "native", "handshake"),
        ("arrays", "time_limit", "flight", "progress_bar"),
        ("reduction",),
        ("transport",),
        ("engine",),
        ("backends",),
        ("ops",),
        ("communicator",),
        ("monitored_section",),
        ("start",),
        ("torch",),
    ),
    "ddp": (
        ("errors", "_aliases", "_files", "_heap", "_layout", "_version"),
        ("_device", "_block", "_precision", "hub", "jit"),
        ("_engine", "ops"),
        ("_cuda", "_native"),
        ("_tensor",),
        (
            "nn",
            "optim",
            "amp",
            "autograd",
            "backends",
            "cuda",
            "linalg",
            "return_types",
            "distributed",
            "testing",
            "fft",
            "special",
        ),
        (
            "serialization",
            "multiprocessing",
            "parallel",
            "accelerator",
            "distributions",
            "func",
            "_einops",
            "optim.swa_utils",
        ),
        ("data", "metrics", "tracing"),
        ("checkpoint",),
    ),
    "launcher": (
        ("errors", "debugger", "function_worker"),
        ("linux",),
        ("network", "placement", "protocol", "arguments", "tracing", "resize"),
        ("job",),
        ("options", "engines"),
        ("config", "agent", "diagnosis"),
        ("console",),
        ("supervisor",),
        ("cli", "function", "bench", "top"),
        ("doctor", "__main__"),
    ),
}
# Whom each package may see of the others.
SEES = {
    "collectives": (),
    "launcher": (
        "collectives",
        "collectives.world",
        "collectives.errors",
        "collectives.handshake",
        "collectives.flight.reader",
    ),
    "launcher.engines.local": ("collectives.backends.mpi.pmi_server",),
    "launcher.bench": ("collectives",),
    "launcher.doctor": ("collectives",),
    "ddp": (),
    "ddp._native": ("collectives.native",),
    "ddp.distributed": ("collectives",),
    "ddp.metrics": ("collectives.world",),
    "ddp.parallel": ("collectives",),
    "ddp.data": ("collectives",),
    "ddp.checkpoint": ("collectives",),
}


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def longest(name: str, names: Iterable[str]) -> str | None:
    return max((each for each in names if within(name, each)), key=len, default=None)


@functools.lru_cache(maxsize=2000)
def imports(text: str) -> set[str]:
    """Everything a module imports, wherever in it: full names of modules, or of names in modules."""
    result = set()
    for node in nodes(text):
        if isinstance(node, ast.Import):
            result |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            result |= {f"{node.module}.{alias.name}" for alias in node.names}
    return result


def imports_from_above(files: Sources) -> list[str]:
    """Imports that do not go down: to the same floor or a higher one, or to what the package does not see."""
    floors = {
        f"{package}.{room}": floor
        for package, rows in FLOORS.items()
        for floor, rooms in enumerate(rows)
        for room in rooms
    }
    results = []
    for path, text in files.items():
        name = module_of(path)
        if name in PACKAGES:
            continue  # gathers the public names of all floors
        mine = longest(name, floors)
        if mine is None:
            results.append(f"{path} stands on no floor")
            continue
        for imported in sorted(imports(text)):
            package = imported.split(".")[0]
            if package not in PACKAGES:
                continue
            if package != name.split(".")[0]:
                seen = SEES[longest(name, SEES) or ""]
                if not any(within(imported, each) for each in seen):
                    results.append(f"{path} imports {imported}: of {package} it sees {seen or 'nothing'}")
                continue
            theirs = longest(imported, floors)
            if theirs is None:
                results.append(f"{path} imports {imported}, which stands on no floor")
            elif theirs != mine and floors[theirs] >= floors[mine]:
                results.append(f"{path} (floor {floors[mine]}) imports {imported} (floor {floors[theirs]})")
    return results


def circles(files: Sources) -> list[str]:
    """Folders that import each other, directly or through others; a module at a package's top is a folder by itself.

    A folder and those inside it are one topic: they may import each other.
    """

    def node(name: str) -> str | None:
        while name:
            path = name.replace(".", "/")
            if f"{path}/__init__.py" in files:
                return name if "." in name else None  # the package itself gathers the names of all its folders
            if f"{path}.py" in files:
                parent = name.rpartition(".")[0]
                return parent if "." in parent else name
            name = name.rpartition(".")[0]
        return None

    edges: dict[str, set[str]] = defaultdict(set)
    for path, text in files.items():
        mine = node(module_of(path))
        for imported in imports(text):
            theirs = node(imported)
            if mine and theirs and not within(mine, theirs) and not within(theirs, mine):
                edges[mine].add(theirs)

    try:
        graphlib.TopologicalSorter(edges).prepare()
    except graphlib.CycleError as error:
        return [" -> ".join(error.args[1])]
    return []


# --- names ---------------------------------------------------------------------------------------------------------


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in OF_LIBRARIES


# Names of libraries: namedtuple, os, ctypes (`CDLL._name`), numpy and CuPy (`BitGenerator._state`).
OF_LIBRARIES = ("_replace", "_asdict", "_make", "_fields", "_fields_", "_exit", "_as_parameter_", "_name", "_state")


def private_names_that_cross(files: Sources) -> list[str]:
    """Uses of a name with a leading underscore outside the folder that defines it, and the folders in it."""
    homes: dict[str, set[str]] = defaultdict(set)
    for path, text in files.items():
        folder = folder_of(path)
        for node in nodes(text):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                homes[node.name].add(folder)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                    homes[node.attr].add(folder)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                homes[node.id].add(folder)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                homes[node.value].add(folder)  # __slots__
    results = []
    for path, text in files.items():
        folder = folder_of(path)
        for node in nodes(text):
            if isinstance(node, ast.Attribute) and is_private(node.attr):
                own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                own |= isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "super"
                at_home = any((folder + "/").startswith(home + "/") for home in homes[node.attr])
                if not own and homes[node.attr] and not at_home:
                    results.append(f"{path}:{node.lineno} uses .{node.attr} of {sorted(homes[node.attr])}")
        for imported in imports(text):
            parts = imported.split(".")
            for depth, part in enumerate(parts):
                home = "/".join(parts[:depth])
                if home + ".py" in files:
                    home = folder_of(home)
                if is_private(part) and parts[0] in PACKAGES and not (folder + "/").startswith(home + "/"):
                    results.append(f"{path} imports {imported}")
    return sorted(set(results))


# torch.device and torch.cuda.device; torch.nn.DataParallel and ours, which is DistributedDataParallel there.
NAMED_TWICE_BY_PYTORCH = ("device", "DataParallel")


def classes_defined_twice(files: Sources) -> list[str]:
    result = defaultdict(list)
    for path, text in files.items():
        for node in tree(text).body:
            if isinstance(node, ast.ClassDef):
                result[path.split("/")[0], node.name].append(path)
    return [
        f"{name}: {', '.join(paths)}"
        for (_, name), paths in sorted(result.items())
        if len(paths) > 1 and name not in NAMED_TWICE_BY_PYTORCH
    ]


# --- one place for each decision -----------------------------------------------------------------------------------


def comparisons_of_the_array_module(files: Sources) -> list[str]:
    """Code outside ddp/_cuda that asks whether arrays are NumPy's or CuPy's."""
    results = []
    for path, text in files.items():
        if folder_of(path).startswith("ddp/_cuda") or not path.startswith("ddp/"):
            continue
        for node in nodes(text):
            if isinstance(node, ast.Compare):
                sides = [ast.unparse(each) for each in (node.left, *node.comparators)]
                asked = any(side in ("np", "numpy", "cp", "cupy") for side in sides) and "None" not in sides
            else:
                asked = isinstance(node, ast.Attribute) and ast.unparse(node) in ("xp.__name__", "self.xp.__name__")
            if asked:
                results.append(f"{path}:{node.lineno}: {ast.unparse(node)}")
    return results


REGISTERS = ("ddp/_cuda/register.py", "ddp/_native/register.py")


def kernels_attached_elsewhere(files: Sources) -> list[str]:
    """Calls that give an op a device kernel or a native kernel outside the two registers."""
    call = re.compile(r"\.attach_(device|native)_kernel\(")
    return [path for path, text in files.items() if path not in REGISTERS and call.search(text)]


# --- the rules, and a violation that each catches --------------------------------------------------------------------

Rule = Callable[[Sources], list[str]]
RULES: dict[Rule, Sources] = {
    imports_from_above: {"ddp/ops/a.py": "from ddp.nn import Linear"},
    circles: {
        "ddp/nn/__init__.py": "",
        "ddp/nn/a.py": "import ddp.optim.b",
        "ddp/optim/__init__.py": "",
        "ddp/optim/b.py": "def f():\n    import ddp.nn.a",
    },
    private_names_that_cross: {
        "ddp/nn/a.py": "class A:\n    def __init__(self):\n        self._x = 1",
        "ddp/optim/b.py": "def f(a):\n    return a._x",
    },
    classes_defined_twice: {"ddp/nn/a.py": "class A: ...", "ddp/optim/b.py": "class A: ..."},
    comparisons_of_the_array_module: {"ddp/ops/a.py": "fast = xp is np"},
    kernels_attached_elsewhere: {"ddp/ops/a.py": "add.attach_device_kernel(forward, backward)"},
}


# Places that are still to be cleared; more is an error, and so is a number here that is larger than what is left.
LEFT = {comparisons_of_the_array_module: 1}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule(rule: Rule) -> None:
    assert len(rule(RULES[rule])) == 1, "the planted violation"
    offenders = rule(sources(*PACKAGES))
    assert len(offenders) == LEFT.get(rule, 0), f"{len(offenders)}:\n" + "\n".join(offenders)


# --- what importing costs ------------------------------------------------------------------------------------------

# Libraries, and the modules that may import them: each is loaded only where it is used.
HEAVY = {
    "mpi4py": ("collectives.backends.mpi", "launcher.bench.implementations", "launcher.doctor.probes"),
    "cupy": (
        "ddp._device",
        "ddp._cuda",
        "collectives.backends.device.cuda",
        "collectives.backends.nccl.library",
        "launcher.bench.implementations",
    ),
    "cudnn": ("ddp._cuda",),
    "pynccl": ("collectives.backends.nccl.library",),
    "tqdm": ("collectives.progress_bar",),
    "torch": ("collectives.torch", "launcher.bench.implementations"),
    "prometheus_client": ("launcher.console.metrics_server",),
    "matplotlib": ("ddp.tracing.step_picture", "launcher.bench.report"),
}


def test_a_library_is_imported_only_by_the_modules_that_speak_to_it() -> None:
    for library, users in HEAVY.items():
        for path, text in sources(*PACKAGES).items():
            if any(each.split(".")[0] == library for each in imports(text)):
                assert any(within(module_of(path), user) for user in users), f"{path} imports {library}"


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


def test_each_test_file_skips_itself() -> None:
    # pytest-xdist reports one file for each line that skips files: --skipped would leave out the others.
    skips = re.compile(r"^(\w+ = )?pytest\.(importorskip|skip)\(", re.MULTILINE)
    skipping = [Path(path).name for path, text in sources("tests").items() if skips.search(text)]
    assert skipping
    assert [name for name in skipping if not name.startswith("test_")] == []


def test_every_all_is_true() -> None:
    for path, text in sources(*PACKAGES).items():
        if "__all__ = " in text:
            module = importlib.import_module(module_of(path))  # ruff sorts it
            assert len(set(module.__all__)) == len(module.__all__), path
            assert all(hasattr(module, each) for each in module.__all__), path


# --- the reading order of docs/architecture.md ---------------------------------------------------------------------

READING_ORDER = (
    "ddp/_engine/graph.py",
    "ddp/_engine/backward_pass.py",
    "ddp/_engine/grad_buffer.py",
    "ddp/ops/op.py",
    "ddp/ops/elementwise.py",
    "ddp/_tensor/base.py",
    "ddp/parallel/buckets.py",
    "ddp/parallel/control.py",
    "ddp/parallel/reducer.py",
    "ddp/parallel/exchange.py",
    "ddp/parallel/data_parallel.py",
    "ddp/optim/formula_optimizer.py",
    "ddp/optim/formula.py",
    "ddp/optim/sgd.py",
)


def test_the_files_of_the_reading_order_are_named_in_it_and_short() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    places = [page.index(f"`{path}`") for path in READING_ORDER]
    assert places == sorted(places)
    lines = {path: len((ROOT / path).read_text().splitlines()) for path in READING_ORDER}
    assert sum(lines.values()) < 3_500, lines


def test_the_op_that_the_page_prints_is_that_of_the_code() -> None:
    from tests.docs.blocks import blocks  # not found where this file runs as a program

    (op,) = [block for block in blocks(ROOT / "docs" / "architecture.md") if "source" in block.words]
    assert op.code in (ROOT / "ddp" / "ops" / "elementwise.py").read_text()


if __name__ == "__main__":
    gc.disable()
    print(table())
