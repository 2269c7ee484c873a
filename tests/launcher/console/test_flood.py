"""Many lines from several ranks at once, through the real launcher: none is lost, none is torn."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RANKS = 4

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
def test_no_line_is_lost_or_torn(
    start_job: Any, script: Callable[[str], str], count: Callable[[int, int], int], tmp_path: Path
) -> None:
    each = count(10_000, 250_000)
    command = [sys.executable, "-m", "launcher", "-n", str(RANKS), "--log-dir", str(tmp_path / "logs")]
    job = start_job([*command, script(FLOOD), str(each)], stderr=subprocess.STDOUT)
    done = job.wait(240)
    assert done.returncode == 0
    expected = {rank: [f"{rank} {i:07d} {'x' * (i % 97)}" for i in range(each)] for rank in range(RANKS)}
    actual: dict[int, list[str]] = {rank: [] for rank in range(RANKS)}
    for line in done.stdout.splitlines():
        actual[int(line[0])].append(line[3:])
    # Not `==` in the assertion: pytest would explain a difference of a million lines for an hour.
    assert [rank for rank in actual if actual[rank] != expected[rank]] == []
    logs = {rank: (tmp_path / f"logs/latest/rank-{rank}.log").read_text().splitlines() for rank in range(RANKS)}
    assert [rank for rank in logs if logs[rank] != expected[rank]] == []
