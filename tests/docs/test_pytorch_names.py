"""The table of names on the page for PyTorch's users is that of the code, and its names are PyTorch's."""

from __future__ import annotations

import importlib
import json
import re
import sys
from typing import Any

import pytest

import ddp
from tests.conftest import ROOT

sys.path.append(str(ROOT / "docs"))

pytorch_names = importlib.import_module("pytorch_names")


def test_the_page_has_the_table_of_the_code() -> None:
    shown = pytorch_names.PAGE.read_text().partition(pytorch_names.BEGIN)[2].partition(pytorch_names.END)[0]
    assert shown == pytorch_names.section(), "run python docs/pytorch_names.py"


def test_what_is_here_is_counted_and_what_is_not_is_named() -> None:
    assert pytorch_names.find("torch.nn", "ddp") is ddp.nn
    assert pytorch_names.find("torch.no.such", "ddp") is None
    section = pytorch_names.section()
    for path, names in json.loads(pytorch_names.NAMES.read_text())["names"].items():
        [(here, of)] = re.findall(rf"^\| `{path}` \| (\d+) \| (\d+) \|$", section, re.M)
        absent = re.findall(rf"^- \*\*{path}\*\*: (.*)$", section, re.M)
        assert (int(of), int(here)) == (len(names), len(names) - "".join(absent).count("`") // 2)


@pytest.mark.filterwarnings("ignore")  # of names that are deprecated
def test_names_are_those_that_pytorch_documents(torch: Any) -> None:
    version, known = json.loads(pytorch_names.NAMES.read_text()).values()
    if torch.__version__.partition("+")[0] != version:
        pytest.skip(f"the names are those of {version}")
    assert known == {path: list(pytorch_names.documented(path)) for path in pytorch_names.MODULES}
