"""What the README and the docs show is run: a block that imports what it uses must work as it stands."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.conftest import Run

ROOT = Path(__file__).parent.parent
FILES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(code, id=f"{file.name}:{number}")
    for file in FILES
    for number, code in enumerate(re.findall(r"^```python\n(.*?)^```", file.read_text(), re.S | re.M))
    if "import " in code
]


@pytest.mark.parametrize("code", BLOCKS)
def test_a_block_runs(code: str, run_job: Run, tmp_path: Path) -> None:
    (tmp_path / "block.py").write_text(code)
    (tmp_path / "train.py").write_text("")  # what a block about launching launches
    done = run_job([sys.executable, "block.py"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_links_between_files_lead_somewhere() -> None:
    for file in FILES:
        for target in re.findall(r"\]\(([^)#]+)", file.read_text()):
            if "://" not in target:
                assert (file.parent / target).exists(), f"{file.name} links to {target}"


def test_the_messages_of_troubleshooting_exist() -> None:
    text = (ROOT / "docs/troubleshooting.md").read_text()
    code = "".join(
        path.read_text() for name in ("collectives", "ddp", "launcher") for path in (ROOT / name).rglob("*.py")
    )
    code = re.sub(r'"\s+f?"', "", code)  # a message that goes on in the next line
    for message in re.findall(r"^\| `([^`]+)`", text, re.M):
        assert message in code, f"no error says {message!r}"
