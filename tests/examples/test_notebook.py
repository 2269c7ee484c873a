"""The notebook runs from its first cell to its last, in a folder of its own, and shows what is stored in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

NOTEBOOK = ROOT / "examples/notebook.ipynb"


def kinds(notebook: Any) -> list[list[str]]:
    """Of the outputs of each cell."""
    return [[output["output_type"] for output in cell.get("outputs", [])] for cell in notebook.cells]


@pytest.mark.mpi
@pytest.mark.long  # three kernels of IPython, and matplotlib
@pytest.mark.filterwarnings("default")  # of the notebook's own libraries
def test_the_notebook_runs(tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    stored = kinds(notebook)
    client = nbclient.NotebookClient(
        notebook, timeout=90, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    client.execute()
    assert kinds(notebook) == stored
    shown = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    text = "".join(output.get("text", "") + output.get("data", {}).get("text/plain", "") for output in shown)
    assert "[(0, 3.0), (1, 3.0)]" in text
    assert "its module was wrapped again" in text
    assert sum("image/png" in output.get("data", {}) for output in shown) == 2, "a loss curve and a step"
