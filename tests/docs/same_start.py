"""Runs a whole program of ours from weights that the other library's program has too: `same_start.py SCRIPT`."""

from __future__ import annotations

import runpy
import sys
from typing import Any

import ddp
from ddp import nn
from tests.docs.snippets import start_alike

if __name__ == "__main__":
    kind: Any = nn.Linear
    kind.reset_parameters = start_alike(ddp)
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
