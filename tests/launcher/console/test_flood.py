"""Many lines from several ranks at once, through the real launcher: none is lost, none is torn."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

RANKS = 3

# Half of it comes as Python prints it, half in pieces that end anywhere but at the end of a line.
FLOOD = """
count = int(sys.argv[1])
for i in range(count // 2):
    print(f"{rank} {i:07d}", "x" * (i % 97))
text = "".join(f"{rank} {i:07d} {'x' * (i % 97)}\\n" for i in range(count // 2, count)).encode()
start = 0
while start < len(text):
    start += os.write(1, text[start : start + 7919])
"""


@pytest.mark.mpi
@pytest.mark.timeout(300)
def test_no_line_is_lost_or_torn(launch: Any, script: Any, count: Any, tmp_path: Path) -> None:
    each = count(5_000, 250_000)
    logs = tmp_path / "logs"
    words = ("-n", RANKS, "--log-dir", logs, script(FLOOD), each)
    lines = launch(*words, timeout=240, stderr=subprocess.STDOUT).stdout.splitlines()
    for rank in map(str, range(RANKS)):
        expected = [f"{rank} {i:07d} {'x' * (i % 97)}" for i in range(each)]
        shown = [line[3:] for line in lines if line[0] == rank]
        logged = (logs / "latest" / f"rank-{rank}.log").read_text().splitlines()
        # Not `==` in the assertion: pytest would explain a difference of a million lines for an hour.
        wrong = [name for name, got in (("shown", shown), ("logged", logged)) if got != expected]
        assert not wrong, f"rank {rank}"
