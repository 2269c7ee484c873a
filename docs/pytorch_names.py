"""Makes the table in docs/from-pytorch.md of the names of PyTorch that are here, and the list of those that are not.

    python docs/pytorch_names.py            the table, of our code and docs/pytorch_names.json
    python docs/pytorch_names.py --names    docs/pytorch_names.json first, of the PyTorch that is installed

Names are those of documented functions and classes, `help` of which is not empty.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
PAGE = FOLDER / "from-pytorch.md"
NAMES = FOLDER / "pytorch_names.json"
BEGIN, END = "<!-- made by `python docs/pytorch_names.py` -->\n", "<!-- end -->\n"
MODULES = (
    "torch",
    "torch.Tensor",
    "torch.nn",
    "torch.nn.functional",
    "torch.nn.init",
    "torch.nn.utils",
    "torch.nn.utils.parametrizations",
    "torch.nn.utils.parametrize",
    "torch.nn.utils.rnn",
    "torch.optim",
    "torch.optim.lr_scheduler",
    "torch.optim.swa_utils",
    "torch.utils.data",
    "torch.utils.checkpoint",
    "torch.utils.tensorboard",
    "torch.autograd",
    "torch.autograd.functional",
    "torch.amp",
    "torch.cuda",
    "torch.distributed",
    "torch.distributions",
    "torch.fft",
    "torch.func",
    "torch.linalg",
    "torch.multiprocessing",
    "torch.special",
    "torch.testing",
)


def find(path: str, root: str) -> Any:
    """The module or class that a path of PyTorch's means in `root`, "torch" or "ddp"; None if it is not there."""
    found: Any = importlib.import_module(root)
    for name in path.split(".")[1:]:
        if not hasattr(found, name):
            try:
                importlib.import_module(f"{found.__name__}.{name}")
            except (ImportError, AttributeError):
                return None
        found = getattr(found, name)
    return found


def documented(path: str) -> Iterator[str]:
    """The names that PyTorch documents there."""
    owner = find(path, "torch")
    for name in sorted(getattr(owner, "__all__", dir(owner))):
        value = getattr(owner, name, None)
        # Classes of `torch._C` are those of the compiler and the profiler.
        private = name.startswith("_") or inspect.ismodule(value) or getattr(value, "__module__", "") == "torch._C"
        of_others = getattr(value, "__module__", None) in ("typing", "builtins", "warnings", "enum", "collections")
        if callable(value) and value.__doc__ and not (private or of_others) and hasattr(value, "__name__"):
            yield name


def section() -> str:
    """The table and the list."""
    version, known = json.loads(NAMES.read_text()).values()
    rows, missing = [], []
    for path, names in known.items():
        owner = find(path, "ddp")
        absent = [name for name in names if not hasattr(owner, name)]
        rows.append(f"| `{path}` | {len(names) - len(absent)} | {len(names)} |")
        if absent:
            missing.append(f"- **{path}**: " + ", ".join(f"`{name}`" for name in absent))
    table = [f"| PyTorch {version} | here | of documented names |", "| --- | --- | --- |", *rows]
    folded = ["<details><summary>The names that are not here</summary>", "", *missing, "", "</details>"]
    return "\n".join([*table, "", *folded, ""])


def main() -> None:
    if "--names" in sys.argv:
        import torch

        names = {path: list(documented(path)) for path in MODULES}
        lines = ",\n".join(f"  {json.dumps(path)}: {json.dumps(each)}" for path, each in names.items())
        version = torch.__version__.partition("+")[0]
        NAMES.write_text(f'{{"version": {json.dumps(version)}, "names": {{\n{lines}\n}}}}\n')
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + section() + END + rest.partition(END)[2])


if __name__ == "__main__":
    sys.path.insert(0, str(FOLDER.parent))
    main()
