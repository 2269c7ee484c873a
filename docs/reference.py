"""Makes the pages of the API reference: api/MODULE.rst, and for large modules one page per group of names.

Names that one file of the code defines are a group. The pages are made anew by every build and are not committed.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections import defaultdict
from pathlib import Path
from typing import Any

import ddp

MODULES = (
    "collectives",
    "collectives.progress_bar",
    "ddp",
    "ddp.accelerator",
    "ddp.amp",
    "ddp.autograd",
    "ddp.autograd.functional",
    "ddp.backends",
    "ddp.checkpoint",
    "ddp.cuda",
    "ddp.data",
    "ddp.distributed",
    "ddp.distributions",
    "ddp.distributions.constraints",
    "ddp.distributions.transforms",
    "ddp.errors",
    "ddp.fft",
    "ddp.func",
    "ddp.hub",
    "ddp.jit",
    "ddp.linalg",
    "ddp.metrics",
    "ddp.multiprocessing",
    "ddp.nn",
    "ddp.nn.functional",
    "ddp.nn.init",
    "ddp.nn.utils",
    "ddp.nn.utils.parametrizations",
    "ddp.nn.utils.parametrize",
    "ddp.optim",
    "ddp.optim.lr_scheduler",
    "ddp.optim.swa_utils",
    "ddp.parallel",
    "ddp.parallel.comm_hooks",
    "ddp.serialization",
    "ddp.special",
    "ddp.testing",
    "ddp.tracing",
    "launcher",
)
OURS = ("collectives", "ddp", "launcher")
LARGE = 25  # names; a module with more of them has a page per group
SHARED = {"ddp.nn.functional": "ddp.nn"}  # a layer and its function are on one page
# Titles of groups by the file that defines their names, in this order. Other files give a group their own name.
TITLES = {
    "ddp._tensor.core": "Tensor",
    "ddp._tensor.base": "Tensor",
    "ddp._tensor.complex_numbers": "Complex numbers",
    "ddp._tensor.creation": "Creation",
    "ddp._tensor.elementwise": "Elementwise",
    "ddp._tensor.reductions": "Reductions",
    "ddp._tensor.linear_algebra": "Linear algebra",
    "ddp._tensor.shapes": "Shapes",
    "ddp._tensor.indexing": "Indexing",
    "ddp._tensor.functions": "Joining and broadcasting",
    "ddp._tensor.gradients": "Gradients",
    "ddp._engine.modes": "Gradients",
    "ddp._tensor.sampling": "Random numbers",
    "ddp._tensor.interop": "Other libraries",
    "ddp._tensor.storage": "Conversion and storage",
    "ddp._device": "Devices, dtypes, printing",
    "ddp._tensor.dtypes": "Devices, dtypes, printing",
    "ddp._tensor.printing": "Devices, dtypes, printing",
    "ddp._tensor.results": "Devices, dtypes, printing",
    "ddp.ops.memory_formats": "Devices, dtypes, printing",
    "ddp.data.dataloader": "DataLoader",
    "ddp.data.fetching": "DataLoader",
    "ddp.data.collate": "DataLoader",
    "ddp.data.distributed_sampler": "Samplers",
    "ddp.data.rank0": "Data files",
    "ddp.cuda._graphed_step": "Graphs",
    "ddp": "Tensors of one dtype",
}


def write(folder: Path) -> None:
    """Writes the pages below `folder`. A page that is as it should be is not touched: Sphinx reads it once only."""
    made = {folder / f"{name}.rst": text for name, text in pages().items()}
    for path in set(folder.rglob("*.rst")) - set(made):
        path.unlink()
    for path, text in made.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def pages() -> dict[str, str]:
    """The text of each page, by its path below api/, without suffix."""
    made: dict[str, str] = {}
    on_page: dict[str, list[str]] = defaultdict(list)
    for module in MODULES:
        groups: dict[str, list[str]] = defaultdict(list)
        for name in sorted(documented(module), key=lambda name: order(module, name)):
            owner = documented_in(module, name)
            page = page_of(owner, name)
            groups[page].append(f"{owner}.{name}")
            if owner == module:
                on_page[page].append(f"{owner}.{name}")
        text = [heading(module, "="), f".. automodule:: {module}\n   :no-members:\n"]
        others = ", ".join(f"``{name}``" for name in public(module) if is_of_others(module, name))
        text += [f"Also here: {others}.\n"] if others else []
        if is_split(module):
            own = [page for page in groups if page.startswith(f"{module}/")]
            text += [".. toctree::\n   :hidden:\n", *(f"   /api/{page}" for page in own), ""] if own else []
            for page, names in groups.items():
                text += [f".. rubric:: :doc:`/api/{page}`\n", summary(names)]
        else:
            text.append(summary([name for names in groups.values() for name in names]))
            text += map(entry, on_page.pop(module, []))
        made[module] = "\n".join(text)
    for page, names in on_page.items():
        text = [heading(title_of(*names[0].rsplit(".", 1)), "=")]
        text += [summary(names), *map(entry, names)] if names != ["ddp.Tensor"] else tensor()
        made[page] = "\n".join(text)
    return made


def tensor() -> list[str]:
    """What follows the title of the page of `ddp.Tensor`: its methods by the file that defines them."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in dir(ddp.Tensor):
        if not name.startswith("_") and inspect.getdoc(getattr(ddp.Tensor, name)):
            groups[title_of_file(method_file(name))].append(f"ddp.Tensor.{name}")
    text = [".. autoclass:: ddp.Tensor\n   :no-members:\n"]
    for title in dict.fromkeys([*TITLES.values(), *groups]):
        if title in groups:
            text += [] if title == "Tensor" else [heading(title, "-")]
            text += [summary(groups[title]), *map(entry, groups[title])]
    return text


@functools.cache
def public(module: str) -> list[str]:
    loaded = importlib.import_module(module)
    defined = [name for name, value in vars(loaded).items() if getattr(value, "__module__", None) == module]
    return sorted(getattr(loaded, "__all__", [name for name in defined if not name.startswith("_")]))


def value_of(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def is_ours(module: str, name: str) -> bool:
    """Whether it is a class or function of ours, which the reference documents."""
    return callable(value_of(module, name)) and file_of(module, name).split(".")[0] in OURS


def is_of_others(module: str, name: str) -> bool:
    """Whether it is a constant, or a class or function that is documented by the library that it comes from."""
    return not is_ours(module, name) and not inspect.ismodule(value_of(module, name))


def documented(module: str) -> list[str]:
    return [name for name in public(module) if is_ours(module, name)]


def file_of(module: str, name: str) -> str:
    """The module that defines it; for functions that are methods of tensors, too, the one that defines the method."""
    defined = getattr(value_of(module, name), "__module__", None) or ""
    if defined == "ddp._tensor.functions" and hasattr(ddp.Tensor, name):
        file = method_file(name)
        return "ddp._tensor.shapes" if file == "ddp._tensor.core" else file  # numel
    return defined


def method_file(name: str) -> str:
    """The module of the last class of Tensor's bases that has a method of this name."""
    return [base.__module__ for base in ddp.Tensor.__mro__ if name in vars(base)][-1]


@functools.cache
def documented_in(module: str, name: str) -> str:
    """The module below whose name it is documented: the nearest to its file that has it."""
    value = value_of(module, name)
    path = getattr(value, "__module__", "") + "."
    having = [
        other
        for other in MODULES
        if path.startswith(other + ".") and name in public(other) and value_of(other, name) is value
    ]
    return max(having, key=len, default=module)


@functools.cache
def is_split(module: str) -> bool:
    names = documented(module)
    return len(names) > LARGE and len({title_of(module, name) for name in names}) > 1


def page_of(module: str, name: str) -> str:
    if not is_split(module):
        return module
    return f"{SHARED.get(module, module)}/{title_of(module, name).lower().replace(',', '').replace(' ', '-')}"


def title_of(module: str, name: str) -> str:
    return title_of_file(file_of(module, name))


def title_of_file(path: str) -> str:
    return TITLES.get(path) or path.rpartition(".")[2].strip("_").replace("_", " ").capitalize()


def order(module: str, name: str) -> tuple[int, str, str]:
    """Groups as TITLES has them, then the others, then what is documented in another module."""
    title = title_of(module, name)
    titles = list(TITLES.values())
    place = titles.index(title) if title in titles else len(titles)
    return (place if documented_in(module, name) == module else len(titles) + 1, title, name)


def heading(text: str, line: str) -> str:
    return f"{text}\n{line * len(text)}\n"


def summary(names: list[str]) -> str:
    """A table of names, each with the first sentence of what it is."""
    table = [".. autosummary::", "   :nosignatures:", "", *(f"   ~{name}" for name in names), ""]
    return "\n".join([".. currentmodule:: None", "", *table])  # names are whole


def entry(full: str) -> str:
    module, _, name = full.rpartition(".")
    if module == "ddp.Tensor":
        kind = "method" if callable(getattr(ddp.Tensor, name)) else "property"
    else:
        value = value_of(module, name)
        kind = "function" if not inspect.isclass(value) else "class"
        kind = "exception" if kind == "class" and issubclass(value, BaseException) else kind
    return f".. auto{kind}:: {full}\n"
